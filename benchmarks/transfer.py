"""What a transfer is worth on the shipped family: every pair, every control, warm and cold time.

    python benchmarks/transfer.py            # about fifteen minutes on two cores; writes results/transfer.jsonl
    python benchmarks/transfer.py --extra    # adds: another pair's mapper, and the weights' peak in memory
    python benchmarks/transfer.py --times    # anew: all times, with mappers of the same shape, and the hosts' agreement
    python benchmarks/transfer.py --pair smollm2-sibling smollm2    # a pair of real models, at four settings
    python benchmarks/transfer.py --table    # the README's tables, from the committed rows; with --pair, that pair's

Calibration: 256 sequences of 512 tokens of the shipped text, every token. Evaluation: 64 passages of the shipped
held-out text, 256 tokens of prompt and 64 of continuation; first token and last prompt token are the target's own in
every arm. k = all source layers; the penalty is chosen on held-out calibration rows. Times are to the target's first
logits for a prompt of 1,024 tokens: medians of 9 with the 20th and 80th percentile.

--pair: 64 calibration sequences, 24 passages; k = 8 and all, penalties 1e-4 and 1e-2, sinks 0 and 1, unless other
--passages and --penalties are asked for. The mapper with the best R2 on held-out calibration rows is scored with all
controls, the others alone.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import backends, cli, family, live, metrics
from crosskv.evals import arms, rows, run
from crosskv.family.smollm2 import sibling_facts
from crosskv.transfer import transfer_cache

RESULTS = Path(__file__).parent.parent / "results" / "transfer.jsonl"
PAIRS = (("S", "L"), ("M", "L"), ("L", "S"))
CONFIG = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=256, calib_seq_len=512, stride=1)
PREFIX, CONTINUATION, PASSAGES, LONG = 256, 64, 64, 1024
REAL = crosskv.MapperConfig(n_calib_sequences=64, calib_seq_len=512, stride=1)
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


def real(
    source_name: str, target_name: str, count: int, penalties: Sequence[float], kept: Path | None
) -> list[dict[str, Any]]:
    """A pair of real models, the calibration text read once for all mappers; `count` passages. kept: moments of an
    earlier run, or where to keep them.
    """
    (source, tokenizer), (target, _) = (cli.open_model(n, "torch") for n in (source_name, target_name))
    mappers = {}
    with tempfile.TemporaryDirectory() as moments:
        for k, penalty in itertools.product((8, "all"), penalties):
            started = time.perf_counter()
            mappers[k, penalty] = crosskv.fit(
                source, target, family.text("calibration"), tokenizer, replace(REAL, k=k, ridge_lambda=penalty),
                checkpoint=kept or Path(moments) / "fit", resume=True, progress=False,
            )  # fmt: skip
            print(f"{mappers[k, penalty].describe()} in {time.perf_counter() - started:.0f} s", flush=True)
    passages = run.rows(tokenizer.encode, family.text("heldout"), count, PREFIX + CONTINUATION)
    base = {"pair": f"{source_name}->{target_name}", "host": "torch", "prefix": PREFIX, "continuation": CONTINUATION,
            "calibration_tokens": REAL.n_calib_sequences * REAL.calib_seq_len}  # fmt: skip
    best = max(mappers, key=lambda key: mappers[key].provenance["mean_held_out_r2"])
    scores = arms.score(mappers[best], source, target, passages, PREFIX, batch=4)
    out = []
    for r in scores.rows():
        setting = base | {"arm": r["arm"], "k": best[0], "penalty": best[1], "sinks": 1}
        out += [_row(setting, metric, r[metric], r["low"], r["high"], count) for metric in UNITS]
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in r.items()}, flush=True)
    own, none = (scores.nll[a].mean(1) for a in ("own", "none"))
    for (k, penalty, sinks), (nll, kl, agree) in variants(mappers, source, target, passages).items():
        low, high = metrics.paired_bootstrap(metrics.gap_recovered, own, nll.mean(1), none)
        r2 = {"mean held-out R2": mappers[k, penalty].provenance["mean_held_out_r2"]} if k != "counterpart" else {}
        arm = "raw copy, counterpart layers" if k == "counterpart" else "mapped"
        setting = base | {"arm": arm, "k": k, "penalty": penalty, "sinks": sinks} | r2
        values = {"nll": nll.mean(), "kl": kl.mean(), "top1": agree.mean(),
                  "gap": metrics.gap_recovered(own, nll.mean(1), none)}  # fmt: skip
        if (k, penalty, sinks) != (*best, 1):  # that one is in the rows already
            out += [_row(setting, metric, float(values[metric]), low, high, count) for metric in UNITS]
        print(k, penalty, sinks, {m: round(float(v), 3) for m, v in values.items()}, round(low, 3), round(high, 3))
    return out


def _row(setting: dict[str, Any], metric: str, value: float, low: float, high: float, count: int) -> dict[str, Any]:
    span = {"low": low, "high": high} if metric == "gap" else {}
    return rows.row("transfer", setting, metric, value, UNITS[metric], n=count, **span)


def variants(mappers: dict[Any, Any], source: Any, target: Any, passages: np.ndarray) -> dict[Any, list[np.ndarray]]:
    """(k, penalty, sinks) -> NLL, KL and agreement [n, C] of the mapped cache; sinks = 0: the first token mapped too.

    Under ("counterpart", None, 1): the source's cache unmapped, each target layer given the source layer that was cut
    from the same place of SmolLM2, or from the nearest; the fairest raw copy there is.
    """
    src, tgt, n = backends.of(source), backends.of(target), PREFIX - 1
    kept = sibling_facts()["kept"]
    ids = {20: kept, 30: list(range(30))}
    origin, want = (ids[live.measured(m).n_layers] for m in (source, target))
    near = {t: min(range(len(origin)), key=lambda s: abs(origin[s] - want[t])) for t in range(len(want))}
    found: dict[Any, list[Any]] = {}
    for i in range(0, len(passages), 4):
        rows_, after = passages[i : i + 4, :PREFIX], passages[i : i + 4, PREFIX:]
        theirs, own = src.capture(source, rows_[:, :n]), tgt.capture(target, rows_[:, :n])

        def scored(cache: Any, rows_: np.ndarray = rows_, after: np.ndarray = after) -> Any:
            return metrics.continuation_logits(target, rows_[:, n:], after, cache)

        copied = {t: theirs[near[t]] for t in own}
        joined = {
            t: tuple(tgt.xp.concatenate([a[:, :, :1], b[:, :, 1:]], 2) for a, b in zip(own[t], copied[t], strict=True))
            for t in own
        }
        caches = {("counterpart", None, 1): tgt.install(target, joined)}
        for key, sinks in itertools.product(mappers, (0, 1)):
            known = {"source_cache": src.install(source, theirs), "sinks": sinks}
            caches[(*key, sinks)] = live.handoff(mappers[key], source, target, rows_, **known).cache
        reference = scored(tgt.install(target, own))
        for key, cache in caches.items():
            logits = scored(cache)
            three = metrics.nll(logits, after), metrics.kl(reference, logits), metrics.top1(reference, logits)
            found.setdefault(key, []).append(three)
    return {key: [np.concatenate(x) for x in zip(*parts, strict=True)] for key, parts in found.items()}


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


def real_table(found: list[dict[str, Any]], pair: str) -> str:
    """Markdown: every arm and setting of a pair of real models."""
    lines = ["| cache of the prompt | k | penalty | exact first tokens | NLL | top-1 | gap recovered |"]
    lines.append("|---|---|---|---|---|---|---|")
    value: dict[Any, dict[str, Any]] = {}
    for r in found:
        if _pair(r) == pair:
            s = r["setting"]
            mapped = s["arm"] in ("mapped", "random", "wrong document")  # the others use no mapper
            key = (s["arm"], *((str(s["k"]), f"{s['penalty']:.0e}".replace("e-0", "e-")) if mapped else ("", "")))
            value.setdefault((*key, str(s["sinks"]) if s["arm"] not in ("own", "source") else ""), {})[r["metric"]] = r
    for key, at in value.items():
        nll, top, gap = (at[m] for m in ("nll", "top1", "gap"))
        span = f" ({gap['low']:.2f} to {gap['high']:.2f})" if key[0] not in ("own", "none") else ""
        cells = [*key, f"{nll['value']:.3f}", f"{top['value']:.2f}", f"{gap['value']:.2f}{span}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables from the committed rows")
    parser.add_argument("--times", action="store_true", help="measure the times anew and replace their rows")
    parser.add_argument("--extra", action="store_true", help="add two controls to the rows that are there")
    parser.add_argument("--pair", nargs=2, metavar=("SOURCE", "TARGET"), help="measure smollm2 and smollm2-sibling")
    parser.add_argument("--passages", type=int, default=24, help="of --pair")
    parser.add_argument("--penalties", type=float, nargs="+", default=[1e-4, 1e-2], help="of --pair")
    parser.add_argument("--moments", type=Path, help="of --pair: keeps what was read, and continues from it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    there = rows.read(args.out) if args.out.exists() else []
    family_pairs = {f"{a}->{b}" for a, b in PAIRS}
    if args.times:
        anew = [r for r in there if r["claim"] == "hosts" or (r["metric"] == "time" and _pair(r) in family_pairs)]
        rows.write(args.out, [r for r in there if r not in anew] + times())
    elif args.extra:
        rows.write(args.out, there + extra())
    elif args.pair and not args.table:
        found = real(*args.pair, args.passages, args.penalties, args.moments)
        there = rows.read(args.out)  # again: the other direction may have been measured meanwhile
        rows.write(args.out, [r for r in there if _pair(r) != "->".join(args.pair)] + found)
    elif not args.table:
        found = [r for r in there if _pair(r) not in family_pairs]
        for pair in PAIRS:
            found += measure(*pair)
            rows.write(args.out, found)  # after each pair: an interrupt keeps what was measured
    there = rows.read(args.out)
    print(real_table(there, "->".join(args.pair)) if args.pair else table(there))


def _pair(row: dict[str, Any]) -> str:
    return row["setting"]["pair"]


if __name__ == "__main__":
    main()
