"""One layer's keys and values, kept packed: exact first tokens, packed ones, exact last tokens.

    | sinks, exact | middle, packed in blocks of `group` tokens | tail, exact |

Attention sees exact keys and values of the tokens that are being read, whatever their number; packing comes after it.
The tail keeps at least the last `tail` tokens and at most `group - 1` more; what is older is folded into the middle,
whole groups at a time, so that no token is packed twice (but for a trim that cuts through a packed group: the rest of
that group becomes the tail, as it was read, and is packed again later).

Keys are packed as the host caches them, after RoPE: measured on the family, un-rotating them first made no difference
above its standard error at 2 to 4 bits (docs/log.md).

Stores are values: nothing is changed in place, so a copy is free and no conversation can leak into another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from crosskv import backends
from crosskv.backends import Array
from crosskv.errors import BadInput, known_fields
from crosskv.layout import EPS
from crosskv.quant import Quantised, dequantise, quantise

Pair = tuple[Any, Any]
"""Keys and values."""
INT_BITS = (2, 3, 4, 8)


@known_fields
@dataclass(frozen=True)
class IntConfig:
    """Plain integers: keys per channel over `group` tokens, values per token over `group` channels.

    bits_keys, bits_values: 2, 3, 4 or 8. sinks: first tokens that stay exact. tail: last tokens that stay exact.
    scales: the dtype of a group's step and lowest value; float16 holds up to 65,504.
    """

    bits_keys: int = 4
    bits_values: int = 4
    group: int = 64
    sinks: int = 4
    tail: int = 64
    scales: str = "float16"

    def __post_init__(self) -> None:
        for name, low in (("bits_keys", 2), ("bits_values", 2), ("group", 1), ("sinks", 0), ("tail", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise BadInput(f"{name} must be an integer of at least {low}, got {value!r}.")
        for name in ("bits_keys", "bits_values"):
            if getattr(self, name) not in INT_BITS:
                raise BadInput(f"{name} must be one of {list(INT_BITS)}, got {getattr(self, name)}.")
        if self.scales not in EPS or self.scales == "float64":
            raise BadInput(f"scales must be float16, bfloat16 or float32, got {self.scales!r}.")

    def pack(self, keys: Array, values: Array) -> tuple[Quantised, Quantised]:
        """Keys and values [B, H, T, D], T a multiple of the group, packed."""
        return (
            quantise(keys, self.bits_keys, self.group, -2, self.scales),
            quantise(values, self.bits_values, self.group, -1, self.scales),
        )


@dataclass(frozen=True)
class Store:
    """A layer's tokens under `config`. See backends.Held for the operations."""

    config: IntConfig
    sinks: Pair | None = None
    middle: tuple[Quantised, Quantised] | None = None
    tail: Pair | None = None

    def __deepcopy__(self, memo: dict) -> Store:
        return self  # a value

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens in the sinks, the middle and the tail."""
        middle = 0 if self.middle is None else self.middle[0].length
        return tokens(self.sinks), middle, tokens(self.tail)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def batch(self) -> int:
        return 0 if self._shape is None else self._shape[0]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Everything that takes memory."""
        packed = () if self.middle is None else (*self.middle[0].arrays, *self.middle[1].arrays)
        return (*(self.sinks or ()), *packed, *(self.tail or ()))

    def append(self, keys: Array, values: Array, positions: Any = None) -> tuple[Store, Pair]:
        self._check(keys, values)
        tail = (keys, values) if self.tail is None else cat(self.tail, (keys, values))
        parts = [p for p in (self.sinks, self._unpacked(), tail) if p is not None]
        whole = cat(*parts)
        store = replace(self, tail=tail)._folded()
        if store.tail is not None and store.tail[0] is keys:  # the model's own arrays, perhaps views of larger ones
            store = replace(store, tail=cut(tail, 0, tokens(tail)))
        return store, whole

    def read(self) -> Pair | None:
        parts = [p for p in (self.sinks, self._unpacked(), self.tail) if p is not None]
        return cat(*parts) if parts else None

    def trim(self, n: int) -> Store:
        if n < 0:
            raise BadInput(f"Cannot trim {n} tokens.")
        if n == 0:
            return self
        keep = self.length - n
        if keep <= 0:
            return self.clear()
        s, m, _ = self.lengths
        if keep >= s + m:
            return replace(self, tail=cut(self.tail, 0, keep - s - m) if keep > s + m else None)
        if keep <= s:
            return replace(self, sinks=cut(self.sinks, 0, keep), middle=None, tail=None)
        # Into the packed part: its whole groups stay, the rest of the group that is cut through becomes the tail.
        whole = (keep - s) // self.config.group * self.config.group
        middle = self.middle
        rest = cut(self._unpacked(), whole, keep - s) if keep - s > whole else None
        kept = tuple(q.cut(0, whole) for q in middle) if whole else None  # type: ignore[union-attr]
        return replace(self, middle=kept, tail=rest)  # type: ignore[arg-type]

    def map(self, f: Callable[[Array], Array]) -> Store:
        def pair(p: Pair | None) -> Any:
            return None if p is None else (f(p[0]), f(p[1]))

        middle = None if self.middle is None else (self.middle[0].map(f), self.middle[1].map(f))
        return replace(self, sinks=pair(self.sinks), middle=middle, tail=pair(self.tail))

    def clear(self) -> Store:
        return Store(self.config)

    def fork(self) -> Store:
        return self  # a value

    def state(self) -> list[Any]:
        def packed(q: Quantised | None) -> list[Any]:
            if q is None:
                return [None] * 6
            return [*q.planes, *[None] * (2 - len(q.planes)), q.step, q.low, q.width, q.dtype]

        keys, values = (None, None) if self.middle is None else self.middle
        options = [getattr(self.config, f.name) for f in fields(self.config)]
        exact = [*(self.sinks or (None, None)), *(self.tail or (None, None))]
        return [*options, *exact, *packed(keys), *packed(values)]

    def restore(self, state: Sequence[Any]) -> Store:
        state = list(state)
        n = len(fields(IntConfig))
        if len(state) != n + 16:
            raise BadInput(f"This is not the state of a packed cache: {len(state)} entries instead of {n + 16}.")
        config = IntConfig(*state[:n])

        def packed(s: list[Any], bits: int, axis: int) -> Quantised:
            planes = tuple(p for p in s[:2] if p is not None)
            return Quantised(planes, s[2], s[3], bits, config.group, axis, s[4], s[5])

        sk, sv, tk, tv, *rest = state[n:]
        middle = None
        if rest[0] is not None:
            middle = packed(rest[:6], config.bits_keys, -2), packed(rest[6:], config.bits_values, -1)
        return Store(config, None if sk is None else (sk, sv), middle, None if tk is None else (tk, tv))

    def _check(self, keys: Array, values: Array) -> None:
        if len(keys.shape) != 4 or keys.shape[:3] != values.shape[:3]:
            raise BadInput(
                f"Expected keys and values [B, H, T, D] of the same tokens, got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}."
            )
        new = (*keys.shape[:2], keys.shape[-1], values.shape[-1])
        if self._shape not in (None, new):
            raise BadInput(f"This cache holds {self._shape} (batch, heads, head dims), the new tokens are {new}.")

    @property
    def _shape(self) -> tuple[int, ...] | None:
        if self.middle is not None:
            return (*self.middle[0].low.shape[:2], *(q.width for q in self.middle))
        pair = self.sinks or self.tail
        return None if pair is None else (*pair[0].shape[:2], *(x.shape[-1] for x in pair))

    def _unpacked(self) -> Pair | None:
        return None if self.middle is None else (dequantise(self.middle[0]), dequantise(self.middle[1]))

    def _folded(self) -> Store:
        """With the sinks filled, and the whole groups that are older than the tail packed."""
        c = self.config
        s, m, t = self.lengths
        take = min(c.sinks - s, t) if m == 0 else 0  # a trim into the sinks leaves room for new ones
        fold = max(0, t - take - c.tail) // c.group * c.group
        if not (take or fold):
            return self
        sinks = self.sinks
        if take:
            first = cut(self.tail, 0, take)
            sinks = first if sinks is None else cat(sinks, first)
        middle = self.middle
        if fold:
            new = c.pack(*cut(self.tail, take, take + fold))
            middle = new if middle is None else (middle[0].join(new[0]), middle[1].join(new[1]))
        rest = cut(self.tail, take + fold, t) if take + fold < t else None
        return replace(self, sinks=sinks, middle=middle, tail=rest)


def tokens(p: Pair | None) -> int:
    return 0 if p is None else p[0].shape[-2]


def cat(*parts: Pair) -> Pair:
    """The pairs one after the other along the tokens."""
    if len(parts) == 1:
        return parts[0]
    xp = backends.of(parts[0][0]).xp
    k, v = (xp.concatenate(list(x), -2) for x in zip(*parts, strict=True))
    return k, v


def cut(p: Pair | None, start: int, stop: int) -> Pair:
    """Tokens from start to stop, in memory of their own."""
    assert p is not None
    b = backends.of(p[0])
    k, v = (b.owned(x[..., start:stop, :]) for x in p)
    return k, v
