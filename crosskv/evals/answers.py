"""What each arm answers to a context: likelihoods of endings, and texts. Each model reads a context once, for all arms.

The convention is that of `arms.score`: the cache holds all tokens of a context but the last one; that token and the
ending are read on top of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv import backends, metrics
from crosskv.errors import BadInput
from crosskv.evals.arms import Arm, Contexts, continued
from crosskv.evals.choices import Likelihood

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]

SHORTEST = 3
"""Contexts of fewer tokens are read by the model in every arm: one token before the last is an exact one anyway."""


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
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


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
