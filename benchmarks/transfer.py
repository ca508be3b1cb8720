"""What a transfer is worth on the shipped family: every pair, every control, warm and cold time.

    python benchmarks/transfer.py            # about fifteen minutes on two cores; writes results/transfer.jsonl
    python benchmarks/transfer.py --extra    # adds: another pair's mapper, and the weights' peak in memory
    python benchmarks/transfer.py --times    # anew: all times, with mappers of the same shape, and the hosts' agreement
    python benchmarks/transfer.py --table    # the README's tables, from the committed rows

Calibration: 256 sequences of 512 tokens of the shipped text, every token. Evaluation: 64 passages of the shipped
held-out text, 256 tokens of prompt and 64 of continuation; first token and last prompt token are the target's own in
every arm. k = all source layers; the penalty is chosen on held-out calibration rows. Times are to the target's first
logits for a prompt of 1,024 tokens: medians of 9 with the 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import backends, family, metrics
from crosskv.evals import arms, rows, run
from crosskv.transfer import transfer_cache

RESULTS = Path(__file__).parent.parent / "results" / "transfer.jsonl"
PAIRS = (("S", "L"), ("M", "L"), ("L", "S"))
CONFIG = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=256, calib_seq_len=512, stride=1)
PREFIX, CONTINUATION, PASSAGES, LONG = 256, 64, 64, 1024
UNITS = {"nll": "nats/token", "kl": "nats", "top1": "share", "gap": "share"}


def measure(source_name: str, target_name: str) -> list[dict[str, Any]]:
    (source, tokenizer), (target, _) = family.load(source_name), family.load(target_name)
    started = time.perf_counter()
    mapper = crosskv.fit(source, target, family.text("calibration"), tokenizer, CONFIG)
    seconds = time.perf_counter() - started
    print(f"{mapper.describe()} in {seconds:.0f} s")
    setting = {"pair": f"{source_name}->{target_name}", "host": "torch", "k": "all", "penalty": "auto",
               "calibration_tokens": CONFIG.n_calib_sequences * CONFIG.calib_seq_len}  # fmt: skip
    out = [rows.row("transfer", setting, "fit time", seconds, "s")]
    out += quality(mapper, source, target, tokenizer, setting)
    return out + latency(mapper, source, target, tokenizer, setting)


def quality(mapper: Any, source: Any, target: Any, tokenizer: Any, setting: dict[str, Any]) -> list[dict[str, Any]]:
    passages = run.rows(tokenizer.encode, family.text("heldout"), PASSAGES, PREFIX + CONTINUATION)
    scores = arms.score(mapper, source, target, passages, PREFIX).rows()
    setting = setting | {"prefix": PREFIX, "continuation": CONTINUATION}
    out = []
    for r in scores:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in r.items()})
        for metric, unit in UNITS.items():
            span = {"low": r["low"], "high": r["high"]} if metric == "gap" else {}
            out.append(rows.row("transfer", setting | {"arm": r["arm"]}, metric, r[metric], unit, n=PASSAGES, **span))
    return out


def latency(mapper: Any, source: Any, target: Any, tokenizer: Any, setting: dict[str, Any]) -> list[dict[str, Any]]:
    src, tgt = backends.of(source), backends.of(target)
    ids = run.rows(tokenizer.encode, family.text("heldout"), 2, LONG)[0].tolist()
    cache = src.install(source, src.capture(source, [ids[:-1]]))

    def handed(**known: Any) -> Any:
        h = crosskv.handoff(mapper, source, target, ids, **known)
        return tgt.logits(target, h.tokens, h.cache)

    def own() -> Any:
        return tgt.logits(target, [ids])

    calls = {"own prefill": own, "handoff, warm": lambda: handed(source_cache=cache), "handoff, cold": handed}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(10):  # interleaved, so that a busy moment hits all alike; the first round warms up
        for name, call in calls.items():
            started = time.perf_counter()
            tgt.to_numpy(call()[:, -1])
            times[name].append(time.perf_counter() - started)
    baseline = {"name": "own prefill", "value": float(np.median(times["own prefill"][1:]))}
    out = []
    for name, seconds in times.items():
        low, mid, high = np.quantile(seconds[1:], [0.2, 0.5, 0.8])
        print(f"{name}: {mid * 1000:.0f} ms")
        where = setting | {"what": name, "prompt": LONG}
        out.append(rows.row("transfer", where, "time", mid, "s", low=low, high=high, baseline=baseline, n=9))
    return out


def extra() -> list[dict[str, Any]]:
    """The mapper of S -> L, used for M -> L where it does not belong, and how much memory its weights take."""
    (small, tokenizer), (medium, _), (large, _) = (family.load(n) for n in ("S", "M", "L"))
    mapper = crosskv.fit(small, large, family.text("calibration"), tokenizer, CONFIG)
    passages = run.rows(tokenizer.encode, family.text("heldout"), PASSAGES, PREFIX + CONTINUATION)
    n, found = PREFIX - 1, []
    for i in range(0, PASSAGES, 4):
        ids = passages[i : i + 4]
        h = crosskv.handoff(mapper, medium, large, ids[:, :PREFIX], force=True)
        logits = metrics.continuation_logits(large, ids[:, n:PREFIX], ids[:, PREFIX:], h.cache)
        found.append(metrics.nll(logits, ids[:, PREFIX:]))
    setting = {"pair": "M->L", "host": "torch", "prefix": PREFIX, "continuation": CONTINUATION}
    other = setting | {"control": "another pair's mapper (S->L, 131,072 tokens)"}
    out = [rows.row("transfer", other, "nll", float(np.concatenate(found).mean()), "nats/token", n=PASSAGES)]
    with tempfile.TemporaryDirectory() as directory:
        path = mapper.save(Path(directory) / "S-L")
        cache = backends.of(small).capture(small, passages[:1, :n])
        for unload in (True, False):
            opened = crosskv.load(path)
            peak = _peak(opened, cache, unload)
            where = {"pair": "S->L", "unload_after": unload, "file bytes": (path / "mapper.safetensors").stat().st_size}
            out.append(rows.row("transfer", where, "peak bytes of weights", peak, "bytes"))
    for r in out:
        print(r["setting"], r["metric"], r["value"])
    return out


def times() -> list[dict[str, Any]]:
    """Times again, for a moment when the machine is quiet. They depend on a mapper's shape, not on how well it was
    fitted, so a short calibration will do. And the largest difference of logits between the two hosts."""
    config = crosskv.MapperConfig(k="all", n_calib_sequences=16, calib_seq_len=512, stride=1)
    out = []
    for pair in PAIRS:
        (source, tokenizer), (target, _) = map(family.load, pair)
        mapper = crosskv.fit(source, target, family.text("calibration"), tokenizer, config, progress=False)
        setting = {"pair": "->".join(pair), "host": "torch", "k": "all", "calibration_tokens": 16 * 512}
        out += latency(mapper, source, target, tokenizer, setting)
    for name in family.NAMES:
        one, other = family.load(name, "torch")[0], family.load(name, "mlx")[0]
        ids = tokenizer.encode(family.text("heldout")[3000:9000])[:1500]
        a, b = (backends.of(m).to_numpy(backends.of(m).logits(m, [ids])) for m in (one, other))
        where = {"pair": f"{name} in torch and mlx", "tokens": len(ids), "largest logit": float(np.abs(a).max())}
        out.append(rows.row("hosts", where, "largest difference of logits", float(np.abs(a - b).max()), "logits"))
        print(where, out[-1]["value"])
    return out


def _peak(mapper: Any, cache: Any, unload: bool) -> float:
    """The most bytes of weights that a mapper holds while it maps a cache, looked at whenever a layer is used."""
    seen = [0]
    ready = mapper.ready

    def watched(*args: Any) -> Any:
        made = ready(*args)
        seen.append(mapper.nbytes)
        return made

    mapper.ready = watched
    transfer_cache(cache, mapper, unload_after=unload)
    return float(max(seen))


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: quality of every pair and arm, then times."""
    pairs = ["->".join(p) for p in PAIRS]
    value = {(r["setting"]["pair"], r["setting"].get("arm"), r["metric"]): r for r in found if "arm" in r["setting"]}
    lines = ["| cache of the prompt | " + " | ".join(f"{p}: NLL | top-1 | gap recovered" for p in pairs) + " |"]
    lines.append("|---|" + "---|" * (3 * len(pairs)))
    for arm in arms.ARMS:
        cells = []
        for p in pairs:
            nll, top, gap = (value[p, arm, m] for m in ("nll", "top1", "gap"))
            span = f" ({gap['low']:.2f} to {gap['high']:.2f})" if arm not in ("own", "none") else ""
            cells += [f"{nll['value']:.3f}", f"{top['value']:.2f}", f"{gap['value']:.2f}{span}"]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    timed = [r for r in found if r["metric"] == "time"]
    names = list(dict.fromkeys(r["setting"]["what"] for r in timed))
    lines += ["", "| pair | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for p in pairs:
        mine = {r["setting"]["what"]: r for r in timed if r["setting"]["pair"] == p}
        cells = [f"{mine[n]['value'] * 1000:.0f} ms ({mine[n]['ratio']:.1f}x)" for n in names]
        lines.append(f"| {p} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables from the committed rows")
    parser.add_argument("--times", action="store_true", help="measure the times anew and replace their rows")
    parser.add_argument("--extra", action="store_true", help="add two controls to the rows that are there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.times:
        kept = [r for r in rows.read(args.out) if r["metric"] != "time" and r["claim"] != "hosts"]
        rows.write(args.out, kept + times())
    elif args.extra:
        rows.write(args.out, rows.read(args.out) + extra())
    elif not args.table:
        found: list[dict[str, Any]] = []
        for pair in PAIRS:
            found += measure(*pair)
            rows.write(args.out, found)  # after each pair: an interrupt keeps what was measured
    print(table(rows.read(args.out)))


if __name__ == "__main__":
    main()
