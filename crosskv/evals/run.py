"""Scores: held-out loss and task accuracy of anything that turns token ids into logits.

`Logits` is the whole interface: a function from one token list to the float32 logits [T, V] of its every position.
A model of either host, with or without a mapped or compressed cache, is wrapped into one by its caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax

from crosskv.errors import BadInput
from crosskv.evals.tasks import TASKS, Case, Filler, make

Logits = Callable[[Sequence[int]], np.ndarray]
Encode = Callable[[str], list[int]]
CHARS_PER_TOKEN = 3.45
"""Of the shipped family's tokenizer on task documents: turns a wanted length in tokens into characters."""


def token_nll(logits: Logits, row: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood in nats of each token of `row` but the first, given those before it: [T - 1]."""
    if len(row) < 2:
        raise BadInput(f"a row needs at least 2 tokens to have a predicted one; got {len(row)}")
    logp = log_softmax(np.asarray(logits(row), np.float64)[:-1], axis=-1)
    return -np.take_along_axis(logp, np.asarray(row[1:])[:, None], axis=-1)[:, 0]


def answers(logits: Logits, encode: Encode, case: Case) -> bool:
    """Whether greedy decoding after `case.prompt` writes exactly `case.answer`, in one forward pass.

    Greedy decoding yields the answer if and only if, given prompt and answer, the best token at each position of the
    answer is the answer's own. `encode` must put the beginning-of-text token first.
    """
    prompt, full = encode(case.prompt), encode(case.prompt + case.answer)
    if full[: len(prompt)] != prompt:
        raise BadInput(
            f"the tokenizer merges the prompt's end with the answer {case.answer!r}; end the prompt elsewhere"
        )
    best = np.asarray(logits(full)).argmax(-1)
    return bool((best[len(prompt) - 1 : -1] == np.asarray(full[len(prompt) :])).all())


def rows(encode: Encode, text: str, count: int, length: int) -> np.ndarray:
    """`count` passages evenly spread over `text`, each of `length` tokens with the beginning-of-text token first."""
    step = len(text) // count
    encoded = [encode(text[i * step : i * step + length * 8]) for i in range(count)]
    short = min(len(e) for e in encoded)
    if short < length:
        raise BadInput(f"the text gives {short} tokens in one of {count} passages, {length} are needed; give more text")
    return np.asarray([e[:length] for e in encoded])


def measure(
    logits: Logits, encode: Encode, rows: np.ndarray, text: str, *, cases: int, lengths: Sequence[int] = (500, 1500)
) -> dict[str, Any]:
    """Held-out NLL and accuracy on every context-use task: what the cards of the shipped models report.

    rows: [n, T] token ids, the NLL's passages; text: filler of the task documents; cases: per task and length;
    lengths: of the documents, in tokens of the family's tokenizer. NLL in nats per token with its standard error over
    passages; accuracies are exact matches under greedy decoding.
    """
    nll = np.array([token_nll(logits, row.tolist()).mean() for row in rows])
    filler = Filler(text)
    accuracy = {}
    for name in TASKS:
        for length in lengths:
            made = (make(name, seed, filler, chars=int(length * CHARS_PER_TOKEN)) for seed in range(cases))
            accuracy[f"{name}@{length}"] = sum(answers(logits, encode, case) for case in made) / cases
    return {
        "nll": float(nll.mean()),
        "nll_se": float(nll.std(ddof=1) / math.sqrt(len(nll))),
        "passages": len(nll),
        "passage_tokens": rows.shape[1],
        "cases": cases,
        "accuracy": accuracy,
    }
