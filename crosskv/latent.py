"""A group of layers whose older tokens are compressed together. docs/maths.md, section 7.

    | sinks, exact, per layer | middle: latents of all layers, packed, in segments | tail, exact, per layer |

Attention sees exact keys and values of the tokens that are being read. When the last layer of the group has its tokens,
what is older than the tail moves into the middle, `block` tokens at a time, and the uncompressed arrays are let go.
Keys go in un-rotated (pre-RoPE) and are rotated on the way out.

A host calls its layers one after the other, so the group is shared state: each layer holds a `Member`. What changes
the tokens held (trim, reorder, clear) is done once, for the whole group, when the first member is asked, and every
other member has to ask for the same before anything else happens; a group that would fall apart says so. Arrays are
never changed in place, so a copy costs nothing and shares nothing that can change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crosskv import backends, rope
from crosskv.backends import Array, NotSaved, Rope
from crosskv.errors import BadInput
from crosskv.quant import Planes, Quantised, dequantise, fixed_codes, fixed_values, quantise
from crosskv.store import Pair, cat, cut, tokens
from crosskv.subspace import Basis

AS_A_WHOLE = (
    "Layers that are compressed together cannot be saved or restored one by one, as the host's own cache files do it: "
    "use crosskv.park and crosskv.resume."
)
Run = tuple[int, int, int]
"""Latents from start to stop have so many bits."""


# ---- latents as bytes ----


@dataclass(frozen=True)
class Raw:
    """Latents that are kept as they are."""

    x: Array

    @property
    def length(self) -> int:
        return self.x.shape[-2]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.x,)

    @property
    def nbytes(self) -> int:
        return self.x.nbytes

    def map(self, f: Callable[[Array], Array]) -> Raw:
        return Raw(f(self.x))

    def join(self, other: Raw) -> Raw:
        return Raw(backends.of(self.x).xp.concatenate([self.x, other.x], -2))

    def cut(self, start: int, stop: int) -> Raw:
        return Raw(backends.of(self.x).owned(self.x[..., start:stop, :]))


Packed = Raw | Planes | Quantised


@dataclass(frozen=True)
class Coder:
    """How latents become bytes: by `limits` (fixed for all tokens) where there are any, else with a scale for every
    `block` tokens; without runs they are kept in `dtype`.
    """

    runs: tuple[Run, ...] = ()
    limits: Array | None = None
    block: int = 64
    dtype: str = "float16"

    @property
    def step(self) -> int:
        """Tokens can be cut at multiples of this."""
        return self.block if self.runs and self.limits is None else 1

    def encode(self, a: Array) -> tuple[Packed, ...]:
        b = backends.of(a)
        if not self.runs:
            return (Raw(b.cast(a, self.dtype)),)
        if self.limits is not None:
            return tuple(fixed_codes(a[..., i:j], n, self.limits[i:j]) for i, j, n in self.runs)
        return tuple(quantise(a[..., i:j], n, self.block, -2) for i, j, n in self.runs)

    def decode(self, packed: Sequence[Any]) -> Array:
        if not self.runs:
            return packed[0].x
        if self.limits is not None:
            parts = [fixed_values(p, self.limits[i:j]) for p, (i, j, _) in zip(packed, self.runs, strict=True)]
        else:
            parts = [dequantise(p) for p in packed]
        return parts[0] if len(parts) == 1 else backends.of(parts[0]).xp.concatenate(parts, -1)

    def map(self, f: Callable[[Array], Array]) -> Coder:
        return self if self.limits is None else replace(self, limits=f(self.limits))


@dataclass(frozen=True)
class Side:
    """Keys or values of one group: their basis (None: kept as they are, layers stacked) and how latents are packed."""

    basis: Basis | None
    coder: Coder

    def encode(self, layers: Sequence[Array]) -> tuple[Packed, ...]:
        if self.basis is None:
            return (Raw(backends.of(layers[0]).xp.concatenate(list(layers), 1)),)
        return self.coder.encode(self.basis.encode(layers))

    def latents(self, packed: Sequence[Any]) -> Array:
        return packed[0].x if self.basis is None else self.coder.decode(packed)

    def layer(self, latents: Array, layer: int, layers: int, heads: int) -> Array:
        if self.basis is None:
            return latents[:, layer * heads : (layer + 1) * heads]
        return self.basis.decode(latents, layer, layers, heads)


@dataclass(frozen=True)
class Codec:
    """A method: what the tokens of one group become.

    sides: the bases for these keys (un-rotated) and values, [B, H, T, D] per layer of the group; asked again for every
    stretch of at least `first` tokens. own: the bases belong to the prompt (they count among its bytes), not to the
    model. exact: the dtype of sinks and tail, None for the model's. max_tokens: what a prompt may have.
    """

    sides: Callable[[Sequence[Array], Sequence[Array]], tuple[Side, Side]]
    own: bool
    sinks: int
    tail: int
    block: int
    first: int = 1
    exact: str | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of tokens under one pair of bases."""

    sides: tuple[Side, Side]
    packed: tuple[tuple[Packed, ...], tuple[Packed, ...]]

    @property
    def length(self) -> int:
        return self.packed[0][0].length

    def join(self, keys: Sequence[Array], values: Sequence[Array]) -> Segment:
        new = tuple(s.encode(x) for s, x in zip(self.sides, (keys, values), strict=True))
        both = tuple(
            tuple(a.join(b) for a, b in zip(mine, more, strict=True))  # type: ignore[arg-type]
            for mine, more in zip(self.packed, new, strict=True)
        )
        return replace(self, packed=(both[0], both[1]))

    def cut(self, stop: int) -> Segment:
        keys, values = (tuple(p.cut(0, stop) for p in side) for side in self.packed)
        return replace(self, packed=(keys, values))

    def map(self, f: Callable[[Array], Array], own: bool) -> Segment:
        def side(s: Side) -> Side:
            return replace(s, basis=s.basis.map(f)) if own and s.basis is not None else s

        packed = tuple(tuple(p.map(f) for p in parts) for parts in self.packed)
        return Segment((side(self.sides[0]), side(self.sides[1])), packed)  # type: ignore[arg-type]


# ---- the group ----


class Group:
    """The tokens of `layers` (their numbers in the model), which share one middle. See `members`.

    ropes, heads: as the model has them, ropes per layer of the group. Changed in place; deepcopy makes an independent
    one.
    """

    def __init__(self, codec: Codec, layers: Sequence[int], ropes: Sequence[Rope], heads: int):
        self.codec, self.layers, self.ropes, self.heads = codec, tuple(layers), tuple(ropes), heads
        self.all = [self]  # the groups of one cache, in the order of their first layers; see `link`
        self.clear()
        self.done, self.asked = 0, [0] * len(self.layers)
        self.last: tuple[Any, ...] = ()
        # of the first group: copies of all that not every member has got yet, and who has
        self.forks: list[tuple[list[Group], set[tuple[int, int]]]] = []

    def clear(self) -> None:
        none: list[Pair | None] = [None] * len(self.layers)
        self.sinks, self.tails = list(none), list(none)
        self.middle: tuple[Segment, ...] = ()
        self.start: Array | None = None  # [B, 1] float32: the position of index 0, when it is not 0
        self.dtype, self.width = "", 0  # of the model's keys: heads * head dim
        self.scratch: list[tuple[Array, Array]] | None = None

    def members(self) -> list[Member]:
        return [Member(self, i) for i in range(len(self.layers))]

    def __deepcopy__(self, memo: dict) -> Group:
        new = copy.copy(self)
        memo[id(self)] = new
        new.sinks, new.tails, new.asked = list(self.sinks), list(self.tails), list(self.asked)
        new.scratch, new.forks = None, []
        new.all = copy.deepcopy(self.all, memo)
        return new

    # -- sizes --

    @property
    def packed_tokens(self) -> int:
        return sum(s.length for s in self.middle)

    def length(self, j: int) -> int:
        return tokens(self.sinks[j]) + self.packed_tokens + tokens(self.tails[j])

    def batch(self, j: int) -> int:
        pair = self.sinks[j] or self.tails[j]
        if pair is not None:
            return pair[0].shape[0]
        return self.middle[0].packed[0][0].arrays[0].shape[0] if self.middle else 0

    def packed_share(self, j: int, side: int) -> int:
        """Bytes of the latents of keys (0) or values (1): a layer's own, or all of them the leader's when shared."""
        total = 0
        for s in self.middle:
            size, basis = sum(p.nbytes for p in s.packed[side]), s.sides[side].basis
            shared = basis is not None and basis.kind == "joint"
            total += (size if j == 0 else 0) if shared else size // len(self.layers)
        return total

    @property
    def basis_bytes(self) -> int:
        """Bytes of the bases that belong to this prompt."""
        if not self.codec.own:
            return 0
        return sum(side.basis.nbytes for s in self.middle for side in s.sides if side.basis is not None)

    def arrays(self, j: int) -> list[Array]:
        """What layer j holds alone; the leader (j = 0) also has what the group shares."""
        out = [*(self.sinks[j] or ()), *(self.tails[j] or ())]
        if j == 0:
            out += [a for s in self.middle for side in s.packed for p in side for a in p.arrays]
            out += [a for s in self.middle for x in s.sides if x.basis and self.codec.own for a in x.basis.arrays]
        return out

    # -- reading and writing --

    def append(self, j: int, keys: Array, values: Array, positions: Any) -> Pair:
        self._check(j, keys, values)
        self.all[0].forks = []
        self.dtype, self.width = backends.of(keys).dtype_of(keys), keys.shape[1] * keys.shape[-1]
        if not any(map(self.length, range(len(self.layers)))):
            self._place(keys, positions)
        if self.middle and self.scratch is None:
            self.scratch = self._latents()
        before = self._whole(j, self.scratch)
        whole: Pair = (keys, values) if before is None else cat(before, (keys, values))
        new = self._stored(keys, values)
        self.tails[j] = new if self.tails[j] is None else cat(self.tails[j], new)  # type: ignore[arg-type]
        lengths = {self.length(i) for i in range(len(self.layers))}
        if len(lengths) == 1:  # the last layer has its tokens
            self.scratch = None
            self._fold()
            for i, tail in enumerate(self.tails):
                if tail is not None and tail[0].shape[-2] == keys.shape[-2]:
                    self.tails[i] = cut(tail, 0, tokens(tail))  # not views of the model's own larger arrays
        return whole

    def _stored(self, keys: Array, values: Array) -> Pair:
        """As sinks and tail hold them."""
        b = backends.of(keys)
        dtype = self.codec.exact or self.dtype
        return b.cast(keys, dtype), b.cast(values, dtype)

    def read(self, j: int) -> Pair | None:
        return self._whole(j, self._latents())

    def _whole(self, j: int, latents: Any) -> Pair | None:
        middle = self._rebuilt(j, latents) if self.middle else None
        parts = [p for p in (self.sinks[j], middle, self.tails[j]) if p is not None]
        if not parts:
            return None
        return cat(*((self._cast(k, self.dtype), self._cast(v, self.dtype)) for k, v in parts))

    @staticmethod
    def _cast(x: Array, dtype: str) -> Array:
        return backends.of(x).cast(x, dtype)

    def _latents(self) -> list[tuple[Array, Array]]:
        return [(s.sides[0].latents(s.packed[0]), s.sides[1].latents(s.packed[1])) for s in self.middle]

    def _rebuilt(self, j: int, latents: Any) -> Pair:
        """The middle of layer j, keys rotated, in the model's dtype."""
        b, n = backends.of(latents[0][0]), len(self.layers)
        pairs = [
            tuple(side.layer(a, j, n, self.heads) for side, a in zip(s.sides, both, strict=True))
            for s, both in zip(self.middle, latents, strict=True)
        ]
        keys, values = cat(*pairs)
        first = tokens(self.sinks[j])
        keys = rope.rotate(keys, self._tables(j, first, first + self.packed_tokens, keys), self.ropes[j].interleaved)
        return b.cast(keys, self.dtype), b.cast(values, self.dtype)

    def _tables(self, j: int, start: int, stop: int, like: Array) -> rope.Tables:
        at = backends.of(like).from_numpy(np.arange(start, stop, dtype=np.float32), like)
        return rope.tables_at(self.ropes[j], at if self.start is None else self.start + at)

    def _place(self, keys: Array, positions: Any) -> None:
        """Where index 0 stands in each sequence: below 0 with left padding."""
        self.start = None
        if positions is None or len(positions.shape) > 2:
            return
        last = backends.of(positions).to_numpy(positions).reshape(-1, keys.shape[-2])[:, -1:]
        start = np.broadcast_to(last - (keys.shape[-2] - 1), (keys.shape[0], 1)).astype(np.float32)
        if start.any():
            self.start = backends.of(keys).from_numpy(np.array(start), keys)

    def _fold(self) -> None:
        """Fill the sinks, and move what is older than the tail into the middle, whole blocks at a time."""
        c, t = self.codec, tokens(self.tails[0])
        take = 0
        if not self.middle:
            missing = c.sinks + self._padding() - tokens(self.sinks[0])
            take = min(max(0, missing), t)
        fold = max(0, t - take - c.tail) // c.block * c.block
        if not self.middle and fold < c.first:
            fold = 0
        if fold:  # before anything is moved: it may raise, and no token may be held twice
            self._pack(take, fold)
        for j in range(len(self.layers)) if take else ():
            first = cut(self.tails[j], 0, take)
            self.sinks[j] = first if self.sinks[j] is None else cat(self.sinks[j], first)  # type: ignore[arg-type]
        for j in range(len(self.layers)) if take + fold else ():
            self.tails[j] = cut(self.tails[j], take + fold, t) if take + fold < t else None

    def _padding(self) -> int:
        """Padding of the row with most of it: counted with the sinks, so that every row has its first tokens exact."""
        if self.start is None:
            return 0
        return max(0, -int(backends.of(self.start).to_numpy(self.start).min()))

    def _pack(self, start: int, n: int) -> None:
        """n tokens of the tails, from `start`, become latents."""
        before = tokens(self.sinks[0]) + self.packed_tokens + start
        keys, values = [], []
        for j, tail in enumerate(self.tails):
            k, v = (x[..., start : start + n, :] for x in tail)  # type: ignore[union-attr]
            b = backends.of(k)
            wide = k if b.dtype_of(k) == "float64" else b.cast(k, "float32")
            tables = self._tables(j, before, before + n, wide)
            keys.append(rope.unrotate(wide, tables, self.ropes[j].interleaved))
            values.append(v)
        self._finite(keys, values)
        if self.middle and n < self.codec.first:
            self.middle = (*self.middle[:-1], self.middle[-1].join(keys, values))
            return
        sides = self.codec.sides(keys, values)
        if self.middle and not self.codec.own:
            self.middle = (*self.middle[:-1], self.middle[-1].join(keys, values))
        else:
            packed = sides[0].encode(keys), sides[1].encode(values)
            self.middle = (*self.middle, Segment(sides, packed))

    def _finite(self, keys: list[Array], values: list[Array]) -> None:
        for name, xs in (("keys", keys), ("values", values)):
            b = backends.of(xs[0])
            sums = b.to_numpy(b.xp.stack([b.cast(x, "float32").sum() for x in xs]))
            if not np.isfinite(sums).all():
                layer = self.layers[int(np.flatnonzero(~np.isfinite(sums))[0])]
                raise BadInput(
                    f"Cannot compress: the {name} of layer {layer} hold NaN or Inf. A half-precision model that "
                    "overflows is the usual cause: run it in bfloat16 or float32."
                )

    # -- what is done to the whole group --

    def together(self, j: int, name: str, arg: Any, act: Callable[[], None]) -> None:
        """Do `act` when the first member asks; the others have to ask for the same thing."""
        if self.asked[j] < self.done:
            if (name, arg) != self.last:
                raise BadInput(self._apart(f"layer {self.layers[j]} is asked to {name}, another was to {self.last[0]}"))
            self.asked[j] += 1
            return
        self._level(j, name)
        self.all[0].forks = []
        act()
        self.done, self.last = self.done + 1, (name, arg)
        self.asked[j] += 1

    def fork(self, j: int) -> Group:
        """A copy that goes its own way: the n-th time that each member of the cache asks, it gets its part of the same
        copy as the others. What changes the cache in between leaves no copy behind for those who have not asked."""
        self._level(j, "fork")
        at, waiting = next(i for i, g in enumerate(self.all) if g is self), self.all[0].forks
        new, got = next(((x, got) for x, got in waiting if (at, j) not in got), (None, set[tuple[int, int]]()))
        if new is None:
            new = copy.deepcopy(self.all)
            waiting.append((new, got))
        got.add((at, j))
        self.all[0].forks = [f for f in waiting if len(f[1]) < sum(len(g.layers) for g in self.all)]
        return new[at]

    def _level(self, j: int, name: str) -> None:
        if min(self.asked) < self.done or len({self.length(i) for i in range(len(self.layers))}) > 1:
            raise BadInput(self._apart(f"layer {self.layers[j]} is asked to {name} while others lag behind"))

    def trim(self, n: int) -> None:
        keep = self.length(0) - n
        if keep <= 0:
            self.clear()
            return
        s, m = tokens(self.sinks[0]), self.packed_tokens
        for j in range(len(self.layers)):
            if keep <= s:
                self.sinks[j], self.tails[j] = cut(self.sinks[j], 0, keep), None
            elif keep >= s + m:
                self.tails[j] = cut(self.tails[j], 0, keep - s - m) if keep > s + m else None
        if keep <= s:
            self.middle = ()
        elif keep < s + m:
            self._trim_middle(keep - s)

    def _trim_middle(self, keep: int) -> None:
        """Whole steps of the coders stay packed; what is left of the one that is cut becomes the tail, as it reads."""
        kept, rest = [], keep
        for s in self.middle:
            if rest <= 0:
                break
            kept.append((s, min(rest, s.length)))
            rest -= s.length
        last, n = kept[-1]
        step = max(side.coder.step for side in last.sides)
        whole = n if n == last.length else n // step * step
        if whole < n:
            latents = self._latents()
            for j in range(len(self.layers)):
                self.tails[j] = cut(self._stored(*self._rebuilt(j, latents)), keep - (n - whole), keep)
        else:
            self.tails = [None] * len(self.layers)
        head = tuple(s for s, _ in kept[:-1])
        self.middle = (*head, last if whole == last.length else last.cut(whole)) if whole else head

    def map(self, f: Callable[[Array], Array]) -> None:
        def pair(p: Pair | None) -> Pair | None:
            return None if p is None else (f(p[0]), f(p[1]))

        self.sinks, self.tails = [pair(p) for p in self.sinks], [pair(p) for p in self.tails]
        self.middle = tuple(s.map(f, self.codec.own) for s in self.middle)
        self.start = None if self.start is None else f(self.start)

    def _check(self, j: int, keys: Array, values: Array) -> None:
        if len(keys.shape) != 4 or tuple(keys.shape) != tuple(values.shape):
            raise BadInput(
                f"Expected keys and values [B, H, T, D] of the same shape, got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}."
            )
        if min(self.asked) < self.done:
            raise BadInput(self._apart(f"not every layer was asked to {self.last[0]}"))
        most = self.codec.max_tokens
        if most is not None and self.length(j) + keys.shape[-2] > most:
            raise BadInput(
                f"{self.length(j) + keys.shape[-2]} tokens, but this cache is for at most {most} (xkv_max_ctx, "
                "max_tokens). Raise the limit or shorten the prompt."
            )
        if self.length(j) > min(self.length(i) for i in range(len(self.layers))):
            raise BadInput(self._apart(f"layer {self.layers[j]} gets tokens again before the others have theirs"))
        own = self.length(j)
        for g in self.all if self.all[0] is self and j == 0 else ():  # a call begins
            if {g.length(i) for i in range(len(g.layers))} != {own}:
                raise BadInput(g._apart(f"they do not all hold {own} tokens, as layer {self.layers[0]} does"))
        held = self.sinks[j] or self.tails[j]
        if held is not None and (held[0].shape[:2], held[0].shape[-1]) != (keys.shape[:2], keys.shape[-1]):
            raise BadInput(
                f"This cache holds {tuple(held[0].shape)} (batch, heads, tokens, head dim), the new tokens are "
                f"{tuple(keys.shape)}."
            )

    def _apart(self, what: str) -> str:
        return (
            f"Layers {list(self.layers)} share one compressed cache, but {what}. Use the cache with one model, one "
            "call at a time; after an interrupted call make a new one."
        )


def link(groups: Sequence[Group]) -> None:
    """Make these the groups of one cache: when they come apart, by a call that was interrupted between two of them or
    a trim of one alone, the next token is refused. The first one has the model's first layer.
    """
    for g in groups:
        g.all = list(groups)


@dataclass(frozen=True)
class Member:
    """One layer's part in a group; a `backends.Held` that changes in place."""

    group: Group
    index: int

    @property
    def length(self) -> int:
        return self.group.length(self.index)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.group.arrays(self.index))

    @property
    def batch(self) -> int:
        return self.group.batch(self.index)

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes held of this layer's key latents; of latents that layers share, the leader has all."""
        return self.group.packed_share(self.index, 0)

    @property
    def compressed_value_bytes(self) -> int:
        return self.group.packed_share(self.index, 1)

    @property
    def shared_basis_bytes(self) -> int:
        """Bytes held of the group's bases, the leader's; the others have 0. A calibrated basis is the model's."""
        return self.group.basis_bytes if self.index == 0 else 0

    @property
    def fp16_key_bytes(self) -> int:
        """What the keys of all tokens held would take at 2 bytes an entry."""
        return 2 * self.length * self.batch * self.group.width

    value_fp16_bytes = fp16_key_bytes

    def append(self, keys: Array, values: Array, positions: Any = None) -> tuple[Member, Pair]:
        return self, self.group.append(self.index, keys, values, positions)

    def read(self) -> Pair | None:
        return self.group.read(self.index)

    def trim(self, n: int) -> Member:
        if n < 0:
            raise BadInput(f"Cannot trim {n} tokens.")
        if n:
            self.group.together(self.index, "trim", n, lambda: self.group.trim(n))
        return self

    def map(self, f: Callable[[Array], Array]) -> Member:
        self.group.together(self.index, "reorder", None, lambda: self.group.map(f))
        return self

    def clear(self) -> Member:
        self.group.together(self.index, "reset", None, self.group.clear)
        return self

    def fork(self) -> Member:
        return Member(self.group.fork(self.index), self.index)

    def state(self) -> list[Any]:
        return [*self.group.arrays(self.index), NotSaved(AS_A_WHOLE)]

    def restore(self, state: Sequence[Any]) -> Member:
        raise BadInput(AS_A_WHOLE)
