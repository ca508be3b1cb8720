"""Which mapper for which pair: every kind that crosskv fits, at its bytes and its cost, with the controls beside them.

    python benchmarks/mappers.py                       # S -> L, M -> L, L -> S; about an hour on two cores
    python benchmarks/mappers.py --table               # the table, from the committed rows

Calibration as in benchmarks/transfer.py: 256 sequences of 512 tokens of the shipped text, every token; polishing reads
the same text. Evaluation: 64 passages of the shipped held-out text, 256 tokens of prompt and 64 of continuation; first
token and last prompt token are the target's own in every arm, and with "re-read 64" the last 64.

bytes: of the stored weights. cost: multiply-adds of a token, the mapper's and those of the target's exact layers, as a
share of the target's own prefill without attention and without its last projection; the source's prefill is not in it.
gap recovered: (NLL without the prompt - NLL mapped) / (NLL without - NLL own cache); "without" keeps the first token
and what is not re-read, so the control "nothing mapped" is 0 without re-reading, and has a row of its own with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import family, live, metrics
from crosskv.evals import arms, rows, run

RESULTS = Path(__file__).parent.parent / "results" / "mappers.jsonl"
PAIRS = (("S", "L"), ("M", "L"), ("L", "S"))
PREFIX, CONTINUATION, PASSAGES, REREAD = 256, 64, 64, 64
BASE = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=256, calib_seq_len=512, stride=1)
PAPER = "paper: own kind, all layers, penalty .01"
CONFIGS = {
    PAPER: dataclasses.replace(BASE, ridge_lambda=0.01),
    "own kind": BASE,
    "both kinds": dataclasses.replace(BASE, features="both"),
    "both, layer 0 exact": dataclasses.replace(BASE, features="both", exact_layers=1),
    "both, layer 0 exact, latent 512": dataclasses.replace(BASE, features="both", exact_layers=1, latent=512),
    "both, layer 0 exact, latent 384": dataclasses.replace(BASE, features="both", exact_layers=1, latent=384),
    "both, layer 0 exact, latent 256": dataclasses.replace(BASE, features="both", exact_layers=1, latent=256),
}
POLISHED = "both, layer 0 exact, latent 384"
CONTROLS = ("own", "mapped", "random", "wrong document", "raw copy", "zero", "none", "source")


def fits(source: Any, target: Any, tokenizer: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, mapper)."""
    for name, config in CONFIGS.items():
        where = folder / f"{config.features}{config.exact_layers}"  # the moments do not depend on the rest
        mapper = crosskv.fit(source, target, family.text("calibration"), tokenizer, config, checkpoint=where,
                             resume=True, progress=False)  # fmt: skip
        yield name, mapper


def cost(mapper: Any, target: Any) -> float:
    """Multiply-adds of a mapped token as a share of the target's prefill (see above)."""
    block = target.model.layers[0]
    one = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    own = live.measured(target)
    exact = max(0, mapper.config.exact_layers - 1) * one
    if mapper.config.exact_layers:
        exact += 2 * own.width * target.config.hidden_size
    return (mapper.n_parameters + exact) / (one * own.n_layers)


def measure(source_name: str, target_name: str, steps: int, folder: Path) -> Iterator[dict[str, Any]]:
    (source, tokenizer), (target, _) = family.load(source_name), family.load(target_name)
    passages = run.rows(tokenizer.encode, family.text("heldout"), PASSAGES, PREFIX + CONTINUATION)
    pair = {"pair": f"{source_name}->{target_name}", "host": "torch", "prefix": PREFIX, "continuation": CONTINUATION}
    plain: dict[str, np.ndarray] = {}

    def scored(name: str, mapper: Any, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        size = sum(p.nbytes for t in mapper.layers for p in mapper.weights(t))
        size += 0 if mapper.encoder is None else mapper.encoder.nbytes
        for hold_back in (1, REREAD):
            found = arms.score(mapper, source, target, passages, PREFIX, hold_back=hold_back, names=names)
            if hold_back == 1:
                plain["own"], plain["none"] = found.nll["own"].mean(1), found.nll["none"].mean(1)
            for arm in found.nll:
                if arm in ("own", "source") and hold_back > 1:
                    continue
                label = name if arm == "mapped" else f"control: {arm}"
                at = pair | {"mapper": label, "re-read": 0 if hold_back == 1 else hold_back}
                mine = found.nll[arm].mean(1)
                gap = metrics.gap_recovered(plain["own"], mine, plain["none"])
                low, high = metrics.paired_bootstrap(metrics.gap_recovered, plain["own"], mine, plain["none"])
                yield rows.row("mappers", at, "gap", gap, "share", low=low, high=high, n=PASSAGES)
                yield rows.row("mappers", at, "nll", float(mine.mean()), "nats/token", n=PASSAGES)
                yield rows.row("mappers", at, "kl", float(found.kl[arm].mean()), "nats", n=PASSAGES)
                if arm == "mapped":
                    yield rows.row("mappers", at, "bytes", size, "bytes")
                    yield rows.row("mappers", at, "cost", cost(mapper, target), "share of the target's prefill")
                print(f"{pair['pair']} {label}, re-read {at['re-read']}: gap {gap:.3f} ({low:.3f} to {high:.3f}) "
                      f"kl {found.kl[arm].mean():.4f}", flush=True)  # fmt: skip

    for name, mapper in fits(source, target, tokenizer, folder):
        yield from scored(name, mapper, CONTROLS if name == PAPER else ("own", "mapped", "none"))
        if name == POLISHED:
            better = crosskv.polish(mapper, source, target, family.text("calibration"), tokenizer, steps=steps)
            better.provenance["models"] = [f"family:{source_name}", f"family:{target_name}"]
            better.save(folder / "polished")
            print(better.provenance["polish"], flush=True)
            yield from scored(f"{name}, polished", better, ("own", "mapped", "none"))


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: one line a mapper, the pairs beside each other, without and with the tail re-read."""
    pairs = list(dict.fromkeys(r["setting"]["pair"] for r in found))
    lines = ["| mapper | " + " | ".join(f"{p}: gap | re-read {REREAD} | MB | cost" for p in pairs) + " |"]
    lines.append("|---" * (1 + 4 * len(pairs)) + "|")
    cells: dict[tuple, dict[str, Any]] = {}
    for r in found:
        s = r["setting"]
        cells.setdefault((s["mapper"], s["pair"], s["re-read"]), {})[r["metric"]] = r
    for name in dict.fromkeys(r["setting"]["mapper"] for r in found):
        line = [name]
        for pair in pairs:
            for reread in (0, REREAD):
                g = cells.get((name, pair, reread), {}).get("gap")
                line.append(f"{g['value']:.2f} ({g['low']:.2f} to {g['high']:.2f})" if g else "")
            about = cells.get((name, pair, 0), {})
            line.append(f"{about['bytes']['value'] / 1e6:.1f}" if "bytes" in about else "")
            line.append(f"{about['cost']['value']:.2f}" if "cost" in about else "")
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["-".join(p) for p in PAIRS])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="keeps moments and polished mappers, and continues from them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table from the committed rows")
    a = parser.parse_args()
    for pair in () if a.table else a.pairs:
        source, target = pair.split("-")
        with tempfile.TemporaryDirectory() as temporary:
            folder = (a.folder or Path(temporary)) / pair
            folder.mkdir(parents=True, exist_ok=True)
            for r in measure(source, target, a.steps, folder):
                there = rows.read(a.out) if a.out.exists() else []
                same = [x for x in there if (x["setting"], x["metric"]) != (r["setting"], r["metric"])]
                rows.write(a.out, [*same, r])
    print(table(rows.read(a.out)))


if __name__ == "__main__":
    main()
