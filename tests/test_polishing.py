"""Polishing: its gradients against finite differences, both hosts, the trained family, and what must not happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import hf, model_hosts, small, twin

import crosskv
from crosskv import backends, family, polishing
from crosskv.errors import BadInput, IncompatibleModels
from crosskv.evals import arms, run
from crosskv.judging import Judge

CONFIG = crosskv.MapperConfig(k="all", ridge_lambda=1e-3, n_calib_sequences=40, calib_seq_len=100, stride=1,
                              features="both", exact_layers=1, latent=24, dtype="float32")  # fmt: skip
RNG = np.random.default_rng(0)
TEXT = [RNG.integers(0, 128, 4000).tolist()]
SHORT: dict[str, Any] = {"length": 40, "window": 8, "batch": 2, "progress": False}


def _fit(source: Any, target: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return crosskv.fit(source, target, TEXT, config=replace(CONFIG, **changes), progress=False)


@pytest.mark.parametrize("host", model_hosts())
def test_gradients_equal_finite_differences(host: str) -> None:
    """Along random directions, at a point that is not the start."""
    source, target = small(host, layers=3), small(host, layers=4, seed=7)
    judge = Judge(source, target, 40, 8)
    work = polishing._Work(_fit(source, target), judge)
    b, rng = backends.of(target), np.random.default_rng(1)
    example = judge.example(np.array(TEXT[0][:80]).reshape(2, 40), (5, 20))
    z, want = work.latents(example), judge.said(example.own, example)

    def kl(p: Any) -> Any:
        return work.kl(p, example, z, want).mean()

    def drawn() -> dict[str, Any]:
        return {k: b.from_numpy(rng.standard_normal(x.shape).astype(np.float32), x) for k, x in work.zero().items()}

    at = {k: 0.3 * x for k, x in drawn().items()}
    value, grads = b.value_and_grad(kl, at)
    assert value == pytest.approx(float(b.to_numpy(kl(at))), rel=1e-5)
    assert value > 0.01  # there is something to differentiate
    for name in ("weight", "bias"):
        way = {k: x * (k == name) for k, x in drawn().items()}
        step = 0.02
        ends = [{k: at[k] + s * step * way[k] for k in at} for s in (1, -1)]
        up, down = (float(b.to_numpy(kl(p))) for p in ends)
        slope = (up - down) / (2 * step)
        got = sum(float((b.to_numpy(grads[k]) * b.to_numpy(way[k])).sum()) for k in grads)
        assert got == pytest.approx(slope, rel=0.02, abs=1e-4)


def test_both_hosts_take_the_same_steps() -> None:
    source, target = hf("Llama", num_hidden_layers=3), hf("Llama", 7)
    pairs = {"torch": (source, target), "mlx": (twin("llama", source, num_hidden_layers=3), twin("llama", target))}
    mapper = _fit(source, target)
    found = {h: crosskv.polish(mapper, *pair, TEXT, steps=6, **SHORT) for h, pair in pairs.items()}
    about = {h: m.provenance["polish"] for h, m in found.items()}
    assert about["torch"]["held_out_kl"] == pytest.approx(about["mlx"]["held_out_kl"], rel=1e-3)
    assert about["torch"]["held_out_kl"] < about["torch"]["held_out_kl_before"]
    for t in mapper.layers:
        for a, b, old in zip(found["torch"].weights(t), found["mlx"].weights(t), mapper.weights(t), strict=True):
            (x, _), (y, _), (z, _) = a.unpacked(), b.unpacked(), old.unpacked()
            assert np.abs(x - y).max() < 0.05 * np.abs(x - z).max()


@pytest.fixture(scope="module")
def family_pair(family_model) -> tuple[Any, Any, Any, Any]:
    """(S, M, the tokenizer, a mapper with a latent)."""
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=64, calib_seq_len=256, stride=1,
                                  features="both", exact_layers=1, latent=128)  # fmt: skip
    text = family.text("calibration")[:200_000]
    return source, target, tokenizer, crosskv.fit(source, target, text, tokenizer, config, progress=False)


def test_polishing_recovers_more_of_the_gap_on_books_it_never_saw(family_pair, tmp_path) -> None:
    source, target, tokenizer, mapper = family_pair
    text = family.text("calibration")[:200_000]
    polished = crosskv.polish(mapper, source, target, text, tokenizer, steps=40, length=192, window=32, progress=False)
    about = polished.provenance["polish"]
    assert about["held_out_kl"] < 0.95 * about["held_out_kl_before"]
    passages = run.rows(tokenizer.encode, family.text("heldout"), 16, 192 + 48)
    before, after = (arms.score(m, source, target, passages, 192) for m in (mapper, polished))
    assert after.kl["mapped"].mean() < 0.97 * before.kl["mapped"].mean()
    assert after.nll["mapped"].mean() < before.nll["mapped"].mean()
    assert after.nll["mapped"].mean() < min(after.nll[a].mean() for a in ("none", "wrong document", "zero"))
    again = crosskv.load(polished.save(tmp_path / "m"))
    assert again.provenance["polish"] == about and again.layers == polished.layers


def test_never_worse_than_the_closed_form(family_pair) -> None:
    source, target, tokenizer, mapper = family_pair
    text = family.text("calibration")[:60_000]
    same = crosskv.polish(mapper, source, target, text, tokenizer, steps=25, rate=30.0, length=64, window=8,
                          progress=False)  # fmt: skip
    about = same.provenance["polish"]
    assert about["held_out_kl"] == about["held_out_kl_before"]
    for t in mapper.layers:
        assert all(a is b for a, b in zip(same.weights(t), mapper.weights(t), strict=True))


def test_resumed_and_repeated_runs_are_the_same(tmp_path, monkeypatch) -> None:
    source, target = small("torch", layers=3), small("torch", layers=4, seed=7)
    mapper = _fit(source, target)
    monkeypatch.setattr(polishing, "CHECK_EVERY", 4)
    options: dict[str, Any] = SHORT | {"steps": 12}
    want = crosskv.polish(mapper, source, target, TEXT, **options)
    assert want.provenance["polish"]["held_out_kl"] < want.provenance["polish"]["held_out_kl_before"]
    real = polishing._Work.stepped

    def failing(self: Any, s: Any, *args: Any) -> Any:
        if s.step == 6:
            raise KeyboardInterrupt
        return real(self, s, *args)

    monkeypatch.setattr(polishing._Work, "stepped", failing)
    with pytest.raises(KeyboardInterrupt):
        crosskv.polish(mapper, source, target, TEXT, checkpoint=tmp_path / "c", **options)
    monkeypatch.setattr(polishing._Work, "stepped", real)
    with pytest.raises(BadInput, match="resume=True"):
        crosskv.polish(mapper, source, target, TEXT, checkpoint=tmp_path / "c", **options)
    with pytest.raises(BadInput, match="another mapper, text or setting"):
        crosskv.polish(mapper, source, target, TEXT, checkpoint=tmp_path / "c", resume=True, **options | {"seed": 1})
    got = crosskv.polish(mapper, source, target, TEXT, checkpoint=tmp_path / "c", resume=True, **options)
    other = crosskv.polish(mapper, source, target, TEXT, **options | {"seed": 1})
    for t in mapper.layers:
        for a, b, c in zip(got.weights(t), want.weights(t), other.weights(t), strict=True):
            np.testing.assert_array_equal(a.weight, b.weight)
            assert (a.weight != c.weight).any()


def test_bad_input_is_named() -> None:
    source, target = small("torch", layers=3), small("torch", layers=4, seed=7)
    mapper = _fit(source, target)
    with pytest.raises(BadInput, match="fit it with latent=512"):
        crosskv.polish(_fit(source, target, latent=None), source, target, TEXT, **SHORT)
    with pytest.raises(BadInput, match="window must be from 1 to length - 4"):
        crosskv.polish(mapper, source, target, TEXT, **SHORT | {"window": 40})
    with pytest.raises(BadInput, match="Too little text: 1 sequences of 40"):
        crosskv.polish(mapper, source, target, [TEXT[0][:60]], **SHORT)
    with pytest.raises(IncompatibleModels, match="not that model"):
        crosskv.polish(mapper, source, small("torch", layers=4, seed=8), TEXT, **SHORT)
