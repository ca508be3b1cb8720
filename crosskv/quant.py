"""Group-affine quantisation with the codes really packed.

    low_g <= min x_g        step_g >= (max x_g - low_g) / (2^bits - 1)        code = round((x - low_g) / step_g)
    x'  = low_g + code * step_g        |x - x'| <= step_g / 2

A group g is `group` neighbours along one axis (the last one may be shorter): along the tokens for keys, whose large
values keep to a few channels, along the channels for values (KIVI). low and step are rounded outwards to the dtype in
which they are kept, and the codes are taken against the rounded ones, so that the bound holds for what is stored.

Codes are packed along the channels, so that tokens can be appended and cut without touching a byte. 3 bits are a plane
of 2-bit codes and a plane of 1-bit codes; 5 and 6 are likewise two planes.

`Planes` holds codes whose range is known beforehand (`fixed_codes`, `fixed_values`), so that no scale is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Shaped

from crosskv import backends
from crosskv.backends import Array
from crosskv.errors import BadInput
from crosskv.layout import EPS

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code -> bits of its planes, low bits first; each divides a byte."""
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-126}
"""A step is never smaller: a group of equal values has no spread to divide by."""


@dataclass(frozen=True)
class Quantised:
    """Packed codes of x [..., T, D], with what is needed to have x back. Never changed in place.

    planes: uint8 [..., T, ceil(D * plane bits / 8)]; step, low: x's shape with `axis` (-1 or -2) counted in groups.
    """

    planes: tuple[Array, ...]
    step: Array
    low: Array
    bits: int
    group: int
    axis: int
    width: int
    dtype: str

    @property
    def length(self) -> int:
        """T, the tokens held."""
        return self.planes[0].shape[-2]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Everything that takes memory."""
        return (*self.planes, self.step, self.low)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def map(self, f: Callable[[Array], Array]) -> Quantised:
        """With f applied to every array."""
        return replace(self, planes=tuple(map(f, self.planes)), step=f(self.step), low=f(self.low))

    def join(self, other: Quantised) -> Quantised:
        """These tokens, then those of `other`, which has the same options. Keys have to end with a whole group."""
        cat = backends.of(self.low).xp.concatenate
        if self.axis == -2 and self.length % self.group:
            raise BadInput(f"{self.length} tokens do not end with a whole group of {self.group}; nothing can follow.")
        mine, theirs = self.arrays, other.arrays
        *planes, step, low = (cat([a, b], -2) for a, b in zip(mine, theirs, strict=True))
        return replace(self, planes=tuple(planes), step=step, low=low)

    def cut(self, start: int, stop: int) -> Quantised:
        """The tokens from start to stop, copied. Both are multiples of the group along the tokens (or the end)."""
        b, g = backends.of(self.low), self.group
        if self.axis == -2 and (start % g or (stop % g and stop != self.length)):
            raise BadInput(f"Tokens {start} to {stop} cut through a group of {g}.")
        scaled = slice(start // g, -(-stop // g)) if self.axis == -2 else slice(start, stop)
        return replace(
            self,
            planes=tuple(b.owned(p[..., start:stop, :]) for p in self.planes),
            step=b.owned(self.step[..., scaled, :]),
            low=b.owned(self.low[..., scaled, :]),
        )


@dataclass(frozen=True)
class Planes:
    """Packed codes [..., T, D] alone; their ranges are kept elsewhere, once for all tokens."""

    planes: tuple[Array, ...]
    bits: int
    width: int

    @property
    def length(self) -> int:
        return self.planes[0].shape[-2]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.planes

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.planes)

    def map(self, f: Callable[[Array], Array]) -> Planes:
        return replace(self, planes=tuple(map(f, self.planes)))

    def join(self, other: Planes) -> Planes:
        cat = backends.of(self.planes[0]).xp.concatenate
        return replace(self, planes=tuple(cat([a, b], -2) for a, b in zip(self.planes, other.planes, strict=True)))

    def cut(self, start: int, stop: int) -> Planes:
        b = backends.of(self.planes[0])
        return replace(self, planes=tuple(b.owned(p[..., start:stop, :]) for p in self.planes))


def fixed_codes(x: Shaped[Any, "*B T D"], bits: int, limits: Shaped[Any, " D"]) -> Planes:
    """x in `bits` bits, clipped: code = round((x + limit) / step), step = 2 limit / (2^bits - 1)."""
    b = backends.of(x)
    levels = 2**bits - 1
    codes = b.xp.clip(b.xp.round((_wide(x) + limits) * (levels / 2 / limits)), 0, levels)
    return Planes(pack(b.cast(codes, "uint8"), bits), bits, x.shape[-1])


def fixed_values(q: Planes, limits: Shaped[Any, " D"]) -> Shaped[Any, "*B T D"]:
    """code * step - limit, float32."""
    codes = backends.of(limits).cast(unpack(q.planes, q.bits, q.width), "float32")
    return codes * (2 / (2**q.bits - 1) * limits) - limits


def quantise(x: Shaped[Any, "*B T D"], bits: int, group: int, axis: int, scales: str = "float16") -> Quantised:
    """Pack x. axis: -2 groups tokens (keys), -1 groups channels (values); scales: the dtype of step and low.

    Raises BadInput for NaN or Inf, and for values that `scales` cannot hold (float16: beyond 65,504).
    """
    if bits not in PLANES or scales not in TINY or axis not in (-1, -2) or group < 1:
        raise BadInput(
            f"Expected bits of {list(PLANES)}, a group of at least 1, axis -1 or -2, scales of {list(TINY)}; "
            f"got bits={bits!r}, group={group!r}, axis={axis!r}, scales={scales!r}."
        )
    b, dtype = backends.of(x), backends.of(x).dtype_of(x)
    xp, levels = b.xp, 2**bits - 1
    y = _grouped(_wide(x), group, axis)
    at = len(y.shape) + axis
    smallest, largest = b.amin(y, at), b.amax(y, at)
    eps, tiny = EPS[scales], TINY[scales]
    low = b.cast(smallest, scales)
    below = b.cast(smallest - abs(smallest) * eps - tiny, scales)
    low = xp.where(_wide(low) > smallest, below, low)
    step = b.cast((largest - _wide(low)) * ((1 + eps) / levels) + tiny, scales)
    if not bool((xp.isfinite(_wide(step)) & xp.isfinite(_wide(low))).all()):
        raise BadInput(
            f"Cannot quantise: the {'keys or values' if len(x.shape) > 2 else 'array'} hold NaN or Inf, or values "
            f"that scales in {scales} cannot hold. A half-precision model that overflows is the usual cause; "
            "for large but finite values use scales='float32'."
        )
    codes = xp.clip(xp.round((y - _wide(low)) / _wide(step)), 0, levels)
    codes = _ungrouped(b.cast(codes, "uint8"), x.shape, axis)
    return Quantised(pack(codes, bits), _squeezed(step, axis), _squeezed(low, axis), bits, group, axis,
                     x.shape[-1], dtype)  # fmt: skip


def dequantise(q: Quantised) -> Array:
    """low + code * step, in the dtype that was packed."""
    b = backends.of(q.low)
    shape = (*q.planes[0].shape[:-1], q.width)
    codes = _grouped(unpack(q.planes, q.bits, q.width), q.group, q.axis)
    step, low = (_wide(_unsqueezed(a, q.axis)) for a in (q.step, q.low))
    codes = b.cast(codes, b.dtype_of(low))
    return b.cast(_ungrouped(codes * step + low, shape, q.axis), q.dtype)


def pack(codes: Shaped[Any, "*B D"], bits: int) -> tuple[Array, ...]:
    """uint8 codes below 2^bits, packed along the last axis: byte i of a plane holds codes i, i + m, i + 2m, ... for m
    bytes."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        part = codes if width == bits else (codes >> shift) & (2**width - 1)
        planes.append(_packed(part, width))
        shift += width
    return tuple(planes)


def _packed(codes: Array, width: int) -> Array:
    if width == 8:
        return backends.of(codes).owned(codes)  # perhaps cut from a padded array
    n, per = codes.shape[-1], 8 // width
    m = -(-n // per)
    if m * per > n:
        xp = backends.of(codes).xp
        codes = xp.concatenate([codes, *[xp.zeros_like(codes[..., :1])] * (m * per - n)], -1)
    out = codes[..., :m]
    for j in range(1, per):
        out = out | (codes[..., j * m : (j + 1) * m] << (width * j))
    return out


def unpack(planes: tuple[Array, ...], bits: int, n: int) -> Shaped[Any, "*B D"]:
    """The n codes along the last axis, the inverse of pack."""
    xp = backends.of(planes[0]).xp
    out, shift = None, 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        mask = 2**width - 1
        codes = plane if width == 8 else xp.concatenate([(plane >> (width * j)) & mask for j in range(8 // width)], -1)
        codes = codes if codes.shape[-1] == n else codes[..., :n]
        out = codes if out is None else out | (codes << shift)
        shift += width
    return out


def _wide(x: Array) -> Array:
    """For arithmetic: float32, or float64 where x is that."""
    b = backends.of(x)
    return x if b.dtype_of(x) == "float64" else b.cast(x, "float32")


def _grouped(x: Array, group: int, axis: int) -> Array:
    """The axis n split into (groups, group); what the last group lacks is its last entry, repeated."""
    at = len(x.shape) + axis
    n = x.shape[at]
    group = min(group, n)
    m = -(-n // group)
    if m * group > n:
        xp = backends.of(x).xp
        last = x[..., n - 1 :, :] if axis == -2 else x[..., n - 1 :]
        x = xp.concatenate([x] + [last] * (m * group - n), axis)
    return x.reshape(*x.shape[:at], m, group, *x.shape[at + 1 :])


def _ungrouped(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    at = len(shape) + axis
    m, group = x.shape[at], x.shape[at + 1]
    x = x.reshape(*shape[:at], m * group, *shape[at + 1 :])
    if m * group == shape[at]:
        return x
    return x[..., : shape[at], :] if axis == -2 else x[..., : shape[at]]


def _squeezed(x: Array, axis: int) -> Array:
    """Without the axis of length 1 inside each group."""
    at = len(x.shape) + axis
    return x.reshape(*x.shape[:at], *x.shape[at + 1 :])


def _unsqueezed(x: Array, axis: int) -> Array:
    at = len(x.shape) + axis + 1
    return x.reshape(*x.shape[:at], 1, *x.shape[at:])
