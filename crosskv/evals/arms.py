"""The controls of a transfer: one continuation, scored by the target on top of several caches of the same prompt.

Every arm has the same exact first tokens (sinks) and the same held-back last tokens, so that arms differ only in what
stands between them:

    own       the target's own keys and values, taken out and installed again
    mapped    the mapper's output from the source's cache
    random    a mapper of random weights with the deviations and the biases of the real one
    other     the mapper's output from the cache of another passage: use of the context, or mere warmth?
    raw copy  the source's keys and values of the layer at the nearest relative depth, unmapped
    zero      zeros
    none      nothing: the sinks and the held-back tokens only
    source    the source model alone, on its own cache

A transfer is worth its trouble when `mapped` beats `none` and `source`. Gap recovered: (none - arm) / (none - own).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crosskv import backends, live, metrics
from crosskv.backends import Layers
from crosskv.backends import numpy as host
from crosskv.errors import BadInput
from crosskv.mapper import Mapper, Packed

ARMS = ("own", "mapped", "random", "other", "raw copy", "zero", "none", "source")


@dataclass(frozen=True)
class Scores:
    """Per arm: nll [n, C] of the continuation; against the target's own cache: kl [n, C] in nats, agree [n, C]."""

    nll: dict[str, np.ndarray]
    kl: dict[str, np.ndarray]
    agree: dict[str, np.ndarray]

    def rows(self) -> list[dict[str, Any]]:
        """One row per arm: mean NLL, KL, top-1 agreement, and gap recovered with a paired 95 % interval."""
        own, none = (self.nll[a].mean(1) for a in ("own", "none"))
        out = []
        for arm in self.nll:
            mine = self.nll[arm].mean(1)
            low, high = metrics.paired_bootstrap(metrics.gap_recovered, own, mine, none)
            out.append(
                {
                    "arm": arm,
                    "nll": float(mine.mean()),
                    "kl": float(self.kl[arm].mean()),
                    "top1": float(self.agree[arm].mean()),
                    "gap": metrics.gap_recovered(own, mine, none),
                    "low": low,
                    "high": high,
                }
            )
        return out


def score(
    mapper: Mapper,
    source: Any,
    target: Any,
    passages: np.ndarray,
    prefix: int,
    *,
    hold_back: int = 1,
    sinks: int = 1,
    batch: int = 4,
) -> Scores:
    """All arms on `passages` [n, prefix + C] of token ids: first the prompt of `prefix` tokens, then the continuation.

    Needs at least 2 passages and sinks >= 1 (without an exact first token there is no `none` to compare with).
    """
    if passages.ndim != 2 or len(passages) < 2 or passages.shape[1] <= prefix:
        raise BadInput(f"passages must be [n >= 2, more than {prefix}] token ids, got shape {passages.shape}")
    if sinks < 1 or hold_back < 1 or sinks + hold_back >= prefix:
        raise BadInput(f"sinks and hold_back must be >= 1, their sum under {prefix}; got {sinks} and {hold_back}")
    mapper.check_models(live.measured(source), live.measured(target))
    scrambled = _scrambled(mapper)
    parts = [passages[i : i + batch] for i in range(0, len(passages), batch)]
    if len(parts[-1]) == 1 and len(parts) > 1:  # `other` needs a second passage beside each
        parts[-2:] = [np.concatenate(parts[-2:])]
    found: dict[str, list[tuple[np.ndarray, ...]]] = {arm: [] for arm in ARMS}
    for ids in parts:
        reference = None
        for arm, logits in _arms(mapper, scrambled, source, target, ids, prefix, hold_back, sinks):
            reference = logits if reference is None else reference
            found[arm].append(
                (metrics.nll(logits, ids[:, prefix:]), metrics.kl(reference, logits), metrics.top1(reference, logits))
            )
    joined = {arm: [np.concatenate(x) for x in zip(*rows, strict=True)] for arm, rows in found.items()}
    nll, kl, agree = ({arm: three[i] for arm, three in joined.items()} for i in range(3))
    return Scores(nll, kl, agree)


def _arms(
    mapper: Mapper,
    scrambled: Mapper,
    source: Any,
    target: Any,
    ids: np.ndarray,
    prefix: int,
    hold_back: int,
    sinks: int,
) -> Iterator[tuple[str, Any]]:
    """(arm, logits [B, C, V] of the continuation), `own` first."""
    src, tgt = backends.of(source), backends.of(target)
    n = prefix - hold_back
    held, continuation = ids[:, n:prefix], ids[:, prefix:]
    own = tgt.capture(target, ids[:, :n])
    theirs = src.capture(source, ids[:, :n])
    sink = _cut(own, 0, sinks)

    def with_cache(layers: Layers) -> Any:
        return metrics.continuation_logits(target, held, continuation, tgt.install(target, layers))

    def with_mapped(tokens: np.ndarray, by: Mapper = mapper) -> Any:
        cache = live.handoff(by, source, target, tokens, hold_back=hold_back, sinks=sinks, force=True).cache
        return metrics.continuation_logits(target, held, continuation, cache)

    yield "own", with_cache(own)
    yield "mapped", with_mapped(ids[:, :prefix])
    yield "random", with_mapped(ids[:, :prefix], scrambled)
    yield "other", with_mapped(np.roll(ids[:, :prefix], 1, axis=0))
    depth = (len(theirs) - 1) / max(1, len(own) - 1)
    nearest = {t: theirs[round(t * depth)] for t in own}
    yield "raw copy", with_cache(_after(tgt, sink, {t: _moved(src, tgt, kv) for t, kv in nearest.items()}, sinks))
    yield "zero", with_cache(_after(tgt, sink, {t: (k * 0, v * 0) for t, (k, v) in own.items()}, sinks))
    yield "none", with_cache(sink)
    yield "source", metrics.continuation_logits(source, held, continuation, src.install(source, theirs))


def _scrambled(mapper: Mapper, seed: int = 0) -> Mapper:
    rng = np.random.default_rng(seed)

    def drawn(p: Packed) -> Packed:
        deviation = float(np.std(np.asarray(host.to_numpy(p.weight), np.float64)))
        return replace(p, weight=(rng.standard_normal(p.weight.shape) * deviation).astype(np.float32))

    weights = {t: tuple(drawn(p) for p in mapper.weights(t)) for t in mapper.layers}
    return Mapper(mapper.source, mapper.target, mapper.config, mapper.layers, weights)  # type: ignore[arg-type]


def _cut(layers: Layers, start: int, stop: int | None) -> dict[int, tuple[Any, Any]]:
    return {i: (k[:, :, start:stop], v[:, :, start:stop]) for i, (k, v) in layers.items()}


def _moved(src: Any, tgt: Any, kv: tuple[Any, Any]) -> tuple[Any, Any]:
    if src is tgt:
        return kv
    k, v = (tgt.from_numpy(src.to_numpy(x)) for x in kv)
    return k, v


def _after(b: Any, first: Layers, layers: Layers, start: int) -> dict[int, tuple[Any, Any]]:
    """The first tokens of one cache, then the tokens of another from `start` on."""
    rest = _cut(layers, start, None)
    return {i: tuple(b.xp.concatenate([a, x], 2) for a, x in zip(first[i], rest[i], strict=True)) for i in first}
