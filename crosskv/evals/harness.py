"""Any task of lm-eval, answered from the cache of every arm.

`evaluate` runs tasks for all arms and gives every item's metrics; `local_task` makes lm-eval tasks of sets that lie in
a folder, so that no hub is needed. `ArmLM` is one arm as lm-eval sees it. Behind the `ArmLM`s of one evaluation stands
one `Answers`: when the first arm is asked, it answers for all of them, so that each model reads a context once.

The convention is that of `arms.score`: the cache holds all tokens of a context but the last one; that token and the
ending are read on top of it. Tokens are those of lm-eval's own HFLM, so that the arm "own" agrees with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosskv.errors import BadInput, MissingExtra, nearest
from crosskv.evals import choices
from crosskv.evals.answers import Answers, Pair
from crosskv.evals.arms import Arm
from crosskv.evals.choices import Choice, Problem

try:
    import datasets
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models import utils as lm_utils
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    raise MissingExtra(f"lm-eval cannot be imported ({e}): pip install 'crosskv[eval]'") from e

GENERATED = 256
"""Tokens that are written where a task does not say how many, as in lm-eval."""


# ---- one arm as lm-eval sees it -------------------------------------------------------------------------------------


class ArmLM(TemplateLM):
    """One arm as a model of lm-eval. Requests go to `answers`, which answers for all arms at once."""

    def __init__(self, answers: Answers, arm: Arm):
        super().__init__()
        if all(arm is not a for a in answers.arms):
            raise BadInput(
                f"The arm {arm.label!r} is not among those of the answers: {[a.label for a in answers.arms]}."
            )
        self.answers, self.arm, self.tokenizer = answers, arm, answers.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the tokenizer's first token, else its last."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.answers.max_length

    @property
    def max_gen_toks(self) -> int:
        return GENERATED

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids with what the tokenizer adds by itself, unless the text begins with it."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        found = self.answers.likelihoods(self.arm, [(tuple(c), tuple(e)) for _, c, e in requests])
        return [(x.logprob, x.greedy) for x in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows as HFLM's. There is no context that could be transferred, so all
        arms of one model agree.
        """
        return [
            sum(x.logprob for x in self.answers.alone(self.arm.model, self._windows(request.args[0])))
            for request in requests
        ]

    def _windows(self, text: str) -> list[Pair]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
            context_len=1,
        )  # fmt: skip
        return [(tuple(context), tuple(ending)) for context, ending in map(make_disjoint_window, windows)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations: the arm's cache of all prompt tokens but the last, then one token at a time. Raises
        BadInput where a task wants samples.
        """
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._stops(request.args[1]), []).append(i)
        out: dict[int, str] = {}
        for (until, limit), places in groups.items():
            prompts = [tuple(self.tok_encode(requests[i].args[0])) for i in places]
            out.update(zip(places, self.answers.texts(self.arm, prompts, until, limit), strict=True))
        return [out[i] for i in range(len(requests))]

    def _stops(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        plain = lm_utils.normalize_gen_kwargs(options, self.max_gen_toks)
        if plain["do_sample"]:
            raise BadInput("Arms write greedily, this task wants samples: set do_sample to false in its options.")
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        return tuple(lm_utils.handle_stop_sequences(plain["until"], eos)), plain["max_gen_toks"]


# ---- tasks without a hub --------------------------------------------------------------------------------------------

LOCAL = (*choices.SETS, *choices.PROBLEMS)


class _LocalTask(ConfigurableTask):
    """An lm-eval task on items that are there already."""

    def __init__(self, items: list[dict[str, Any]], config: dict[str, Any]):
        self._items = items
        super().__init__(config=config)

    def download(self, *_: Any, **__: Any) -> None:
        self.dataset = {"test": datasets.Dataset.from_list(self._items)}


def local_task(name: str, root: str | Path, limit: int | None = None) -> Any:
    """An lm-eval task of a set in the folder `root`, with lm-eval's prompts and metrics and no examples before them;
    of `limit` items evenly spread. Raises BadInput for an unknown set, and for files that are missing or not as
    published.
    """
    if name not in LOCAL:
        raise BadInput(f"there is no local set {name!r}{nearest(name, LOCAL)}")
    if name in choices.PROBLEMS:
        problems = choices.load_problems(name, Path(root))
        return _LocalTask([_problem(i, problems[i]) for i in choices.spread(len(problems), limit)], _written_out(name))
    items = choices.load(name, Path(root))
    docs = [_choice(i, items[i]) for i in choices.spread(len(items), limit)]
    return _LocalTask(docs, _last_word(name) if name == "lambada" else _multiple_choice(name, items[0]))


def _choice(i: int, item: Choice) -> dict[str, Any]:
    context = item.context if isinstance(item.context, str) else list(item.context)
    return {
        "doc_id": i,
        "context": context,
        "endings": [e.removeprefix(" ") for e in item.endings],
        "gold": item.answer,
    }


def _problem(i: int, item: Problem) -> dict[str, Any]:
    return {"doc_id": i, "context": item.prompt, "answer": item.answer}


def _metric(name: str, **options: Any) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True, **options}


def _multiple_choice(name: str, item: Choice) -> dict[str, Any]:
    """Endings after one context, or contexts before one ending, as lm-eval's winogrande."""
    several = not isinstance(item.context, str)
    return {
        "task": name,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": (lambda d: d["gold"]) if several else (lambda d: d["context"]),
        "doc_to_choice": (lambda d: d["context"]) if several else (lambda d: d["endings"]),
        "doc_to_target": (lambda d: d["endings"][0]) if several else (lambda d: d["gold"]),
        "metric_list": [_metric(m) for m in ("acc", "acc_norm") if m == "acc" or name in choices.LENGTHS_DIFFER],
    }


def _last_word(name: str) -> dict[str, Any]:
    perplexity = _metric("perplexity", aggregation="perplexity", higher_is_better=False)
    return {
        "task": name,
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": lambda d: d["context"],
        "doc_to_target": lambda d: " " + d["endings"][0],
        "metric_list": [perplexity, _metric("acc")],
    }


def _written_out(name: str) -> dict[str, Any]:
    """lm-eval's gsm8k: a number after `####`, or the last number there is."""
    options = {"ignore_case": True, "ignore_punctuation": False}
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
    strict = {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"}
    flexible = {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
    first = {"function": "take_first"}
    return {
        "task": name,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": lambda d: d["context"],
        "doc_to_target": lambda d: d["answer"],
        "metric_list": [_metric("exact_match", regexes_to_ignore=ignored, **options)],
        "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0},
        "filter_list": [
            {"name": "strict-match", "filter": [strict, first]},
            {"name": "flexible-extract", "filter": [flexible, first]},
        ],
    }


# ---- evaluation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """items: by task and arm, one row per item in the set's order: doc_id, doc_hash and the item's value of each
    metric. totals: by task (or group of tasks) and arm, the metrics as lm-eval aggregates them. A metric is called as
    lm-eval calls it, with the filter after a comma unless there is none.
    """

    items: dict[str, dict[str, list[dict[str, Any]]]]
    totals: dict[str, dict[str, dict[str, float]]]


def evaluate(
    arms: Sequence[Arm],
    tokenizer: Any,
    tasks: Sequence[Any],
    limit: int | None = None,
    data: str | Path | None = None,
    task_manager: Any = None,
) -> Evaluation:
    """All arms on all tasks, each task on its own.

    tasks: names, or lm-eval's task objects. data: the folder of the local sets; names of these are read from there,
    others (or all, without a folder) are lm-eval's and come from the hub. limit: items of each task, evenly spread for
    local ones, else the first. task_manager: an lm-eval TaskManager that knows the names. Raises BadInput for unknown
    names, and what `Answers` and `local_task` raise.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"limit must be at least 1, got {limit}.")
    answers, found = Answers(arms, tokenizer), Evaluation({}, {})
    manager = task_manager or TaskManager(include_defaults=not all(_is_local(t, data) for t in tasks))
    for task in tasks:
        for spec in _opened(task, limit, data, manager):
            for arm in arms:
                result = lm_eval.simple_evaluate(
                    model=ArmLM(answers, arm), tasks=[spec], limit=limit, log_samples=True, bootstrap_iters=0,
                    task_manager=manager,
                )  # fmt: skip
                for name, samples in result["samples"].items():
                    found.items.setdefault(name, {})[arm.label] = _rows(samples)
                for name, numbers in {**result["results"], **result.get("groups", {})}.items():
                    found.totals.setdefault(name, {})[arm.label] = _numbers(numbers)
    return found


def _is_local(task: Any, data: Any) -> bool:
    return not isinstance(task, str) or (data is not None and task in LOCAL)


def _opened(task: Any, limit: int | None, data: str | Path | None, manager: Any) -> list[Any]:
    """The task objects and groups of a name, opened once for all arms."""
    if not isinstance(task, str):
        return [task]
    if data is not None and task in LOCAL:
        return [local_task(task, data, limit)]
    if task not in manager.all_tasks:
        local = "" if data is None else f"; local ones are {', '.join(LOCAL)}"
        raise BadInput(f"lm-eval has no task {task!r}{nearest(task, manager.all_tasks)}{local}")
    loaded = manager.load([task])
    groups = list(loaded.get("groups", {}).values())
    if groups and task in loaded["groups"]:
        return [loaded["groups"][task]]
    return list(loaded["tasks"].values())


def _called(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per item of lm-eval's samples, which are one per item and filter."""
    rows: dict[int, dict[str, Any]] = {}
    for s in samples:
        own = s["doc"].get("doc_id", s["doc_id"]) if isinstance(s["doc"], dict) else s["doc_id"]
        row = rows.setdefault(s["doc_id"], {"doc_id": own, "doc_hash": s["doc_hash"]})
        row |= {_called(m, s["filter"]): s[m].item() if isinstance(s[m], np.generic) else s[m] for m in s["metrics"]}
    return [rows[i] for i in sorted(rows)]


def _numbers(total: dict[str, Any]) -> dict[str, float]:
    """Of one task's line in lm-eval's results, what is a metric and was worked out."""
    parts = {key: key.partition(",") for key, value in total.items() if isinstance(value, int | float)}
    return {_called(metric, filter_): float(total[key]) for key, (metric, _, filter_) in parts.items() if filter_}
