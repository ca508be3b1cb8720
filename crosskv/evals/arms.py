"""Arms: the caches from which one and the same text is continued, so that they differ in nothing else.

An arm turns a batch of contexts into keys and values, and the last tokens of the context that are still to be read;
whatever is asked then is read on top of them by the arm's model. Every model reads a context once (`Contexts`), however
many arms and questions share it.

    own             the target's own keys and values, taken out and installed again
    mapped          the mapper's output from the source's cache
    random          a mapper of random weights with the deviations and the biases of the real one
    another mapper  one that was fitted for another source
    wrong document  the mapper's output from the cache of another context: use of the context, or mere warmth?
    raw copy        the source's keys and values of the layer at the nearest relative depth, unmapped
    zero            zeros
    none            nothing: the exact first tokens and the held-back ones only
    source          the source model alone, on its own cache

In all of them the first `sinks` tokens are the target's own and the last `hold_back` ones are read by the target; the
target's first layers, where the mapper reads them, are its own in `mapped`, `random`, `raw copy` and `zero`. A
transfer is worth its trouble when `mapped` beats `none` and `source`. Gap recovered: (none - arm) / (none - own).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from crosskv import backends, live, metrics
from crosskv.backends import Layers
from crosskv.backends import numpy as host
from crosskv.compress import make_cache, nbytes
from crosskv.errors import BadInput
from crosskv.mapper import Mapper, Packed

ARMS = ("own", "mapped", "random", "wrong document", "raw copy", "zero", "none", "source")


class Contexts:
    """Contexts [B, T] of one length, token ids; read by each model at most once.

    others [B, T]: the wrong document of each; None: each context's neighbour in the batch.
    """

    def __init__(self, ids: Any, others: Any = None):
        self.ids = live.as_ids(ids)
        self.others = None if others is None else Contexts(others)
        if self.others is not None and self.others.ids.shape != self.ids.shape:
            raise BadInput(f"others must have the contexts' shape {self.ids.shape}, got {self.others.ids.shape}.")
        self._known: dict[int, tuple[Layers, float]] = {}

    def _read(self, model: Any) -> tuple[Layers, float]:
        if id(model) not in self._known:
            started = time.perf_counter()
            layers = backends.of(model).capture(model, self.ids)
            _wait(layers)
            self._known[id(model)] = layers, time.perf_counter() - started
        return self._known[id(model)]

    def by(self, model: Any) -> Layers:
        """Keys and values of all tokens, as this model computes them."""
        return self._read(model)[0]

    def seconds(self, model: Any) -> float:
        """How long this model took to read them."""
        return self._read(model)[1]

    def wrong(self, model: Any) -> Contexts:
        """A wrong document in each one's place, as this model has read them."""
        if self.others is not None:
            return self.others
        if len(self.ids) < 2:
            raise BadInput("The arm 'wrong document' needs others, or at least 2 contexts at a time.")
        xp, out = backends.of(model).xp, Contexts(np.roll(self.ids, 1, axis=0))

        def roll(x: Any) -> Any:
            return xp.concatenate([x[-1:], x[:-1]], 0)

        out._known[id(model)] = {i: (roll(k), roll(v)) for i, (k, v) in self.by(model).items()}, 0.0
        return out


@dataclass(frozen=True)
class Start:
    """What a model continues from: keys and values [B, H, T, D], and context tokens [B, m] that it has to read yet.
    nbytes: what a compressed cache held.
    """

    layers: Layers
    rest: np.ndarray
    nbytes: int | None = None


@dataclass(frozen=True)
class Arm:
    """name; model: who continues; start: contexts to what it continues from; reads: models whose prefill a cold start
    has to pay for; options: what rows say of it.
    """

    name: str
    model: Any
    start: Callable[[Contexts], Start]
    reads: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def label(self) -> str:
        return ", ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


def transfer_arms(
    mapper: Mapper,
    source: Any,
    target: Any,
    *,
    hold_back: int = 0,
    sinks: int = 1,
    another: Mapper | None = None,
    names: Sequence[str] = ARMS,
) -> list[Arm]:
    """The arms of a transfer. hold_back: context tokens that the target reads again, besides whatever is asked (a
    context that is no longer than that and the sinks is read by the target in full). another: a mapper that does not
    belong to this pair, for the arm of that name.
    """
    if sinks < 1 or hold_back < 0:
        raise BadInput(f"sinks must be >= 1 and hold_back >= 0, got {sinks} and {hold_back}.")
    mapper.check_models(live.measured(source), live.measured(target))
    src, tgt = backends.of(source), backends.of(target)
    lazy: dict[str, Mapper] = {}

    def kept(c: Contexts) -> int:
        return max(sinks, c.ids.shape[1] - hold_back)

    def from_(c: Contexts, layers: Layers) -> Start:
        return Start(layers, c.ids[:, kept(c) :])

    def mapped(c: Contexts, by: Mapper, other: Contexts | None = None) -> Start:
        n, read = kept(c), c if other is None else other
        theirs = src.install(source, _cut(read.by(source), 0, n))
        prompt = np.concatenate([read.ids[:, :n], c.ids[:, :1]], 1)  # the last one is held back: any token will do
        options: dict[str, Any] = {"source_cache": theirs, "sinks": sinks, "force": True}
        return from_(c, live.mapped_layers(by, source, target, prompt, **options))

    def own(c: Contexts) -> Start:
        return from_(c, _cut(c.by(target), 0, kept(c)))

    def filled(c: Contexts, layers: Layers) -> Start:
        return from_(c, _after(tgt, _cut(c.by(target), 0, sinks), _cut(layers, 0, kept(c)), sinks))

    def random(c: Contexts) -> Start:
        if "random" not in lazy:
            lazy["random"] = _scrambled(mapper)
        return mapped(c, lazy["random"])

    def wrong(c: Contexts) -> Start:
        return mapped(c, mapper, c.wrong(source))

    def raw(c: Contexts) -> Start:
        theirs, t = c.by(source), live.measured(target).n_layers
        depth = (len(theirs) - 1) / max(1, t - 1)
        copied = {i: _moved(src, tgt, theirs[round(i * depth)]) for i in range(t)}
        return filled(c, copied | exact(c))

    def zero(c: Contexts) -> Start:
        return filled(c, {i: (k * 0, v * 0) for i, (k, v) in c.by(target).items()} | exact(c))

    def exact(c: Contexts) -> dict[int, tuple[Any, Any]]:
        return {i: c.by(target)[i] for i in range(mapper.config.exact_layers)}

    both, options = (source, target), {"hold_back": hold_back} if hold_back else {}
    made: dict[str, tuple[Any, Callable[[Contexts], Start], tuple[Any, ...]]] = {
        "own": (target, own, (target,)),
        "mapped": (target, lambda c: mapped(c, mapper), (source,)),
        "random": (target, random, (source,)),
        "another mapper": (target, lambda c: mapped(c, another), (source,)),  # type: ignore[arg-type]
        "wrong document": (target, wrong, (source,)),
        "raw copy": (target, raw, both),
        "zero": (target, zero, (target,)),
        "none": (target, lambda c: from_(c, _cut(c.by(target), 0, sinks)), ()),
        "source": (source, lambda c: Start(_cut(c.by(source), 0, kept(c)), c.ids[:, kept(c) :]), (source,)),
    }
    unknown = set(names) - set(made)
    if unknown or ("another mapper" in names and another is None):
        raise BadInput(f"Unknown arms {sorted(unknown)}; there are {', '.join(made)}." if unknown else
                       "The arm 'another mapper' needs another mapper.")  # fmt: skip
    return [Arm(n, *made[n], options) for n in names]


def cache_arms(model: Any, configs: dict[str, Any]) -> list[Arm]:
    """The model's own cache ("own"), that cache compressed as each config says and rebuilt ("fp8" as a config: rounded
    to 8-bit floats), and none but the first token ("none"). What is asked then is never in the compressed part.
    """
    b = backends.of(model)

    def packed(c: Contexts, config: Any) -> Start:
        nothing = c.ids[:, :0]
        if config == "fp8":
            layers = {i: (_fp8(b, k), _fp8(b, v)) for i, (k, v) in c.by(model).items()}
            return Start(layers, nothing, sum(math.prod(x.shape) for kv in layers.values() for x in kv))
        cache = make_cache(model, config, b.install(model, c.by(model)))
        held = nbytes(model, cache)
        return Start(b.read(model, cache), nothing, held)

    def own(c: Contexts) -> Start:
        layers = c.by(model)
        return Start(layers, c.ids[:, :0], sum(k.nbytes + v.nbytes for k, v in layers.values()))

    def none(c: Contexts) -> Start:
        return Start(_cut(c.by(model), 0, 1), c.ids[:, :0])

    starts: dict[str, Callable[[Contexts], Start]] = {"own": own}
    starts |= {name: partial(packed, config=config) for name, config in configs.items()} | {"none": none}
    return [Arm(name, model, start, (model,), {}) for name, start in starts.items()]


def continued(arm: Arm, start: Start, tokens: np.ndarray) -> Any:
    """Logits [B, m + C, V] of the context tokens that are still to be read and of `tokens` [B, C], after the cache.

    With one context and several rows of tokens, every row continues that one context.
    """
    b, rest = backends.of(arm.model), start.rest
    n, layers = len(tokens), start.layers
    if len(rest) != n:
        rest = np.repeat(rest, n, 0)
        layers = {i: tuple(b.xp.concatenate([x] * n, 0) for x in kv) for i, kv in layers.items()}
    return b.logits(arm.model, np.concatenate([rest, tokens], 1), b.install(arm.model, layers))


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
    names: Sequence[str] = ARMS,
) -> Scores:
    """All arms on `passages` [n, prefix + C] of token ids: first the prompt of `prefix` tokens, then the continuation.

    names: of the arms to score, "own" first and "none" among them. Needs at least 2 passages, hold_back >= 1 and
    sinks >= 1 (without an exact first token there is no `none` to compare with).
    """
    if passages.ndim != 2 or len(passages) < 2 or passages.shape[1] <= prefix:
        raise BadInput(f"passages must be [n >= 2, more than {prefix}] token ids, got shape {passages.shape}")
    if sinks < 1 or hold_back < 1 or sinks + hold_back >= prefix:
        raise BadInput(f"sinks and hold_back must be >= 1, their sum under {prefix}; got {sinks} and {hold_back}")
    arms = transfer_arms(mapper, source, target, hold_back=hold_back - 1, sinks=sinks, names=names)
    parts = [passages[i : i + batch] for i in range(0, len(passages), batch)]
    if len(parts[-1]) == 1 and len(parts) > 1:  # `wrong document` needs a second passage beside each
        parts[-2:] = [np.concatenate(parts[-2:])]
    found: dict[str, list[tuple[np.ndarray, ...]]] = {arm.name: [] for arm in arms}
    for ids in parts:
        contexts, reference, wanted = Contexts(ids[:, : prefix - 1]), None, ids[:, prefix:]
        for arm in arms:
            logits = continued(arm, arm.start(contexts), ids[:, prefix - 1 : -1])[:, hold_back - 1 :]
            reference = logits if reference is None else reference
            found[arm.name].append(
                (metrics.nll(logits, wanted), metrics.kl(reference, logits), metrics.top1(reference, logits))
            )
    joined = {arm: [np.concatenate(x) for x in zip(*rows, strict=True)] for arm, rows in found.items()}
    nll, kl, agree = ({arm: three[i] for arm, three in joined.items()} for i in range(3))
    return Scores(nll, kl, agree)


def _fp8(b: Any, x: Any) -> Any:
    """Rounded to the nearest float8 (e4m3: 3 bits of mantissa, smallest step 2^-9, largest 448), in x's own dtype."""
    a = b.to_numpy(x)
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(a), 1e-30))), -6) - 3)
    return b.cast(b.from_numpy(np.clip(np.rint(a / step) * step, -448, 448).astype(np.float32), like=x), b.dtype_of(x))


def _wait(layers: Layers) -> None:
    """Until the arrays are there: a device may still be at work on them."""
    k, _ = layers[max(layers)]
    backends.of(k).to_numpy(k[:1, :1, -1:])


def _scrambled(mapper: Mapper, seed: int = 0) -> Mapper:
    rng = np.random.default_rng(seed)

    def drawn(p: Packed) -> Packed:
        deviation = float(np.std(np.asarray(host.to_numpy(p.weight), np.float64)))
        return replace(p, weight=(rng.standard_normal(p.weight.shape) * deviation).astype(np.float32))

    weights: Any = {t: tuple(drawn(p) for p in mapper.weights(t)) for t in mapper.layers}
    encoder = None if mapper.encoder is None else drawn(mapper.encoder)
    return Mapper(mapper.source, mapper.target, mapper.config, mapper.layers, weights, encoder=encoder)


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
