"""What packed integers cost and save on the shipped family.

    python benchmarks/compress.py            # about ten minutes on two cores; writes results/compress.jsonl
    python benchmarks/compress.py --table    # the table, from the committed rows

48 passages of the shipped held-out text: 768 tokens of prompt, packed, then 64 of continuation, read in one step on
top. `answered`: of generated questions about a document of about 700 tokens that is packed before the question is read.
NLL increase and KL are against the host's own cache of the same prompt, with standard errors over passages.
Bytes are those of the arrays held for the prompt, per token, in a float32 model; `packed` is what a token costs that
lies in the packed part, to be compared with 2 bytes an entry in float16. The control `sinks and tail alone` leaves the
packed tokens out of the cache: what they are worth at all. `packed before RoPE` un-rotates keys before they are
quantised (simulated in the host's own cache): why keys are packed as they are cached.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import backends, family, live, metrics, rope
from crosskv.evals import packed, rows, run, tasks
from crosskv.quant import dequantise, quantise
from crosskv.store import IntConfig

RESULTS = Path(__file__).parent.parent / "results" / "compress.jsonl"
PREFIX, CONTINUATION = 768, 64
TASKS, CHARS = ("needle", "multikey", "copying", "common"), 2600
CONFIGS = {
    "8": IntConfig(8, 8),
    "4": IntConfig(4, 4),
    "3": IntConfig(3, 3),
    "keys 4, values 2": IntConfig(4, 2),
    "keys 2, values 4": IntConfig(2, 4),
    "2": IntConfig(2, 2),
    "2, groups of 32": IntConfig(2, 2, group=32),
    "2, no sinks, no tail": IntConfig(2, 2, sinks=0, tail=0),
}


def error(x: np.ndarray) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x)))


def middle(config: IntConfig) -> slice:
    """The tokens of the cached prompt (all but its last) that a store with this config packs."""
    n = (PREFIX - 1 - config.sinks - config.tail) // config.group * config.group
    return slice(config.sinks, config.sinks + n)


def control(model: Any, passages: np.ndarray, batch: int = 4) -> np.ndarray:
    """NLL [n] with the sinks and the tail exact and nothing between, at the positions where they stand."""
    b, out, cut = backends.of(model), [], middle(IntConfig())
    for i in range(0, len(passages), batch):
        ids = passages[i : i + batch]
        layers = b.capture(model, ids[:, : PREFIX - 1])
        cache = b.install(model, {n: tuple(_without(b, x, cut) for x in kv) for n, kv in layers.items()})
        out.append(_masked(model, ids, cache, cut))
    return np.concatenate(out)


def _without(b: Any, x: Any, cut: slice) -> Any:
    """Tokens of the cut are zeros; the mask hides them."""
    return b.xp.concatenate([x[:, :, : cut.start], x[:, :, cut] * 0, x[:, :, cut.stop :]], 2)


def _masked(model: Any, ids: np.ndarray, cache: Any, cut: slice) -> np.ndarray:
    import torch

    mask = torch.ones(ids.shape[0], ids.shape[1] - 1).long()
    mask[:, cut] = 0
    rest = torch.as_tensor(ids[:, PREFIX - 1 : -1])
    at = torch.arange(PREFIX - 1, ids.shape[1] - 1)[None].expand(len(ids), -1)
    with torch.no_grad():
        logits = model(rest, attention_mask=mask, position_ids=at, cache=cache).logits
    return metrics.nll(logits, ids[:, PREFIX:]).mean(1)


def before_rope(model: Any, passages: np.ndarray, config: IntConfig, batch: int = 4) -> np.ndarray:
    """NLL [n] with the keys un-rotated, quantised and rotated again, in the host's own cache."""
    b, spec, out, m = backends.of(model), live.measured(model), [], middle(config)
    at = np.arange(PREFIX - 1)

    def rounded(x: Any, bits: int, axis: int) -> Any:
        new = dequantise(quantise(x[:, :, m], bits, config.group, axis, config.scales))
        return b.xp.concatenate([x[:, :, : m.start], new, x[:, :, m.stop :]], 2)

    for i in range(0, len(passages), batch):
        ids, layers = passages[i : i + batch], {}
        for n, (k, v) in b.capture(model, ids[:, : PREFIX - 1]).items():
            r = spec.ropes[n]
            t = rope.tables(r, at, k, "float32")
            still = rounded(rope.unrotate(k, t, r.interleaved), config.bits_keys, -2)
            layers[n] = (rope.rotate(still, t, r.interleaved), rounded(v, config.bits_values, -1))
        logits = metrics.continuation_logits(
            model, ids[:, PREFIX - 1 : PREFIX], ids[:, PREFIX:], b.install(model, layers)
        )
        out.append(metrics.nll(logits, ids[:, PREFIX:]).mean(1))
    return np.concatenate(out)


def measure(name: str, count: int) -> list[dict[str, Any]]:
    model, tokenizer = family.load(name)
    spec = live.measured(model)
    passages = run.rows(tokenizer.encode, family.text("heldout"), count, PREFIX + CONTINUATION)
    setting = {"model": name, "host": "torch", "dtype": "float32", "prefix": PREFIX, "continuation": CONTINUATION}
    costs = packed.score(model, passages, PREFIX, CONFIGS)
    own = costs["own"].nll.mean(1)
    full = 2 * 2 * spec.n_layers * spec.width
    alone, held = setting | {"arm": "own"}, costs["own"].bytes / (PREFIX - 1)
    out = [rows.row("compress", alone, "nll", float(own.mean()), "nats/token", n=count),
           rows.row("compress", alone, "bytes", held, "bytes/token")]  # fmt: skip

    def increase(arm: str, nll: np.ndarray) -> None:
        d, e = nll - own, error(nll - own)
        out.append(rows.row("compress", setting | {"arm": arm}, "nll increase", float(d.mean()), "nats/token",
                            low=float(d.mean() - 1.96 * e), high=float(d.mean() + 1.96 * e), n=count))  # fmt: skip
        print(f"{name} {arm}: {d.mean():+.4f} +- {e:.4f}")

    for arm, config in CONFIGS.items():
        c, m = costs[arm], middle(config)
        increase(arm, c.nll.mean(1))
        exact = (PREFIX - 1 - (m.stop - m.start)) * full * 2
        packed_bytes = (c.bytes - exact) / (m.stop - m.start)
        base = {"name": "own cache", "value": held}
        half = {"name": "float16", "value": full}
        at = setting | {"arm": arm}
        out += [
            rows.row("compress", at, "kl", float(c.kl.mean()), "nats", n=count),
            rows.row("compress", at, "top1", float(c.agree.mean()), "share", n=count),
            rows.row("compress", at, "bytes", c.bytes / (PREFIX - 1), "bytes/token", baseline=base, n=count),
            rows.row("compress", at, "packed", packed_bytes, "bytes/token", baseline=half, n=count),
        ]
    increase("sinks and tail alone", control(model, passages))
    out += lookups(model, tokenizer, setting, cases=count // 4)
    for bits in (4, 3, 2):
        increase(f"{bits}, keys before RoPE", before_rope(model, passages, IntConfig(bits, bits)))
    return out + times(model, tokenizer, passages, setting)


def lookups(model: Any, tokenizer: Any, setting: dict[str, Any], cases: int) -> list[dict[str, Any]]:
    """Share of generated lookup questions answered, the document being in the cache and the question not."""
    filler, out = tasks.Filler(family.text("heldout")), []
    made = [tasks.make(name, seed, filler, chars=CHARS) for name in TASKS for seed in range(cases)]
    found = [packed.answers(model, tokenizer.encode, case, {"own": None, **CONFIGS}) for case in made]
    for arm in found[0]:
        right = float(np.mean([f[arm] for f in found]))
        where = setting | {"arm": arm, "tasks": list(TASKS), "chars": CHARS}
        out.append(rows.row("compress", where, "answered", right, "share", n=len(made)))
        print(f"{setting['model']} {arm}: {right:.2f} answered")
    return out


def times(model: Any, tokenizer: Any, passages: np.ndarray, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds per generated token after the prompt, arms in turn."""
    ids, found = passages[0, :PREFIX], {}
    arms = {"own": None, "8": CONFIGS["8"], "4": CONFIGS["4"], "2": CONFIGS["2"]}
    for _ in range(6):
        for arm, config in arms.items():
            first = ids[None, :-1]
            cache = packed.own_cache(model, first)
            cache = cache if config is None else crosskv.make_cache(model, config, cache)
            found.setdefault(arm, []).append(packed.decode(model, tokenizer, ids.tolist(), cache, 32)[1])
    base = {"name": "own", "value": float(np.median(found["own"][1:]))}
    out = []
    for arm, seconds in found.items():
        low, mid, high = np.quantile(seconds[1:], [0.2, 0.5, 0.8])
        print(f"{setting['model']} {arm}: {1000 * mid:.1f} ms a token")
        out.append(rows.row("compress", setting | {"arm": arm}, "time", mid, "s/token", low=low, high=high,
                            baseline=base, n=5))  # fmt: skip
    return out


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: one line per model and arm."""
    heads = ["model", "bits", "NLL increase (95 %)", "KL", "top-1", "answered", "bytes/token held, against float32",
             "packed token, against float16", "ms/token"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for r in found:
        cells.setdefault((r["setting"]["model"], r["setting"]["arm"]), {})[r["metric"]] = r
    for (model, arm), c in cells.items():
        nll = c.get("nll increase")
        cost = f"{nll['value']:+.4f} ({nll['low']:+.4f} to {nll['high']:+.4f})" if nll else f"{c['nll']['value']:.4f}"

        def one(metric: str, form: str, c: dict[str, Any] = c) -> str:
            return form.format(c[metric]["value"], c[metric].get("ratio") or 1) if metric in c else ""

        time = f"{1000 * c['time']['value']:.1f}" if "time" in c else ""
        sizes = [one("bytes", "{:,.0f} ({:.2f}x)"), one("packed", "{:,.0f} ({:.2f}x)"), time]
        quality = [one("kl", "{:.5f}"), one("top1", "{:.3f}"), one("answered", "{:.2f}")]
        lines.append("| " + " | ".join([model, arm, cost, *quality, *sizes]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table from the committed rows")
    parser.add_argument("--models", nargs="+", default=["M", "L"])
    parser.add_argument("--passages", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.table:
        found = []
        for name in args.models:
            found += measure(name, args.passages)
            rows.write(args.out, found)
    print(table(rows.read(args.out)))


if __name__ == "__main__":
    main()
