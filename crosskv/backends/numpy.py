"""Arrays in NumPy: the float64 oracle, and the host memory of the other backends. It hosts no models.

bfloat16 has no NumPy dtype: on the host its bits are held in uint16 arrays, which have no other use here.
"""

from __future__ import annotations

import numpy as np

xp = np


def dtype_of(x: np.ndarray) -> str:
    return "bfloat16" if x.dtype == np.uint16 else x.dtype.name


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype_of(x) == dtype:
        return x
    wide = to_numpy(x)
    if dtype == "bfloat16":
        return bf16_bits(wide)
    with np.errstate(over="ignore"):  # too large is infinite, as in the other backends
        return wide.astype(dtype, copy=False)


def to_numpy(x: np.ndarray) -> np.ndarray:
    """x itself; bfloat16 bits become float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def from_numpy(a: np.ndarray, like: np.ndarray | None = None, dtype: str | None = None) -> np.ndarray:
    return a if dtype is None else cast(a, dtype)


def move(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return x


def local(x: np.ndarray) -> np.ndarray:
    return to_numpy(x)


def amin(x: np.ndarray, axis: int) -> np.ndarray:
    return x.min(axis, keepdims=True)


def amax(x: np.ndarray, axis: int) -> np.ndarray:
    return x.max(axis, keepdims=True)


def owned(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C")


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float -> bfloat16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
