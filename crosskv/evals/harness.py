"""Any task of lm-eval, answered from the cache of every arm.

`evaluate` runs tasks for all arms and gives every item's metrics; `local_task` makes lm-eval tasks of sets that lie in
a folder, so that no hub is needed. `ArmLM` is one arm as lm-eval sees it. Behind the `ArmLM`s of one evaluation stands
one `Answers`: when the first arm is asked, it answers for all of them, so that each model reads a context once.

The convention is that of `arms.score`: the cache holds all tokens of a context but the last one; that token and the
ending are read on top of it. Tokens are those of lm-eval's own HFLM, so that the arm "own" agrees with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv import backends, metrics
from crosskv.errors import BadInput, MissingExtra, nearest
from crosskv.evals import choices
from crosskv.evals.arms import Arm, Contexts, continued
from crosskv.evals.choices import Choice, Likelihood, Problem

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

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]

SHORTEST = 3
"""Contexts of fewer tokens are read by the model in every arm: one token before the last is an exact one anyway."""
GENERATED = 256
"""Tokens that are written where a task does not say how many, as in lm-eval."""


# ---- answers --------------------------------------------------------------------------------------------------------


class Answers:
    """What each arm answers. Worked out for all arms as soon as one of them is asked; kept are numbers and texts, never
    a cache.

    arms: with labels that differ; tokenizer: the one their models share, of either host. max_length: tokens of the
    longest sequence, from whose left what is too much is cut, with a warning, as lm-eval does; None: what all of the
    models were made for. Raises BadInput for arms that cannot be told apart.
    """

    def __init__(self, arms: Sequence[Arm], tokenizer: Any, max_length: int | None = None):
        labels = [arm.label for arm in arms]
        if not arms or len(set(labels)) < len(labels):
            raise BadInput(f"Expected at least one arm, with labels that differ; got {labels}.")
        self.arms, self.tokenizer = tuple(arms), tokenizer
        self.max_length = max_length or min(_longest(m) for arm in arms for m in (arm.model, *arm.reads))
        self._likelihoods: dict[Pair, dict[str, Likelihood]] = {}
        self._alone: dict[tuple[int, Pair], Likelihood] = {}
        self._texts: dict[tuple[Ids, tuple[str, ...], int], dict[str, str]] = {}

    def likelihoods(self, arm: Arm, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Of each (context, ending), token ids of at least one token each, when this arm continues the context.

        The wrong document of a context is made of the others that are asked at the same time. Raises BadInput where an
        arm needs one and there is none, for an empty context or ending, and for logits that are not finite.
        """
        pairs = [self._fitting(*pair) for pair in pairs]
        asked: dict[Ids, list[Ids]] = {context: [] for context, _ in pairs}
        for context, ending in dict.fromkeys(pairs):
            if (context, ending) not in self._likelihoods:
                asked[context].append(ending)
        for context, others in _with_others(list(asked), [bool(e) for e in asked.values()], "scoring"):
            for label, found in self._scored(context, asked[context], others).items():
                for ending, likelihood in zip(asked[context], found, strict=True):
                    self._likelihoods.setdefault((context, ending), {})[label] = likelihood
        return [self._likelihoods[pair][arm.label] for pair in pairs]

    def alone(self, model: Any, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Of each (context, ending) as `likelihoods`, when `model` reads all of it, without any cache."""
        pairs = [self._fitting(*pair) for pair in pairs]
        for context, ending in pairs:
            if (id(model), (context, ending)) not in self._alone:
                logits = backends.of(model).logits(model, np.array([[*context, *ending[:-1]]]))
                self._alone[id(model), (context, ending)] = _likelihood(logits[0, len(context) - 1 :], ending)
        return [self._alone[id(model), pair] for pair in pairs]

    def texts(self, arm: Arm, contexts: Sequence[Ids], until: Sequence[str], limit: int) -> list[str]:
        """What this arm writes greedily after each context of token ids, up to the first of the strings `until`, the
        tokenizer's end of text, or `limit` tokens. The tokens it writes are kept in a plain cache.
        """
        room = self.max_length - limit
        if limit < 1 or room < 1:
            raise BadInput(f"Expected from 1 to {self.max_length - 1} tokens to be written, got {limit}.")
        stops = tuple(until)
        keys = [(_shortened(context, room), stops, limit) for context in contexts]
        asked = list(dict.fromkeys(context for context, _, _ in keys))
        new = [(context, stops, limit) not in self._texts for context in asked]
        for context, others in _with_others(asked, new, "writing"):
            known = _known(context, others)
            self._texts[context, stops, limit] = {
                a.label: self._written(a, known, context, stops, limit) for a in self.arms
            }
        return [self._texts[key][arm.label] for key in keys]

    def _fitting(self, context: Ids, ending: Ids) -> Pair:
        """The pair with the context cut on the left to what the models can read."""
        if not context or not 0 < len(ending) <= self.max_length:
            raise BadInput(
                f"A context needs a token, an ending from 1 to {self.max_length}; got {len(context)} and {len(ending)}."
            )
        return _shortened(context, self.max_length + 1 - len(ending)), ending

    def _scored(self, context: Ids, endings: Sequence[Ids], others: Ids | None) -> dict[str, list[Likelihood]]:
        """Likelihoods of the endings of one context, by the arms' labels."""
        known = _known(context, others)
        if known is None:
            pairs = [(context, e) for e in endings]
            return {arm.label: self.alone(arm.model, pairs) for arm in self.arms}
        width = max(map(len, endings))  # padded on the right, where no earlier position sees it
        rows = np.array([[context[-1], *e[:-1], *[0] * (width - len(e))] for e in endings])
        found = {}
        for arm in self.arms:
            logits = continued(arm, arm.start(known), rows)[:, -width:]  # before them: the held-back tokens
            found[arm.label] = [_likelihood(logits[i], e) for i, e in enumerate(endings)]
        return found

    def _written(self, arm: Arm, known: Contexts | None, context: Ids, stops: Sequence[str], limit: int) -> str:
        ends, out = _ends(arm.model, self.tokenizer), []
        for token in islice(_greedy(arm, known, context), limit):
            out.append(token)
            text = self.tokenizer.decode(out, skip_special_tokens=False)
            if token in ends or any(stop in text for stop in stops):
                break
        text = self.tokenizer.decode(out, skip_special_tokens=True)
        return lm_utils.postprocess_generated_text(text, list(stops), None)


def _longest(model: Any) -> int:
    """Tokens that a model was made for; lm-eval's default where it does not say."""
    config = getattr(model, "config", None) or getattr(model, "args", None)
    config = getattr(config, "get_text_config", lambda: config)()
    return int(getattr(config, "max_position_embeddings", None) or 2048)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens at which either host's own generate stops."""
    told = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = (tokenizer.eos_token_id, getattr(tokenizer, "eos_token_ids", None), told)
    return {int(t) for g in given if g is not None for t in (g if isinstance(g, list | set | tuple) else [g])}


def _shortened(context: Ids, room: int) -> Ids:
    """The last `room` tokens of a context, and a warning if that is not all of it."""
    if len(context) > room:
        warnings.warn(
            f"A context of {len(context)} tokens is cut to its last {room}, which all models can read.", stacklevel=4
        )
    return context[-room:]


def _known(context: Ids, others: Ids | None) -> Contexts | None:
    """All of a context but its last token, and its wrong document; None where there is nothing to map."""
    if len(context) < SHORTEST:
        return None
    return Contexts(np.array([context[:-1]]), None if others is None else np.array([others[: len(context) - 1]]))


def _with_others(contexts: Sequence[Ids], wanted: Sequence[bool], doing: str) -> Iterator[tuple[Ids, Ids | None]]:
    """The contexts that are wanted, each with its wrong document, and a bar."""
    with tqdm(total=sum(wanted), desc=doing, unit="context", disable=None) as bar:
        for i, context in enumerate(contexts):
            if wanted[i]:
                yield context, wrong_document(contexts, i)
                bar.update()


def wrong_document(contexts: Sequence[Ids], i: int) -> Ids | None:
    """Other text of the length of contexts[i], which are all different: its own first token, then the other contexts
    without theirs, joined from half a round on (a neighbour may belong to the same item). None if there is no other.
    """
    own, n = contexts[i], len(contexts)

    def rest() -> Iterator[int]:
        for k in range(n):
            other = contexts[(i + n // 2 + k) % n]
            if other is not own:
                yield from other[1:] if other[0] == own[0] else other

    found = list(islice(rest(), len(own)))
    repeats = -(-len(own) // max(1, len(found)))
    return (own[0], *(found * repeats)[: len(own) - 1]) if found else None


def _likelihood(logits: Any, ending: Ids) -> Likelihood:
    """Of an ending of n tokens, of which logits [at least n, V] are the predictions."""
    x = _host(logits[: len(ending)])
    nll = metrics.nll(x[None], np.array([ending]))
    return Likelihood(-float(nll.sum()), bool((x.argmax(-1) == np.array(ending)).all()))


def _host(logits: Any) -> np.ndarray:
    x = np.asarray(backends.of(logits).to_numpy(logits))
    if not np.isfinite(x).all():
        raise BadInput("The model's logits are not finite; load it in float32 or bfloat16.")
    return x


def _greedy(arm: Arm, known: Contexts | None, context: Ids) -> Iterator[int]:
    """The tokens that an arm writes after a context, without end."""
    b, ids = backends.of(arm.model), np.array([context])
    if known is None:
        logits, cache = b.logits(arm.model, ids), b.install(arm.model, b.capture(arm.model, ids))
    else:
        start = arm.start(known)
        cache = b.install(arm.model, start.layers)
        logits = b.logits(arm.model, np.concatenate([start.rest, ids[:, -1:]], 1), cache)
    while True:
        token = int(_host(logits[0, -1:])[0].argmax())
        yield token
        logits = b.logits(arm.model, np.array([[token]]), cache)


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

LENGTHS_DIFFER = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa")
"""Sets for which lm-eval also reports acc_norm."""
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
        "metric_list": [_metric(m) for m in ("acc", "acc_norm") if m == "acc" or name in LENGTHS_DIFFER],
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
