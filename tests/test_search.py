"""--auto: what is tried fits the budget, is judged by KL on held-out text, and the smallest of the best is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import model_hosts, small

import crosskv
from crosskv import search
from crosskv.errors import BadInput
from crosskv.judging import Judge, split
from crosskv.live import sequences

CONFIG = crosskv.MapperConfig(n_calib_sequences=40, calib_seq_len=64, stride=1)
TEXT = [np.random.default_rng(0).integers(0, 128, 4000).tolist()]


def _auto(source: Any, target: Any, **limits: Any) -> Any:
    return crosskv.fit_auto(source, target, TEXT, config=CONFIG, progress=False, **limits)


@pytest.mark.parametrize("host", model_hosts())
def test_the_chosen_mapper_is_the_one_it_says(host: str, tmp_path: Any) -> None:
    source, target = small(host, layers=3), small(host, layers=4, seed=7)
    mapper = _auto(source, target)
    tried = mapper.provenance["tried"]
    assert {(t["features"], t["k"]) for t in tried if not t["latent"]} == {
        (f, k) for f in ("own", "both") for k in (1, 2, 3)
    }
    assert [t["latent"] for t in tried if t["latent"]] == [64]  # 128 would be no smaller than a full map
    (chosen,) = [t for t in tried if t["chosen"]]
    best = min(tried, key=lambda t: t["kl"])
    assert chosen["weights"] == mapper.n_parameters and chosen["kl"] <= best["kl"] + best["se"] + chosen["se"]
    # judged by hand, on the sequences that the fit held out
    ids = np.array(list(sequences(TEXT, None, 64))[:40])
    judge = Judge(source, target, 64, 16)
    kl = judge.kl(mapper, judge.examples(ids[split(40)[0]], 4))
    assert kl.shape == (4,) and float(kl.mean()) == pytest.approx(chosen["kl"], rel=1e-6)
    assert crosskv.load(mapper.save(tmp_path / "m")).provenance["tried"] == tried


def test_budgets_are_kept_and_the_impossible_is_named() -> None:
    source, target = small("torch", layers=3), small("torch", layers=4, seed=7)
    free = _auto(source, target)
    some = sorted(t["weights"] for t in free.provenance["tried"])[2]
    tight = _auto(source, target, max_bytes=2 * some)
    assert max(t["weights"] for t in tight.provenance["tried"]) <= some + 4 * 3 * 32  # biases are not counted
    assert len(tight.provenance["tried"]) < len(free.provenance["tried"])
    fewer = _auto(source, target, max_operations=some)
    assert [t["weights"] for t in fewer.provenance["tried"]] == [t["weights"] for t in tight.provenance["tried"]]
    with pytest.raises(BadInput, match="No mapper fits max_bytes=10"):
        _auto(source, target, max_bytes=10)


def test_with_little_text_only_small_maps_are_tried() -> None:
    source, target = small("torch", layers=3), small("torch", layers=4, seed=7)
    few = crosskv.fit_auto(source, target, [TEXT[0][: 4 * 64]], config=CONFIG, progress=False)  # 189 rows
    tried = [(t["features"], t["k"]) for t in few.provenance["tried"]]
    assert sorted(tried) == [("both", 1), ("own", 1), ("own", 2), ("own", 3)]
    with pytest.raises(BadInput, match="Too few rows: 0"):
        crosskv.fit_auto(source, target, [TEXT[0][:64]], config=CONFIG, progress=False)


def test_the_smallest_within_one_standard_error_is_chosen() -> None:
    class Fake:
        def __init__(self, n: int):
            self.n_parameters, self.provenance = n, {"mean_held_out_r2": 0.5}
            self.config = CONFIG
            self.layers = {1: type("L", (), {"sources": (0,)})()}

        def with_provenance(self, more: Any) -> Any:
            self.provenance |= more
            return self

    base = np.array([0.10, 0.20, 0.30, 0.40])
    noisy = base + np.array([0.03, -0.02, 0.02, -0.01])  # +.005 +- .0125: as good
    worse = base + np.array([0.02, 0.021, 0.019, 0.02])  # +.02, surely worse although the means overlap
    chosen = search._chosen([(Fake(100), base), (Fake(50), noisy), (Fake(10), worse)])  # type: ignore[list-item]
    assert chosen.n_parameters == 50


def test_auto_from_the_command_line(tmp_path: Any) -> None:
    import json

    from test_cli import crosskv as command

    from crosskv import family

    text = tmp_path / "text.txt"
    text.write_text(family.text("calibration")[:120_000])
    fit = ("fit", "family:S", "family:M", "--data", text, "-o", tmp_path / "a", "--sequences", 40, "--length", 256,
           "--stride", 1)  # fmt: skip
    done = command(*fit, "--max-bytes", "400k")
    assert done.returncode == 1 and "add --auto" in done.stderr
    done = command(*fit, "--auto", "--max-bytes", "two")
    assert done.returncode == 1 and "500k, 8M or 1.5G" in done.stderr
    done = command(*fit, "--auto", "--max-bytes", "2M", "--json")
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)["provenance"]["tried"]
    assert [t["latent"] for t in tried] == [64, 128]
    assert (tmp_path / "a" / "mapper.safetensors").stat().st_size < 2.1e6
