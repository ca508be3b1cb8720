"""What `crosskv demo` shows: the shipped models at work, two mappers fitted on the shipped text, and their worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import crosskv
from crosskv import backends, family
from crosskv.evals import arms, report, rows, run, tasks

PROMPT = "The old man looked at the sea for a long time before he spoke. At last he turned to the boy and said,"
PAIRS = (("S", "L"), ("M", "L"))
CONFIG = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=64, calib_seq_len=384, stride=1)
PREFIX, CONTINUATION, PASSAGES = 256, 64, 16
NEW_TOKENS = 32


def run_all(hosts: Sequence[str], directory: Path, console: Console) -> list[dict[str, Any]]:
    """Prints as it goes, writes the mappers, rows.jsonl and report.html into `directory`, and returns the rows."""
    sections: list[tuple[str, str]] = []
    found: list[dict[str, Any]] = []
    for host in hosts:
        sections.append((f"The family in {host}", _family(host, console)))
    for source, target in PAIRS:
        mapper = _mapper(hosts[0], source, target, directory, console)
        for host in hosts:
            sections.append((f"{source} -> {target} in {host}", _side_by_side(host, source, target, mapper, console)))
        body, measured = _worth(hosts[0], source, target, mapper, console)
        sections.append((f"What {source} -> {target} is worth", body))
        found += measured
    rows.write(directory / "rows.jsonl", found)
    report.write(directory / "report.html", report.page("crosskv demo", sections, report.origin([rows.machine()])))
    console.print(f"Report: {directory / 'report.html'}, rows: {directory / 'rows.jsonl'}")
    return found


def _case() -> tasks.Case:
    return tasks.make("needle", 1, tasks.Filler(family.text("heldout")), chars=1600)


def _family(host: str, console: Console) -> str:
    """Each model completes one prompt and answers one needle question."""
    case = _case()
    table = Table("model", "seconds", "continues", "needle", title=f"The family in {host}", title_justify="left")
    lines = []
    for name in family.NAMES:
        model, tokenizer = family.load(name, host)
        b = backends.of(model)
        started = time.perf_counter()
        text = tokenizer.decode(
            b.generate(model, tokenizer, tokenizer.encode(PROMPT), NEW_TOKENS), skip_special_tokens=True
        )
        found = tokenizer.decode(
            b.generate(model, tokenizer, tokenizer.encode(case.prompt), 8), skip_special_tokens=True
        )
        seconds = time.perf_counter() - started
        right = "right" if tasks.correct(case, found) else f"wrong:{found.splitlines()[0]}"
        lines.append((name, f"{seconds:.2f}", text.strip(), f"{case.answer.strip()}: {right}"))
        table.add_row(*lines[-1])
    console.print(f"\nPrompt: {PROMPT}\nNeedle: {case.question.strip().splitlines()[0]} (in a document of "
                  f"{len(case.context):,} characters)", style="dim", markup=False)  # fmt: skip
    console.print(table)
    return report.text(PROMPT) + report.table(("model", "seconds", "continues", "needle"), lines)


def _mapper(host: str, source: str, target: str, directory: Path, console: Console) -> Any:
    (one, tokenizer), (other, _) = family.load(source, host), family.load(target, host)
    started = time.perf_counter()
    mapper = crosskv.fit(one, other, family.text("calibration"), tokenizer, CONFIG)
    mapper.save(directory / f"{source}-{target}")
    console.print(f"\nFitted in {time.perf_counter() - started:.0f} s: {mapper.describe()}", markup=False)
    return mapper


def _side_by_side(host: str, source: str, target: str, mapper: Any, console: Console) -> str:
    """The target's own continuation beside the mapped one, after a passage from a book that no model has read."""
    (one, tokenizer), (other, _) = family.load(source, host), family.load(target, host)
    b = backends.of(other)
    ids = run.rows(tokenizer.encode, family.text("heldout"), 4, PREFIX)[2].tolist()
    own = b.generate(other, tokenizer, ids, NEW_TOKENS)
    mapped = b.generate(other, tokenizer, ids, NEW_TOKENS, crosskv.handoff(mapper, one, other, ids).cache)
    alone = b.generate(one, tokenizer, ids, NEW_TOKENS)
    table = Table("who continues", "text", title=f"{source} -> {target} in {host}", title_justify="left")
    lines = [
        (f"{target}, own cache", tokenizer.decode(own)),
        (f"{target}, cache mapped from {source}", tokenizer.decode(mapped)),
        (f"{source} alone", tokenizer.decode(alone)),
    ]
    for who, text in lines:
        table.add_row(who, " ".join(text.split()))
    console.print(table)
    return report.text(tokenizer.decode(ids)[-400:]) + report.table(("who continues", "text"), lines)


def _worth(host: str, source: str, target: str, mapper: Any, console: Console) -> tuple[str, list[dict[str, Any]]]:
    """The controls of `arms` on held-out text, and warm and cold time against the target's own prefill."""
    (one, tokenizer), (other, _) = family.load(source, host), family.load(target, host)
    passages = run.rows(tokenizer.encode, family.text("heldout"), PASSAGES, PREFIX + CONTINUATION)
    measured = arms.score(mapper, one, other, passages, PREFIX).rows()
    columns = ("cache of the prompt", "NLL", "KL to own", "top-1 as own", "gap recovered", "95 % interval")
    lines = [
        (r["arm"], r["nll"], r["kl"], r["top1"], r["gap"], f"{r['low']:.2f} ... {r['high']:.2f}") for r in measured
    ]
    title = f"{source} -> {target}, {PASSAGES} held-out passages, {PREFIX} + {CONTINUATION} tokens"
    table = Table(*columns, title=title, title_justify="left")
    for line in lines:
        table.add_row(*(x if isinstance(x, str) else f"{x:.3f}" for x in line))
    console.print(table)
    times = _times(one, other, mapper, tokenizer)
    said = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in times.items())
    console.print(f"Time for a prompt of {len(_prompt(tokenizer)):,} tokens: {said}", markup=False)
    setting = {
        "pair": f"{source}->{target}",
        "host": host,
        "k": CONFIG.k,
        "prefix": PREFIX,
        "continuation": CONTINUATION,
    }
    own_nll = next(r["nll"] for r in measured if r["arm"] == "own")
    baselines = {"nll": {"name": "own cache", "value": own_nll}}
    units = {"nll": "nats/token", "kl": "nats", "top1": "share", "gap": "share"}
    found = []
    for r in measured:
        for metric, unit in units.items():
            span = {"low": r["low"], "high": r["high"]} if metric == "gap" else {}
            arm = setting | {"arm": r["arm"]}
            found.append(
                rows.row("transfer", arm, metric, r[metric], unit, n=PASSAGES, baseline=baselines.get(metric), **span)
            )
    prefill = {"name": "own prefill", "value": times["own prefill"]}
    for name, seconds in times.items():
        found.append(rows.row("transfer time", setting | {"what": name}, "time", seconds, "s", baseline=prefill))
    shown = [r for r in measured if r["arm"] not in ("own", "none", "random")]
    plot = report.bars("gap recovered (1: own cache, 0: no context)", [r["arm"] for r in shown],
                       [r["gap"] for r in shown], [(r["low"], r["high"]) for r in shown])  # fmt: skip
    layers = sorted(mapper.layers)
    r2 = [[getattr(mapper.layers[t], f"r2_{kind}") for t in layers] for kind in ("keys", "values")]
    heat = report.heat("held-out R2 per target layer", ["keys", "values"], [str(t) for t in layers], r2)
    return report.table(columns, lines) + plot + heat + f"<p>{said}</p>", found


def _prompt(tokenizer: Any) -> list[int]:
    return run.rows(tokenizer.encode, family.text("heldout"), 2, 1024)[0].tolist()


def _times(source: Any, target: Any, mapper: Any, tokenizer: Any) -> dict[str, float]:
    """Median seconds until the target's first logits: its own prefill, a handoff with (cold) and without (warm) the
    source's prefill."""
    src, tgt = backends.of(source), backends.of(target)
    ids = _prompt(tokenizer)
    cache = src.install(source, src.capture(source, [ids[:-1]]))

    def handed(**known: Any) -> Any:
        h = crosskv.handoff(mapper, source, target, ids, **known)
        return tgt.logits(target, h.tokens, h.cache)

    return {
        "own prefill": _median(lambda: tgt.logits(target, [ids])),
        "handoff, warm": _median(lambda: handed(source_cache=cache)),
        "handoff, cold": _median(handed),
    }


def _median(call: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        logits = call()
        backends.of(logits).to_numpy(logits[:, -1])  # waits for the result
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
