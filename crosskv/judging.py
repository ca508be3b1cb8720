"""How far a target drifts on mapped caches, on sequences that were held out: what polishing and the search go by.

A sequence is continued after prefixes of several lengths. The prefix's first token and the target's exact layers are
its own, as in a handoff; the drift is the KL of what the target then says against what it says on its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from crosskv import backends
from crosskv.backends import Array, Layers
from crosskv.live import measured
from crosskv.mapper import Mapper
from crosskv.transfer import map_cache

HOLD_OUT = 10
"""One sequence in HOLD_OUT is held out, at most MOST_HELD of them."""
MOST_HELD = 16
WINDOWS, SINKS = 4, 1
"""Continuations of a sequence; first tokens that are the target's own."""


def split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(held out, the others): numbers of sequences. The same ones that crosskv.fit holds out come first."""
    every = np.arange(count)
    held = every[min(1, count - 1) :: HOLD_OUT]
    return held[:MOST_HELD], np.setdiff1d(every, held)


def starts(length: int, window: int, rng: np.random.Generator | None = None) -> tuple[int, ...]:
    """Where the continuations of a sequence begin: one in each quarter, at its end unless it is drawn."""
    edges = np.linspace(1, length - window, WINDOWS + 1).astype(int)
    if rng is None:
        return tuple(edges[1:].tolist())
    return tuple(int(rng.integers(a, b)) + 1 for a, b in pairwise(edges))


@dataclass(frozen=True)
class Example:
    """ids [B, T]; the target's and the source's own caches of as many tokens as the last start, in the target's
    framework; starts: where the continuations begin."""

    ids: np.ndarray
    own: Layers
    theirs: Layers
    starts: tuple[int, ...]

    @property
    def positions(self) -> np.ndarray:
        return np.arange(max(self.starts))


class Judge:
    """A pair of live models and the lengths at which they are compared: sequences of `length` tokens, continuations of
    `window`."""

    def __init__(self, source: Any, target: Any, length: int, window: int):
        self.source, self.target, self.length, self.window = source, target, length, window
        self.specs = measured(source).at(source, length), measured(target).at(target, length)
        self.backend = backends.of(target)

    def examples(self, ids: np.ndarray, batch: int) -> list[Example]:
        """Of sequences [N, length]: `batch` of them at a time."""
        at = starts(self.length, self.window)
        return [self.example(ids[i : i + batch], at) for i in range(0, len(ids), batch)]

    def example(self, ids: np.ndarray, at: tuple[int, ...]) -> Example:
        src, n = backends.of(self.source), max(at)
        own, theirs = self.backend.capture(self.target, ids[:, :n]), src.capture(self.source, ids[:, :n])
        if src is not self.backend:
            theirs = {i: tuple(self.backend.from_numpy(src.to_numpy(x)) for x in kv) for i, kv in theirs.items()}
        return Example(ids, own, theirs, at)

    def said(self, layers: Layers, e: Example) -> list[Array]:
        """Log probabilities [B, W, vocab] of every continuation, after that much of the cache `layers`."""
        b, out = self.backend, []
        for start in e.starts:
            cut = {i: (k[:, :, :start], v[:, :, :start]) for i, (k, v) in layers.items()}
            logits = b.logits(self.target, e.ids[:, start : start + self.window], b.install(self.target, cut))
            x = b.cast(logits, "float32")
            x = x - b.amax(x, -1)
            out.append(x - b.xp.log(b.xp.exp(x).sum(-1)[..., None]))
        return out

    def drift(self, want: Sequence[Array], got: Sequence[Array]) -> Array:
        """Mean KL [B] in nats of a token."""
        every = [(self.backend.xp.exp(p) * (p - q)).sum(-1).mean(-1) for p, q in zip(want, got, strict=True)]
        return sum(every[1:], every[0]) / len(every)

    def joined(self, mapped: Layers, e: Example) -> Layers:
        """Mapped layers as a handoff installs them: first tokens, and layers that are not mapped, the target's own."""
        b, out = self.backend, dict(e.own)
        for t, kv in mapped.items():
            k, v = (
                b.xp.concatenate([o[:, :, :SINKS], b.cast(x, b.dtype_of(o))[:, :, SINKS:]], 2)
                for o, x in zip(e.own[t], kv, strict=True)
            )
            out[t] = k, v
        return out

    def kl(self, mapper: Mapper, examples: Sequence[Example]) -> np.ndarray:
        """Mean KL of every sequence, [N], with this mapper's caches."""
        found = []
        for e in examples:
            mapped = map_cache(e.theirs, mapper, e.positions, *self.specs, unload_after=False, exact=e.own)
            layers = self.joined({t: mapped[t] for t in mapper.layers}, e)
            found.append(self.backend.to_numpy(self.drift(self.said(e.own, e), self.said(layers, e))))
        return np.concatenate(found)
