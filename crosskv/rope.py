"""Rotary position embeddings: rotate and unrotate, a pair of inverses, from (cos, sin) tables. See docs/maths.md,
section 1.

    rotate:    y1 = x1 cos - x2 sin        unrotate:  x1 = (y1 cos + y2 sin) / (cos^2 + sin^2)
               y2 = x2 cos + x1 sin                   x2 = (y2 cos - y1 sin) / (cos^2 + sin^2)

A model's attention scale (yarn, longrope) is inside cos and sin, so the inverse has to divide by cos^2 + sin^2. Pair
i is channels (i, i + R) when half-split and (2i, 2i + 1) when interleaved; channels from 2R on pass through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Shaped

from crosskv import backends
from crosskv.backends import Array, Rope
from crosskv.errors import MatchedKVError

Tables = tuple[Array, Array]
"""(cos, sin), each [T, R] or [B, 1, T, R], scale included."""


def rotate(x: Shaped[Any, "*B T D"], tables: Tables, interleaved: bool = False) -> Shaped[Any, "*B T D"]:
    """Rotate pre-RoPE keys to their positions. x [..., T, D]; tables with R <= D / 2 pairs. Paper sec. 3.3."""
    cos, sin = tables
    return _turn(x, cos, sin, interleaved)


def unrotate(y: Shaped[Any, "*B T D"], tables: Tables, interleaved: bool = False) -> Shaped[Any, "*B T D"]:
    """The inverse of `rotate` with the same tables: post-RoPE keys to pre-RoPE keys. Paper sec. 3.3."""
    cos, sin = tables
    norm = cos * cos + sin * sin
    return _turn(y, cos / norm, -sin / norm, interleaved)


def _turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    xp, r = backends.of(x).xp, cos.shape[-1]
    if r == 0:
        return x
    x1, x2 = (x[..., : 2 * r : 2], x[..., 1 : 2 * r : 2]) if interleaved else (x[..., :r], x[..., r : 2 * r])
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if interleaved:
        y1, y2 = xp.stack([y1, y2], -1).reshape(*x.shape[:-1], 2 * r), x[..., 2 * r :]
        return xp.concatenate([y1, y2], -1) if y2.shape[-1] else y1
    return xp.concatenate([y1, y2, x[..., 2 * r :]], -1)


def tables(rope: Rope, positions: np.ndarray, like: Array | None = None, dtype: str = "float64") -> Tables:
    """(cos, sin) of `rope` at integer positions [T] or [B, T], as arrays like `like` in `dtype`.

    The angle position * inv_freq is rounded to float32, because every host rounds it there (at position 131,071 that
    moves it by up to 4e-3 rad); its cosine and sine are taken in float64. Raises MatchedKVError when the frequencies
    of this rope are known only for other lengths (dynamic NTK, longrope).
    """
    positions = np.asarray(positions)
    _check_length(rope, positions)
    angles = positions[..., None].astype(np.float32) * np.asarray(rope.inv_freq, dtype=np.float32)
    angles = angles.astype(np.float64)
    angles = angles if angles.ndim == 2 else angles[:, None]
    host = (np.cos(angles) * rope.scale, np.sin(angles) * rope.scale)
    if like is None:
        return host
    b = backends.of(like)
    # cast on the host first: a device may have no float64
    cos, sin = (b.from_numpy(t.astype(np.float64 if dtype == "float64" else np.float32), like, dtype) for t in host)
    return cos, sin


def tables_at(rope: Rope, positions: Shaped[Any, "*B T"]) -> Tables:
    """`tables` in float32 on the device of `positions`, float32 whole numbers [T] or [B, T]: for every decoded token,
    where a trip to the host would cost more than the cosines. The angle is the same float32 number.
    """
    b = backends.of(positions)
    angles = positions[..., None] * b.from_numpy(np.asarray(rope.inv_freq, np.float32), positions)
    angles = angles if len(angles.shape) == 2 else angles[:, None]
    return b.xp.cos(angles) * rope.scale, b.xp.sin(angles) * rope.scale


def _check_length(rope: Rope, positions: np.ndarray) -> None:
    if rope.lengths is None or positions.size == 0:
        return
    low, high = rope.lengths
    length = int(positions.max()) + 1
    if length > high:
        raise MatchedKVError(
            f"This model's RoPE changes with the length of the sequence (dynamic or longrope): its frequencies are "
            f"known for lengths {low} to {high}, and these positions reach {length}. "
            "Use crosskv.handoff, which asks the live model, or ModelKVSpec.from_model(model, length=...)."
        )
