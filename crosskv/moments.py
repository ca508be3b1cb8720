"""Moments: everything that a ridge regression needs to know about its rows, in one pass, mergeable. docs/maths.md,
section 2.

A monoid: `total = reduce(add, (moments(x, y) for x, y in blocks))`, in any order and in any process. Products are
taken on the device, centred, in the rows' own precision, and added up in float64, so the size does not grow with the
number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from crosskv import backends

BLOCK_ROWS = 8192
"""Rows multiplied at once: long enough to be fast, short enough that float32 sums keep their digits."""


@dataclass(frozen=True)
class Moments:
    """Counts, means and centred second moments (sums, not averages) of rows x [N, P] and y [N, Q], in float64.

    xx = sum (x - mean_x)(x - mean_x)'   xy = sum (x - mean_x)(y - mean_y)'   yy = the diagonal of the same for y
    eps: the unit roundoff of the arithmetic that multiplied the rows.
    """

    count: int
    mean_x: Float[np.ndarray, " P"]
    mean_y: Float[np.ndarray, " Q"]
    xx: Float[np.ndarray, "P P"]
    xy: Float[np.ndarray, "P Q"]
    yy: Float[np.ndarray, " Q"]
    eps: float

    def __add__(self, other: Moments) -> Moments:
        """Chan's rule: xx = xx_a + xx_b + (n_a n_b / n) d d', with d the difference of the means."""
        n = self.count + other.count
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        w = self.count * other.count / n
        return Moments(
            n,
            self.mean_x + dx * (other.count / n),
            self.mean_y + dy * (other.count / n),
            _plus_outer(self.xx, other.xx, w * dx, dx),
            _plus_outer(self.xy, other.xy, w * dx, dy),
            self.yy + other.yy + w * dy * dy,
            max(self.eps, other.eps),
        )

    def about(self, mean_x: Float[np.ndarray, " P"], mean_y: Float[np.ndarray, " Q"]) -> Moments:
        """The same rows, their second moments taken about another centre."""
        dx, dy, n = self.mean_x - mean_x, self.mean_y - mean_y, self.count
        return Moments(
            n, mean_x, mean_y,
            self.xx + n * np.outer(dx, dx), self.xy + n * np.outer(dx, dy), self.yy + n * dy * dy, self.eps,
        )  # fmt: skip

    def sub(self, x: np.ndarray | slice, y: np.ndarray | slice) -> Moments:
        """The moments of some features and some outputs only: a sub-block of the same numbers."""
        xx = self.xx[x, x] if isinstance(x, slice) else self.xx[np.ix_(x, x)]
        return Moments(self.count, self.mean_x[x], self.mean_y[y], xx, self.xy[x][:, y], self.yy[y], self.eps)

    def through(self, weight: Float[np.ndarray, "P R"], bias: Float[np.ndarray, " R"]) -> Moments:
        """The moments of the same rows with features x W + b."""
        wx = weight.T @ self.xx
        return Moments(
            self.count, self.mean_x @ weight + bias, self.mean_y, wx @ weight, weight.T @ self.xy, self.yy, self.eps
        )

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.mean_x, self.mean_y, self.xx, self.xy, self.yy))


def _plus_outer(a: np.ndarray, b: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """a + b + u v' with one new array and no other large one."""
    out = np.outer(u, v)
    out += a
    out += b
    return out


def moments(x: Any, y: Any) -> Moments:
    """The moments of rows x [N, P] and y [N, Q], float32 or float64 arrays of any backend, or lists of such pieces."""
    (xc, cx, dx), (yc, cy, dy) = _centre(x), _centre(y)
    b, n = backends.of(xc), xc.shape[0]
    return Moments(
        n,
        cx + dx,
        cy + dy,
        _recentred(xc.T @ xc, n * dx, dx),
        _recentred(xc.T @ yc, n * dx, dy),
        b.to_numpy(b.xp.einsum("nq,nq->q", yc, yc)).astype(np.float64) - n * dy * dy,
        2.0**-53 if b.dtype_of(xc) == "float64" else 2.0**-24,
    )


def _recentred(product: Any, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """product - u v' in float64 on the host; u v' is what the rounding of the centres left in it, often nothing."""
    a = backends.of(product).to_numpy(product)
    left = np.abs(u).max() * np.abs(v).max()
    if left <= 2.0**-30 * np.abs(a[0]).max():
        return a.astype(np.float64)
    return a - np.outer(u, v)


def _centre(x: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """x - c in one array, the centre c (the rounded mean), and what the rounding left: mean(x) - c."""
    pieces = x if isinstance(x, list) else [x]
    b = backends.of(pieces[0])
    c = sum(p.sum(0) for p in pieces) / sum(p.shape[0] for p in pieces)
    centred = [p - c for p in pieces]
    xc = centred[0] if len(centred) == 1 else b.xp.concatenate(centred)
    return xc, b.to_numpy(c).astype(np.float64), b.to_numpy(xc.mean(0)).astype(np.float64)
