"""The suite: every arm on the same cases, one JSON line per case, so that a run can be interrupted and continued.

A case is a context, which the arms put into a cache each in its way, and what is asked of it, which the arm's model
reads on top: the question is never in the mapped or compressed part. Contexts are read once per model and shared by
all arms. Scores: accuracy (greedy decoding would write the answer) or NLL in nats per token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv import backends, metrics
from crosskv.compress import IntConfig, XKVConfig
from crosskv.errors import BadInput
from crosskv.evals import choices, rows, run, tasks
from crosskv.evals.answers import Answers
from crosskv.evals.arms import ARMS, Arm, Contexts, cache_arms, continued, transfer_arms
from crosskv.mapper import Mapper

GENERATED = ("needle", "multikey", "variables", "common", "dialogue", "copying", "arithmetic")


@dataclass(frozen=True)
class Item:
    """One case. context [T]: token ids for the cache; asked [C]: those read on top, of which the ones from `first` on
    are scored, each under the logits of the one before.
    """

    task: str
    case: int
    metric: str
    context: tuple[int, ...]
    asked: tuple[int, ...]
    first: int
    floor: float = 0.0

    @property
    def inputs(self) -> str:
        """SHA-256 of what the models read."""
        return hashlib.sha256(json.dumps([self.context, self.asked, self.first]).encode()).hexdigest()


def passages(encode: run.Encode, text: str, count: int, prefix: int, continuation: int) -> list[Item]:
    """Task "nll": passages spread over a text, `prefix` tokens of context and then `continuation` scored ones."""
    found = run.rows(encode, text, count, prefix + continuation).tolist()
    return [Item("nll", i, "nll", tuple(x[: prefix - 1]), tuple(x[prefix - 1 :]), 1) for i, x in enumerate(found)]


def generated(encode: run.Encode, task: str, text: str, count: int, chars: int) -> list[Item]:
    """Test cases of a generated task, in documents of at most `chars` characters with filler from `text`."""
    filler = tasks.Filler(text)
    return [_asked(encode, tasks.make(task, seed, filler, chars=chars)) for seed in range(count)]


def _asked(encode: run.Encode, case: tasks.Case) -> Item:
    context, prompt, full = encode(case.context), encode(case.prompt), encode(case.prompt + case.answer)
    if full[: len(prompt)] != prompt:
        raise BadInput(f"The tokenizer merges the end of a question with the answer {case.answer!r}; another task?")
    n = next((i for i, (x, y) in enumerate(zip(context, full, strict=False)) if x != y), len(context))
    return Item(case.task, case.seed, "accuracy", tuple(full[:n]), tuple(full[n:]), len(prompt) - n)


# ---- one group of cases, all arms ----


def scores(arms: Sequence[Arm], items: Sequence[Item], others: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Per item of one shape: {"arms": {label: score}, "seconds": {label: {"cold", "warm"}}}.

    others: a wrong document for each. Warm: from the moment that the models whose cache the arm starts from have read
    the context, until all that is asked is read; cold: with that reading. Seconds are per item.
    """
    contexts = Contexts([i.context for i in items], others)
    asked = np.asarray([i.asked for i in items])
    out: list[dict[str, Any]] = [{"arms": {}, "seconds": {}} for _ in items]
    for arm in arms:
        read = 0.0
        for model in arm.reads:
            contexts.by(model)
            read += contexts.seconds(model)
        started = time.perf_counter()
        start = arm.start(contexts)
        logits = continued(arm, start, asked[:, :-1])[:, start.rest.shape[1] :]
        logits = backends.of(logits).to_numpy(logits)
        warm = (time.perf_counter() - started) / len(items)
        for one, item, x in zip(out, items, logits, strict=True):
            one["arms"][arm.label] = _score(item, x)
            one["seconds"][arm.label] = {"cold": warm + read / len(items), "warm": warm}
            if start.nbytes is not None:  # per context token
                one.setdefault("bytes", {})[arm.label] = start.nbytes / contexts.ids.size
    return out


def _score(item: Item, logits: np.ndarray) -> float:
    """logits [C - 1, V]."""
    at, want = logits[item.first - 1 :], np.asarray(item.asked[item.first :])
    if not np.isfinite(at).all():
        raise BadInput(f"The logits of task {item.task}, case {item.case}, are not finite.")
    if item.metric == "accuracy":
        return float((at.argmax(-1) == want).all())
    return float(metrics.nll(at[None], want[None]).mean())


def wrong_documents(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """For each item the next one's context, repeated or cut to its own length; its own first token first."""
    out = []
    for i, item in enumerate(items):
        other = items[(i + 1) % len(items)].context[1:]
        if other == item.context[1:] or not other:
            raise BadInput(f"Task {item.task} needs at least 2 cases with different contexts.")
        n = len(item.context) - 1
        out.append((item.context[0], *(other * (n // len(other) + 1))[:n]))
    return out


# ---- a run ----


class Cases:
    """The case rows of one file: those that are there, and a place to put more. A line that an interrupt cut short is
    measured again.
    """

    def __init__(self, file: Path, setting: dict[str, Any]):
        self.file, self.setting = file, setting
        self.rows: list[dict[str, Any]] = []
        self._known: dict[tuple, str] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        if lines and not lines[-1].endswith("\n"):
            rows.write(file, map(json.loads, lines[:-1]))
            lines = lines[:-1]
        for row in map(json.loads, lines):
            if row["setting"] == setting:
                self._remember(row)

    def _remember(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._known[row["task"], row["case"], row.get("turn")] = row["inputs"]

    def has(self, task: str, case: int, inputs: str, turn: int | None = None) -> bool:
        """Whether this case is there; refuses a file whose case of that number has other inputs."""
        known = self._known.get((task, case, turn))
        if known is not None and known != inputs:
            raise BadInput(f"{self.file} has another case {case} of {task} with the same setting (other text, or "
                           "another tokenizer); give another directory.")  # fmt: skip
        return known is not None

    def add(self, task: str, case: int, inputs: str, metric: str, found: dict[str, Any], **more: Any) -> None:
        """One row, on disk when this returns."""
        row: dict[str, Any] = {"claim": "case", "task": task, "case": case, "inputs": inputs, "metric": metric}
        row |= found | more | {"setting": self.setting, "seed": case} | rows.stamp()
        with self.file.open("a") as f:
            f.write(json.dumps(row) + "\n")
        self._remember(row)


def measure(arms: Sequence[Arm], items: Sequence[Item], cases: Cases, batch: int = 4, progress: bool = True) -> None:
    """Score what `cases` has not yet: neighbours of one shape together, at most `batch`."""
    if not items:
        return
    others = wrong_documents(items)
    todo = [(i, o) for i, o in zip(items, others, strict=True) if not cases.has(i.task, i.case, i.inputs)]
    bar = tqdm(total=len(items), initial=len(items) - len(todo), desc=items[0].task, unit="case", disable=not progress)
    with bar:
        for group in _alike(todo, batch):
            found = scores(arms, [i for i, _ in group], [o for _, o in group])
            for (item, _), one in zip(group, found, strict=True):
                cases.add(item.task, item.case, item.inputs, item.metric, one, floor=item.floor)
            bar.update(len(group))


def _alike(todo: Iterable[tuple[Item, Any]], batch: int) -> Iterator[list[tuple[Item, Any]]]:
    group: list[tuple[Item, Any]] = []
    for pair in todo:
        shape = [(len(i.context), len(i.asked)) for i, _ in (*group[:1], pair)]
        if group and (len(group) == batch or shape[0] != shape[1]):
            yield group
            group = []
        group.append(pair)
    if group:
        yield group


def transfer(
    mapper: Mapper, source: Any, target: Any, hold_back: int = 32, sinks: int = 1, another: Mapper | None = None
) -> list[Arm]:
    """All arms of `transfer_arms`, and those that matter again with `hold_back` context tokens read by the target."""
    names = [n for n in (*ARMS, "another mapper") if n != "another mapper" or another is not None]
    arms = transfer_arms(mapper, source, target, sinks=sinks, another=another, names=names)
    if hold_back:
        again = ("mapped", "wrong document", "none")
        arms += transfer_arms(mapper, source, target, hold_back=hold_back, sinks=sinks, names=again)
    return arms


def caches(model: Any, kinds: Sequence[str], ratios: Sequence[float] = (8,), basis: Any = None) -> list[Arm]:
    """Arms of compressed caches by name: fp8, int8, int4, int3, int2, and xkv at each ratio: by `basis`, a Calibrated,
    or without one the paper's, from each context.
    """
    plain: dict[str, Any] = {"fp8": "fp8"} | {f"int{n}": IntConfig(n, n, tail=16) for n in (8, 4, 3, 2)}
    configs: dict[str, Any] = {}
    for kind in kinds:
        if kind == "xkv":
            configs |= {f"xkv {r:g}x": XKVConfig(basis or "tokens", ratio=r, first=64) for r in ratios}
        elif kind in plain:
            configs[kind] = plain[kind]
        else:
            raise BadInput(f"The caches are {', '.join(plain)} and xkv; got {kind!r}.")
    return cache_arms(model, configs)


def evaluate(
    arms: Sequence[Arm], tokenizer: Any, names: Sequence[str], cases: Cases, *, text: str, count: int,
    prefix: int = 512, continuation: int = 64, chars: int = 1600, sets: Path | None = None, batch: int = 4,
    progress: bool = True,
) -> None:  # fmt: skip
    """Every arm on `count` cases of each named task; the rows go to `cases`, which keeps those that it has.

    Tasks: "nll", a generated one, a set of `choices` from the folder `sets`, or any other name that lm-eval knows.
    text: passages and filler; prefix, continuation: tokens of an "nll" case; chars: of a generated document.
    """
    for name in names:
        if name == "nll":
            items = passages(tokenizer.encode, text, count, prefix, continuation)
        elif name in GENERATED:
            items = generated(tokenizer.encode, name, text, count, chars)
        else:
            _harnessed(arms, tokenizer, name, cases, count, sets)
            continue
        measure(arms, items, cases, batch, progress)


FLOORS = {"piqa": 0.5, "winogrande": 0.5, "boolq": 0.5, "lambada": 0.0, "gsm8k": 0.0}
"""Accuracy of guessing, where it is not one in four."""
SCORES = ("acc_norm", "exact_match,flexible-extract", "exact_match", "acc")
"""Of lm-eval's metrics, the first of these that a task has is its accuracy here."""


def _harnessed(arms: Sequence[Arm], tokenizer: Any, name: str, cases: Cases, count: int, sets: Path | None) -> None:
    """A task through lm-eval, as a whole: its rows are written when it is done."""
    from crosskv.evals import harness

    if sum(row["task"].split(":")[0] == name for row in cases.rows) >= count:
        return
    found = harness.evaluate(arms, tokenizer, [name], count, sets)
    for task, by_arm in found.items.items():
        called = task if task == name else f"{name}:{task}"
        for several in zip(*by_arm.values(), strict=True):
            first = several[0]
            score = next((s for s in SCORES if s in first), None)
            if score is None:
                raise BadInput(f"lm-eval's task {task} has no accuracy among its metrics {list(first)}.")
            if not cases.has(called, first["doc_id"], first["doc_hash"]):
                right = {label: float(item[score]) for label, item in zip(by_arm, several, strict=True)}
                floor = FLOORS.get(name, 0.25 if score.startswith("acc") else 0.0)
                cases.add(called, first["doc_id"], first["doc_hash"], "accuracy", {"arms": right}, score=score,
                          floor=floor)  # fmt: skip


def choice_cases(
    answers: Answers, name: str, which: Sequence[int], items: Sequence[choices.Choice], cases: Cases
) -> None:
    """Of a set in `choices`, the items `which` as rows, without lm-eval: by its prompts, tokens and metrics, so with
    its numbers (a test holds them equal)."""
    encode, todo = choices.encoder(answers.tokenizer), []
    for i in which:
        asked = choices.requests([items[i]], encode)
        inputs = hashlib.sha256(json.dumps([[r.tokens, r.n] for r in asked]).encode()).hexdigest()
        if not cases.has(name, i, inputs):
            todo.append((i, inputs, [(r.tokens[: -r.n], r.tokens[-r.n :]) for r in asked]))
    score = "acc_norm" if name in choices.LENGTHS_DIFFER else "acc"
    known = {a.label: answers.likelihoods(a, [p for _, _, pairs in todo for p in pairs]) for a in answers.arms}
    taken = {label: iter(x) for label, x in known.items()}
    for i, inputs, pairs in todo:
        right = {}
        for label, found in taken.items():
            judged = choices.judge([items[i]], [next(found) for _ in pairs])
            right[label] = float((judged.right_norm if score == "acc_norm" else judged.right)[0])
        cases.add(name, i, inputs, "accuracy", {"arms": right}, score=score, floor=FLOORS.get(name, 0.25))
