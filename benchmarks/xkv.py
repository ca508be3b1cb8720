"""What compressing layers together costs and saves, at equal bytes really held, beside plain integers.

    python benchmarks/xkv.py                                    # L of the family; about 15 minutes on two cores
    python benchmarks/xkv.py --model smollm2 --text DIR --device cuda --prefix 2048 8192 --passages 24
    python benchmarks/xkv.py --table                            # the table, from the committed rows

A prompt of `prefix` tokens is cached and compressed, 64 tokens of continuation are read on top in one step. NLL
increase and KL are against the host's own cache of the same prompt, with standard errors over passages; `answered` are
generated questions about a document that is compressed before the question is read (needle, multikey; family only).
`ratio` is bytes of the arrays really held, sinks and tail included, against 2 bytes an entry; exact tokens are held in
float16 in every arm. Bases calibrated once per model are not in it: they are static, their bytes are rows of their
own.

Arms: plain integers of 4, 3, 2 bits (keys per channel, values per token: KIVI); per-layer SVD ("tokens", G=1);
"features" (the seed page, keys and values); "tokens" (the paper) with G = 2, 4, all; calibrated with G = 1, 2, 4 and
all (parked: no tail), and G = 4 with the same 4 bits for every latent, and by CKA. Calibration uses the shipped
calibration text (or books of --text that are not scored), never the scored passages.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

import crosskv
from crosskv import backends, family, live
from crosskv.calibrated import Calibrated, calibrate
from crosskv.compress import IntConfig, XKVConfig
from crosskv.errors import BadInput
from crosskv.evals import packed, rows, run, tasks
from crosskv.planner import inner_ratio
from crosskv.subspace import BITS

RESULTS = Path(__file__).parent.parent / "results" / "xkv.jsonl"
PARKED = (16, 32)
SINKS, TAIL, BLOCK = 4, 16, 32
CONTINUATION = 64
TASKS, CHARS = ("needle", "multikey"), 6000


def configs(prefix: int, bases: dict[str, Calibrated], ratios: list[float]) -> dict[str, Any]:
    """{arm: config}: every method at every ratio, so that the prompt in all takes that share of 2 bytes an entry."""
    out: dict[str, Any] = {f"int{b}": IntConfig(b, b, sinks=SINKS, tail=TAIL) for b in (4, 3, 2)}
    cached = prefix - 1
    middle = (cached - SINKS - TAIL) // BLOCK * BLOCK
    same = {"sinks": SINKS, "tail": TAIL, "block": BLOCK, "exact": "float16"}
    for ratio in ratios:
        inner = inner_ratio(ratio, cached, cached - middle)
        if inner is None:
            continue
        out[f"per-layer SVD {ratio:g}x"] = XKVConfig("tokens", ratio=inner, group=1, **same)
        out[f"features G=4 {ratio:g}x"] = XKVConfig("features", ratio=inner, group=4, **same)
        for g in (2, 4, "all"):
            out[f"tokens G={g} {ratio:g}x"] = XKVConfig("tokens", ratio=inner, group=g, **same)
        for name, basis in bases.items():
            if name != "all":
                out[f"calibrated G={name} {ratio:g}x"] = XKVConfig(basis, ratio=inner, **same)
        out[f"calibrated G=4, 4 bits each {ratio:g}x"] = XKVConfig(uniform(bases["4"], 4), ratio=inner, **same)
    for ratio in PARKED:
        inner = inner_ratio(ratio, cached, SINKS)
        if inner is not None and "all" in bases:
            parked = same | {"tail": 0, "block": 1}
            out[f"parked G=all {ratio:g}x"] = XKVConfig(bases["all"], ratio=inner, **parked)
    return out


def uniform(basis: Calibrated, bits: int) -> Calibrated:
    """The same basis with the choice between no bits and `bits`: ranks without allocation."""

    def one(s: Any) -> Any:
        rows = [s.errors[i] if BITS[i] == bits else s.errors[0] for i in range(len(BITS))]
        return dataclasses.replace(s, errors=np.stack(rows))

    return dataclasses.replace(basis, sides=tuple((one(k), one(v)) for k, v in basis.sides))


def wide(config: Any, cached: int, full: int, dtype: str) -> int:
    """What plain integers hold more because the model, and so their exact tokens, are in float32."""
    if not isinstance(config, IntConfig) or dtype != "float32":
        return 0
    packed_tokens = max(0, cached - config.sinks - config.tail) // config.group * config.group
    return full * (cached - packed_tokens)


def bases_of(model: Any, tokenizer: Any, text: Any, groups: list[str], count: int) -> tuple[dict, dict]:
    found, seconds = {}, {}
    for g in groups:
        started = time.perf_counter()
        grouping = "cka" if g == "4 (CKA)" else "contiguous"
        size: int | str = "all" if g == "all" else int(g.split()[0])
        known = next((x.about["sensitivity"] for x in found.values()), None)
        found[g] = calibrate(
            model, text, tokenizer, group=size, grouping=grouping, count=count, weights=known, progress=False
        )
        seconds[g] = time.perf_counter() - started
        print(f"calibrated G={g} in {seconds[g]:.0f} s", flush=True)
    return found, seconds


def measure(name: str, model: Any, tokenizer: Any, text: Any, scored: str, a: argparse.Namespace) -> list[dict]:
    spec = live.measured(model)
    full = 2 * 2 * spec.n_layers * spec.width
    bases, seconds = bases_of(model, tokenizer, text, a.groups, a.calibration)
    about = {"model": name, "host": "torch", "device": a.device, "dtype": a.dtype, "continuation": CONTINUATION}
    out = []
    for g, basis in bases.items():
        at = about | {"arm": f"calibrated G={g}", "tokens": basis.about["tokens"]}
        out.append(rows.row("compress", at, "calibration", seconds[g], "s"))
    for prefix in a.prefix:
        passages = run.rows(tokenizer.encode, scored, a.passages, prefix + CONTINUATION)
        setting, count = about | {"prefix": prefix}, len(passages)
        arms = {k: v for k, v in configs(prefix, bases, a.ratios).items() if k.startswith(tuple(a.arms or [""]))}
        arms = reached(model, passages[:1, :prefix], arms)
        costs = packed.score(model, passages, prefix, arms, a.batch)
        for arm, config in arms.items():
            own = costs["own"].nll.mean(1)
            held = costs[arm].bytes - wide(config, prefix - 1, full, a.dtype)
            d, ratio = costs[arm].nll.mean(1) - own, full * (prefix - 1) / held
            e = d.std(ddof=1) / count**0.5
            print(f"{prefix} {arm}: {d.mean():+.4f} +- {e:.4f} kl {costs[arm].kl.mean():.5f} {ratio:.2f}x", flush=True)
            at = setting | {"arm": arm}
            base = {"name": "own cache, NLL", "value": float(own.mean())}
            out += [
                rows.row("compress", at, "nll increase", float(d.mean()), "nats/token", low=float(d.mean() - 1.96 * e),
                         high=float(d.mean() + 1.96 * e), n=count) | {"own": base},
                rows.row("compress", at, "kl", float(costs[arm].kl.mean()), "nats", n=count),
                rows.row("compress", at, "top1", float(costs[arm].agree.mean()), "share", n=count),
                rows.row("compress", at, "ratio", ratio, "times", n=count),
            ]  # fmt: skip
            if isinstance(getattr(config, "basis", None), Calibrated):
                bits = config.basis.bits(8 * full / config.ratio)
                out.append(rows.row("compress", at, "static", config.basis.static_bytes(bits), "bytes"))
                out.append(rows.row("compress", at, "kl expected", config.basis.error(bits), "nats"))
        if a.questions:
            out += lookups(model, tokenizer, setting, arms, a.questions)
        if a.times:
            out += times(model, tokenizer, passages, setting, arms, a.times)
        rows.write(a.out, out)  # what there is so far: a longer prompt may run out of time
    return out


def reached(model: Any, prompt: np.ndarray, arms: dict[str, Any]) -> dict[str, Any]:
    """Without the arms whose ratio cannot be reached at this length."""
    own = packed.own_cache(model, prompt[:, :-1])
    out = {}
    for arm, config in arms.items():
        try:
            crosskv.make_cache(model, config, own)
            out[arm] = config
        except BadInput as e:
            print(f"{arm}: {e}", flush=True)
    return out


def lookups(model: Any, tokenizer: Any, setting: dict, arms: dict[str, Any], cases: int) -> list[dict]:
    """Share of generated lookup questions answered, the document being in the cache and the question not."""
    filler, out = tasks.Filler(family.text("heldout")), []
    made = [tasks.make(name, seed, filler, chars=CHARS) for name in TASKS for seed in range(cases)]
    right = [packed.answers(model, tokenizer.encode, case, {"own": None, **arms}) for case in made]
    for arm in right[0]:
        at = setting | {"arm": arm, "tasks": list(TASKS), "chars": CHARS}
        share = float(np.mean([r[arm] for r in right]))
        out.append(rows.row("compress", at, "answered", share, "share", n=len(made)))
        print(f"{arm}: {share:.2f} answered", flush=True)
    return out


def times(
    model: Any, tokenizer: Any, passages: np.ndarray, setting: dict, arms: dict[str, Any], new: int
) -> list[dict]:
    """Seconds per generated token after the prompt, arms in turn."""
    prefix = setting["prefix"]
    ids, found = passages[0, :prefix], {}
    chosen = {"own": None} | {k: v for k, v in arms.items() if k in TIMED}
    b = backends.of(model)
    layers = b.capture(model, ids[None, :-1])
    for _ in range(4):
        for arm, config in chosen.items():
            cache = b.install(model, layers)
            cache = cache if config is None else crosskv.make_cache(model, config, cache)
            found.setdefault(arm, []).append(packed.decode(model, tokenizer, ids.tolist(), cache, new)[1])
    base = {"name": "own", "value": float(np.median(found["own"][1:]))}
    out = []
    for arm, seconds in found.items():
        low, mid, high = np.quantile(seconds[1:], [0.2, 0.5, 0.8])
        print(f"{arm}: {1000 * mid:.1f} ms a token", flush=True)
        out.append(rows.row("compress", setting | {"arm": arm}, "time", mid, "s/token", low=low, high=high,
                            baseline=base, n=3))  # fmt: skip
    return out


TIMED = (
    "int4",
    "int2",
    "tokens G=4 8x",
    "calibrated G=1 8x",
    "calibrated G=4 8x",
    "calibrated G=4 16x",
    "parked G=all 16x",
)


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: one line per model, prefix and arm."""
    heads = ["model", "prompt", "arm", "ratio held", "NLL increase (95 %)", "share of NLL", "KL", "KL expected",
             "top-1", "answered", "static bytes", "ms/token (own)"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    cells: dict[tuple, dict[str, Any]] = {}
    for r in found:
        s = r["setting"]
        if "prefix" in s:
            cells.setdefault((s["model"], s["prefix"], s["arm"]), {})[r["metric"]] = r
    for (model, prefix, arm), c in cells.items():

        def one(metric: str, form: str, c: dict[str, Any] = c) -> str:
            return form.format(c[metric]["value"]) if metric in c else ""

        nll = c.get("nll increase")
        cost = f"{nll['value']:+.4f} ({nll['low']:+.4f} to {nll['high']:+.4f})" if nll else ""
        share = f"{100 * nll['value'] / nll['own']['value']:+.2f} %" if nll else ""
        ms = f"{1000 * c['time']['value']:.1f} ({1000 * c['time']['baseline']['value']:.1f})" if "time" in c else ""
        cell = [model, str(prefix), arm, one("ratio", "{:.1f}x"), cost, share, one("kl", "{:.4f}"),
                one("kl expected", "{:.4f}"), one("top1", "{:.3f}"), one("answered", "{:.2f}"),
                one("static", "{:,}"), ms]  # fmt: skip
        lines.append("| " + " | ".join(cell) + " |")
    return "\n".join(lines)


def _middle(text: str, chars: int = 12_000) -> str:
    start = max(0, len(text) - chars) // 2
    return text[start : start + chars]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--table", action="store_true", help="print the table from the committed rows")
    add("--model", default="L", help="S, M, L, or a directory or 'smollm2' (then --text)")
    add("--text", type=Path, help="folder of text files for other models: the last tenth is scored")
    add("--prefix", type=int, nargs="+", default=[1984])
    add("--ratios", type=float, nargs="+", default=[4, 8, 16])
    add("--passages", type=int, default=24)
    add("--batch", type=int, default=2)
    add("--groups", nargs="+", default=["1", "2", "4", "4 (CKA)", "all"])
    add("--calibration", type=int, default=64, help="sequences of 1,024 tokens")
    add("--questions", type=int, default=0, help="per task")
    add("--times", type=int, default=0, help="tokens to generate in each timed run")
    add("--arms", nargs="+", help="only arms that begin with one of these")
    add("--device", default="cpu")
    add("--dtype", default="float32")
    add("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    if a.table:
        print(table(rows.read(a.out)))
        return
    if a.model in ("S", "M", "L"):
        model, tokenizer = family.load(a.model)
        text: Any = family.text("calibration")
        scored = family.text("heldout")
    else:
        place = str(family.smollm2()) if a.model == "smollm2" else a.model
        model, tokenizer = backends.host("torch").open_model(place, a.dtype)
        files = sorted(a.text.rglob("*.*"))
        cut = len(files) * 9 // 10
        order = np.random.default_rng(0).permutation(len(files))
        text = [_middle(files[i].read_text(errors="ignore")) for i in order[:cut]]  # a little of every one
        scored = "\n\n".join(files[i].read_text(errors="ignore")[:400_000] for i in order[cut:])
    rows.write(a.out, measure(a.model, model.to(a.device), tokenizer, text, scored, a))
    print(table(rows.read(a.out)))


if __name__ == "__main__":
    main()
