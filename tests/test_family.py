"""The shipped models: same in both hosts, and as good as their cards say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from crosskv import backends, family
from crosskv.errors import BadArtifact, BadInput
from crosskv.evals import run

SAMPLE_ROWS = {"count": 8, "length": 512}  # as in scripts/train_family.py
SAMPLE = {"cases": 4, "lengths": (500,)}


def logits_of(model) -> run.Logits:
    b = backends.of(model)
    return lambda ids: b.to_numpy(b.logits(model, [list(ids)]))[0]


@pytest.mark.parametrize("name", family.NAMES)
def test_the_card_is_true(name, family_model):
    model, tokenizer = family_model(name, "torch")
    text = family.text("heldout")
    got = run.measure(
        logits_of(model), tokenizer.encode, run.rows(tokenizer.encode, text, **SAMPLE_ROWS), text, **SAMPLE
    )
    want = family.card(name)["sample"]
    assert got["nll"] == pytest.approx(want["nll"], abs=1e-3)
    assert got["accuracy"] == want["accuracy"]


@pytest.mark.parametrize("name", family.NAMES)
def test_hosts_agree(name, family_model):
    """Float32 logits of transformers and mlx-lm differ by rounding only, scaled RoPE (model M) included."""
    (one, tokenizer), (other, theirs) = family_model(name, "torch"), family_model(name, "mlx")
    ids = tokenizer.encode(family.text("heldout")[3000:5000])
    assert ids == theirs.encode(family.text("heldout")[3000:5000]) and len(ids) > 512
    a, b = (logits_of(m)(ids) for m in (one, other))
    layers = family.card(name)["plan"]["layers"]
    # Each layer adds rounding of a few eps times sqrt(width) to a residual stream; 64 eps per layer is ample.
    assert np.abs(a - b).max() <= 64 * layers * np.finfo(np.float32).eps * np.abs(a).max()


def test_sizes_are_ordered(family_model):
    """Held-out NLL S > M > L with gaps far above their own noise, measured anew; the cards say so too."""
    text = family.text("heldout")
    tokenizer = family_model("S", "torch")[1]
    rows = run.rows(tokenizer.encode, text, **SAMPLE_ROWS)
    per = {n: np.array([run.token_nll(logits_of(family_model(n, "torch")[0]), r.tolist()).mean() for r in rows])
           for n in family.NAMES}  # fmt: skip
    for larger, smaller in (("M", "S"), ("L", "M")):
        gap = per[smaller] - per[larger]
        assert gap.mean() > 4 * gap.std(ddof=1) / np.sqrt(len(gap)), (smaller, larger, gap)
        assert family.card(smaller)["full"]["nll"] > family.card(larger)["full"]["nll"]


def test_l_looks_things_up_and_s_is_clearly_below():
    s, l = (family.card(n)["full"]["accuracy"] for n in ("S", "L"))  # noqa: E741
    assert l["needle@1500"] >= 0.9
    behind = [t for t in l if t.endswith("@1500") and s[t] < l[t] - 0.2]
    assert len(behind) >= 3, behind


def test_one_kv_shape_three_ropes():
    configs = [json.loads((family.path(n) / "config.json").read_text()) for n in family.NAMES]
    assert {(c["num_key_value_heads"], c["head_dim"], c["vocab_size"]) for c in configs} == {(4, 64, 4096)}
    assert len({c["rope_parameters"]["rope_theta"] for c in configs}) == 3
    assert configs[1]["rope_parameters"]["rope_type"] == "yarn"
    tokenizers = {(family.path(n) / "tokenizer.json").read_bytes() for n in family.NAMES}
    assert len(tokenizers) == 1


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "S"
    copy.mkdir()
    for file in family.path("S").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(family, "HERE", tmp_path)
    family.check("S")
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("10000.0", "20000.0"))
    with pytest.raises(BadArtifact, match=r"family model S: config.json has SHA-256 .*, expected .*; reinstall"):
        family.load("S")
    (copy / "config.json").unlink()
    with pytest.raises(BadArtifact, match="config.json is missing"):
        family.load("S")


def test_unknown_names_are_refused():
    with pytest.raises(BadInput, match="S, M, L; got 'XL'"):
        family.path("XL")
    with pytest.raises(BadInput, match="Expected one of the hosts"):
        family.load("S", backend="jax")
    with pytest.raises(BadInput, match="shipped texts"):
        family.text("train")
