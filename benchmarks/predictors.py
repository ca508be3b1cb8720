"""Does held-out R2, or the attention-output cosine, tell how much a transfer keeps? Over pairs and settings.

    python benchmarks/predictors.py            # six pairs of the family, k = 1, 2 and all; about 15 minutes
    python benchmarks/predictors.py --table    # from the committed rows

A point is a pair and a k. R2: the mapper's own, mean of keys and values over layers. Cosine and KL: `crosskv screen`.
Retention (perplexity of the own cache over that of the mapped one) and gap recovered: `crosskv eval`, task nll. All on
the same held-out passages. Pearson's r with Fisher's 95 % interval over the points, which share models and passages:
the intervals are too narrow rather than too wide.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import family
from crosskv.evals import arms, retention, rows, run, screen

RESULTS = Path(__file__).parent.parent / "results" / "predictors.jsonl"
KS = (1, 2, "all")
PREFIX, CONTINUATION, PASSAGES = 256, 64, 12
PREDICTORS, OUTCOMES = ("R2", "cosine", "KL"), ("retention", "gap")


def points(source: str, target: str) -> list[dict[str, Any]]:
    """One row per k, from one reading of the calibration text."""
    (one, tokenizer), (other, _) = family.load(source), family.load(target)
    passages = run.rows(tokenizer.encode, family.text("heldout"), PASSAGES, PREFIX + CONTINUATION)
    out = []
    with tempfile.TemporaryDirectory() as directory:
        for k in KS:
            config = crosskv.MapperConfig(k=k, ridge_lambda="auto", n_calib_sequences=64, calib_seq_len=512, stride=1)
            mapper = crosskv.fit(one, other, family.text("calibration"), tokenizer, config,
                                 checkpoint=Path(directory) / "moments", resume=True, progress=False)  # fmt: skip
            out += measured(mapper, one, other, passages, {"pair": f"{source}->{target}", "k": k})
            print(
                *(f"{r['setting']['pair']} k={k} {r['metric']} {r['value']:.3f}" for r in out[-5:]),
                sep="; ",
                flush=True,
            )
    return out


def measured(mapper: Any, source: Any, target: Any, passages: np.ndarray, setting: dict[str, Any]) -> list[dict]:
    scores = {r["arm"]: r for r in arms.score(mapper, source, target, passages, PREFIX).rows()}
    found = screen.screen(mapper, source, target, passages, PREFIX, arms=("own", "mapped", "none"))
    r2 = [getattr(m, f"r2_{kind}") for m in mapper.layers.values() for kind in ("keys", "values")]
    values = {
        "R2": float(np.mean(r2)),
        "cosine": float(found.cosine["mapped"].mean()),
        "KL": float(found.kl["mapped"].mean()),
        "retention": float(np.exp(scores["own"]["nll"] - scores["mapped"]["nll"])),
        "gap": scores["mapped"]["gap"],
    }
    return [rows.row("predictors", setting, name, x, "nats" if name == "KL" else "share", n=len(passages))
            for name, x in values.items()]  # fmt: skip


def correlations(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by: dict[tuple, dict[str, float]] = {}
    for r in found:
        by.setdefault((r["setting"]["pair"], str(r["setting"].get("k"))), {})[r["metric"]] = r["value"]
    out = []
    for x, y in itertools.product(PREDICTORS, OUTCOMES):
        r, low, high = retention.correlation([(p[x], p[y]) for p in by.values()])
        setting = {"predictor": x, "outcome": y, "pairs": "all"}
        out.append(rows.row("predictors", setting, "Pearson r", r, "", low=low, high=high, n=len(by)))
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--table", action="store_true")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    if not a.table:
        found = [r for pair in itertools.permutations(family.NAMES, 2) for r in points(*pair)]
        rows.write(a.out, found + correlations(found))
    for r in rows.read(a.out):
        if r["metric"] == "Pearson r":
            s = r["setting"]
            print(f"{s['predictor']} and {s['outcome']}: r = {r['value']:.2f} ({r['low']:.2f} to {r['high']:.2f}), "
                  f"{r['n']} points")  # fmt: skip


if __name__ == "__main__":
    main()
