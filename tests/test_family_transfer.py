"""Transfer on the trained family, through the public door, in both hosts, with the controls that a claim needs."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import greedy

import crosskv
from crosskv import backends, family
from crosskv.evals import arms, run

PREFIX, CONTINUATION = 192, 48


@pytest.fixture(scope="module")
def passages(family_model):
    tokenizer = family_model("L", "torch")[1]
    return run.rows(tokenizer.encode, family.text("heldout"), 12, PREFIX + CONTINUATION)


@pytest.fixture(scope="module")
def mapper(family_model, tmp_path_factory):
    """S -> M, fitted in torch on a part of the shipped text and saved."""
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=64, calib_seq_len=256, stride=1)
    fitted = crosskv.fit(source, target, family.text("calibration")[:200_000], tokenizer, config, progress=False)
    return fitted.save(tmp_path_factory.mktemp("mapper") / "S-M")


@pytest.fixture(scope="module")
def scores(mapper, family_model, passages):
    source, target = family_model("S", "torch")[0], family_model("M", "torch")[0]
    return arms.score(crosskv.load(mapper), source, target, passages, PREFIX)


@pytest.mark.parametrize("host", ["torch", "mlx"])
@pytest.mark.parametrize("name", ["S", "M"])
def test_own_cache_installed_again_writes_the_same_tokens(name, host, family_model, passages):
    model = family_model(name, host)[0]
    b = backends.of(model)
    ids = passages[:1, :64]
    cache = b.install(model, b.capture(model, ids[:, :-1]))
    assert greedy(model, ids[:, -1:], cache, 16) == greedy(model, ids, None, 16)


def test_identity_arm_is_exact(scores, family_model, passages):
    """The own cache, taken out and installed, scores as the target reading the whole passage at once."""
    model = family_model("M", "torch")[0]
    b = backends.of(model)
    for i in range(3):
        logits = b.to_numpy(b.logits(model, passages[i : i + 1]))[0]
        cold = run.token_nll(lambda _, x=logits: x, passages[i].tolist())[PREFIX - 1 :]
        np.testing.assert_allclose(scores.nll["own"][i], cold, atol=2e-4)
    assert scores.kl["own"].max() == 0 and scores.agree["own"].all()


def test_a_mapped_cache_beats_every_control(scores):
    nll = {arm: x.mean() for arm, x in scores.nll.items()}
    assert nll["own"] < nll["mapped"] < min(nll[a] for a in ("none", "wrong document", "raw copy", "zero"))
    gap = {r["arm"]: r["gap"] for r in scores.rows()}
    assert gap["own"] == 1 and gap["none"] == 0 and gap["mapped"] > 0.2


def test_saved_in_torch_used_in_mlx(mapper, scores, family_model, passages):
    """The same artifact gives the same likelihoods in the other host, up to rounding."""
    source, target = family_model("S", "mlx")[0], family_model("M", "mlx")[0]
    again = arms.score(crosskv.load(mapper), source, target, passages[:4], PREFIX)
    np.testing.assert_allclose(again.nll["mapped"], scores.nll["mapped"][:4], atol=2e-3)


def test_broken_arms_are_caught(mapper, family_model, passages):
    """Heads shifted by one in the source's cache: the mapped arm falls below having no context at all."""
    source, target = family_model("S", "torch")[0], family_model("M", "torch")[0]
    b = backends.of(source)
    opened = crosskv.load(mapper)
    ids = passages[:6]
    theirs = b.capture(source, ids[:, : PREFIX - 1])
    shifted = {i: (k.roll(1, 1), v.roll(1, 1)) for i, (k, v) in theirs.items()}

    def nll(layers):
        h = crosskv.handoff(opened, source, target, ids[:, :PREFIX], source_cache=b.install(source, layers))
        logits = crosskv.metrics.continuation_logits(target, ids[:, PREFIX - 1 : PREFIX], ids[:, PREFIX:], h.cache)
        return crosskv.metrics.nll(logits, ids[:, PREFIX:]).mean()

    assert nll(theirs) < nll(shifted) - 0.05
