"""Ridge regression from moments, in float64, and its R2 on other moments. docs/maths.md, sections 3 and 4. Paper sec.
3.1.

    W = (xx + penalty * tr(xx)/P * I)^-1 xy        b = mean_y - mean_x W

The penalty is relative to the mean feature variance, so it means the same for any number of rows and any scale of
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
from jaxtyping import Float

from crosskv.moments import Moments


@dataclass(frozen=True)
class Affine:
    """y = x W + b."""

    weight: Float[np.ndarray, "P Q"]
    bias: Float[np.ndarray, " Q"]


def ridge(m: Moments, penalty: float) -> Affine:
    """The ridge map of `m`, intercept unpenalised. penalty 0 is least squares; where features are constant or
    dependent it is the solution of least norm (in units of each feature's deviation), which is exact on an exact
    relation.
    """
    p = m.xx.shape[0]
    shift = penalty * float(np.trace(m.xx)) / p
    weight = _penalised(m.xx, m.xy, shift) if shift > 0 else _least_norm(m.xx, m.xy, m.eps)
    return Affine(weight, m.mean_y - m.mean_x @ weight)


def reduced_rank(m: Moments, penalty: float, rank: int) -> Affine:
    """x E + e, the `rank` features from which a linear map comes closest to all of y: reduced-rank regression
    (Izenman 1975), docs/maths.md, section 3. They are uncorrelated, of mean 0 and variance 1 up to the penalty.

    With A = xx + penalty I = C C', the error of x B is |C'B - C^-1 xy|^2 and a constant, so that the best B of rank r
    keeps the r leading left singular vectors U of C^-1 xy, and E = C'^-1 U.
    """
    a = m.xx.copy()
    a.flat[:: len(a) + 1] += max(penalty, 1e-9) * float(np.trace(m.xx)) / len(a)
    c = scipy.linalg.cholesky(a, lower=True, check_finite=False)
    whitened = scipy.linalg.solve_triangular(c, m.xy, lower=True, check_finite=False)
    u = _leading(whitened, rank)
    weight = scipy.linalg.solve_triangular(c, u, lower=True, trans=1, check_finite=False) * np.sqrt(m.count)
    return Affine(weight, -m.mean_x @ weight)


def _leading(a: np.ndarray, rank: int) -> np.ndarray:
    """The leading left singular vectors of `a` [P, Q], from the smaller of its two Gram matrices."""
    p, q = a.shape
    rank = min(rank, p, q)
    gram = a @ a.T if p <= q else a.T @ a
    _, v = scipy.linalg.eigh(gram, subset_by_index=[len(gram) - rank, len(gram) - 1], check_finite=False)
    v = v[:, ::-1]
    return v if p <= q else scipy.linalg.qr(a @ v, mode="economic", check_finite=False)[0]


def _penalised(xx: np.ndarray, xy: np.ndarray, shift: float) -> np.ndarray:
    a = xx.copy()
    a.flat[:: len(a) + 1] += shift
    try:
        return _cholesky(a, xy, 1e-14)
    except np.linalg.LinAlgError:  # rounding made xx indefinite by more than the penalty
        w, v = scipy.linalg.eigh(xx, check_finite=False)
        return v @ ((v.T @ xy) / (np.maximum(w, 0) + shift)[:, None])


def _least_norm(xx: np.ndarray, xy: np.ndarray, eps: float) -> np.ndarray:
    """xx^+ xy, after scaling each feature to unit deviation; directions below the rounding of xx count as absent."""
    d = np.sqrt(np.diagonal(xx))
    s = np.divide(1.0, d, out=np.zeros_like(d), where=d > 0)
    a, b = xx * s[:, None] * s, xy * s[:, None]
    noise = 8 * np.sqrt(len(a)) * eps
    try:
        return _cholesky(a, b, noise) * s[:, None]
    except np.linalg.LinAlgError:
        w, v = scipy.linalg.eigh(a, check_finite=False)
        keep = w > noise
        return v[:, keep] @ ((v[:, keep].T @ b) / w[keep, None]) * s[:, None]


def _cholesky(a: np.ndarray, b: np.ndarray, floor: float) -> np.ndarray:
    """a^-1 b, or LinAlgError when the smallest eigenvalue of a may be below floor * (mean of the diagonal)."""
    factor, lower = scipy.linalg.cho_factor(a, lower=True, check_finite=False)
    norm = float(np.abs(a).sum(0).max())
    rcond, _ = scipy.linalg.lapack.dpocon(factor, norm, uplo="L")
    if not rcond * norm > floor * np.trace(a) / len(a):
        raise np.linalg.LinAlgError("ill-conditioned")
    return scipy.linalg.cho_solve((factor, lower), b, check_finite=False)


def residual(m: Moments, a: Affine) -> Float[np.ndarray, " Q"]:
    """Sum of squared errors of `a` on the rows of `m`, per output, in closed form: with xx = L + L', w'(xx)w = 2 w'Lw
    takes a triangular product, half of a full one."""
    w = np.asarray(a.weight, np.float64)
    r = m.mean_y - a.bias - m.mean_x @ w
    half = np.array(m.xx.T, order="F")
    half.flat[:: len(half) + 1] /= 2
    sse = m.yy + 2 * (w * (scipy.linalg.blas.dtrmm(1.0, half, w, lower=1) - m.xy)).sum(0) + m.count * r * r
    return np.maximum(sse, 0)


def r2(m: Moments, a: Affine, heads: int) -> float:
    """The mean of `r2_of_heads`."""
    return float(r2_of_heads(m, a, heads).mean())


def r2_of_heads(m: Moments, a: Affine, heads: int) -> Float[np.ndarray, " H"]:
    """1 - SSE / SST per head, on the rows of `m`. For a number that means something, rows that did not make `a`. An
    output head without variance counts 1 when it is predicted and 0 when it is not.
    """
    sse, sst = (x.reshape(heads, -1).sum(1) for x in (residual(m, a), m.yy))
    rounding = 1e-12 * m.count * (m.mean_y**2).reshape(heads, -1).sum(1)
    flat = sst <= rounding
    return np.where(flat, sse <= rounding, 1 - sse / np.where(flat, 1, sst))
