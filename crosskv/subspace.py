"""The shared subspace of a group of layers: bases, ranks, and how many bits each latent gets. docs/maths.md, section 7.

    x [F]  ->  latents a = ((x - mean) / scale) V [r]  ->  x' = mean + scale * (V a)          V'V = 1

`joint`: the layers of a group side by side, F = layers * heads * head dim, one latent vector per token for all of them
(xKV, arXiv:2503.18893; with V fixed once per model it is the basis of KVTC, arXiv:2511.01815). `stacked`: layers and
heads are rows, F = head dim, latents per layer and head, one small V for the whole group (the seed page).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from crosskv import backends
from crosskv.backends import Array
from crosskv.errors import BadInput
from crosskv.layout import to_heads, to_rows

BITS = (0, 1, 2, 3, 4, 5, 6, 8)
"""What a latent may be given."""
ROWS = 4096
"""Rows that quantisers are set on, at most."""
CLIPS = (1.0, 0.93, 0.85, 0.72, 0.61, 0.52, 0.44, 0.37, 0.31, 0.26, 0.22, 0.18, 0.15, 0.12, 0.095, 0.075, 0.06, 0.045)
"""Where a uniform quantiser may clip, as a share of the largest latent seen: one outlier may be 20 times the rest."""


@dataclass(frozen=True)
class Basis:
    """V, mean and scale of one kind (keys or values) of one group, arrays of any backend.

    vectors [B, F, r] (B is 1 when all sequences share it), mean [B, 1, F] or None, scale [1, 1, F] or None.
    """

    kind: str
    vectors: Array
    mean: Array | None = None
    scale: Array | None = None

    @property
    def rank(self) -> int:
        return self.vectors.shape[-1]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(x for x in (self.vectors, self.mean, self.scale) if x is not None)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def map(self, f: Callable[[Array], Array]) -> Basis:
        def one(x: Array | None) -> Array | None:
            return None if x is None else f(x)

        return replace(self, vectors=f(self.vectors), mean=one(self.mean), scale=one(self.scale))

    def encode(self, layers: Sequence[Shaped[Any, "B H T D"]]) -> Shaped[Any, "B M T r"]:
        """Latents of the group's layers; M = 1 when joint, layers * heads when stacked."""
        x = _wide(gathered(layers, self.kind))
        x = x if self.mean is None else x - _wide(self.mean)[:, None]
        x = x if self.scale is None else x / _wide(self.scale)[:, None]
        return x @ _wide(self.vectors)[:, None]

    def decode(self, latents: Shaped[Any, "B M T r"], layer: int, layers: int, heads: int) -> Shaped[Any, "B H T D"]:
        """One layer of the group (its place in it, not its number in the model), rebuilt in float32."""
        if self.kind == "stacked":
            latents, part = latents[:, layer * heads : (layer + 1) * heads], slice(None)
        else:
            width = self.vectors.shape[-2] // layers
            part = slice(layer * width, (layer + 1) * width)
        x = _wide(latents) @ _wide(self.vectors[:, part]).swapaxes(-1, -2)[:, None]
        x = x if self.scale is None else x * _wide(self.scale[..., part])[:, None]
        x = x if self.mean is None else x + _wide(self.mean[..., part])[:, None]
        return x if self.kind == "stacked" else to_heads(x[:, 0], heads)


def gathered(layers: Sequence[Shaped[Any, "B H T D"]], kind: str) -> Shaped[Any, "B M T F"]:
    """The layers of a group as the matrix that a basis is for."""
    xp = backends.of(layers[0]).xp
    if kind == "stacked":
        return xp.concatenate(list(layers), 1)
    return xp.concatenate([to_rows(x) for x in layers], -1)[:, None]


def _wide(x: Array) -> Array:
    b = backends.of(x)
    return x if b.dtype_of(x) == "float64" else b.cast(x, "float32")


# ---- a basis per prompt ----


def prompt_basis(
    x: Shaped[Any, "B M T F"], kind: str, rank: int | None, energy: float | None, dtype: str, seed: int = 0
) -> tuple[Basis, Float[np.ndarray, " r"]]:
    """The leading right singular vectors of the rows of x, per sequence, and the mean square of each latent.

    rank: how many (at most F and the number of rows); or energy: as many as hold this share of the sum of squares, in
    every sequence. `stacked` takes the mean out first, as the seed page does; `joint` does not, as in the paper.
    """
    b, (n, m, t, f) = backends.of(x), x.shape
    x = _wide(x)
    x = x.reshape(n, m * t, f)
    mean = x.mean(1, keepdims=True) if kind == "stacked" else None
    x = x if mean is None else x - mean
    most = min(f, m * t)
    want = most if rank is None else min(rank, most)
    vectors, squares = _right_vectors(x, want, seed)
    if energy is not None:
        total = b.to_numpy((x * x).sum(-1).sum(-1)).astype(np.float64)
        share = np.cumsum(squares, -1) / np.where(total > 0, total, 1)[:, None]
        want = max(1, min(want, int((share < energy * (1 - 1e-9)).sum(-1).max()) + 1))
    if want < vectors.shape[-1]:
        vectors = b.owned(vectors[..., :want])
    vectors = b.cast(vectors, dtype)
    mean = None if mean is None else b.cast(mean, dtype)
    return Basis(kind, vectors, mean), squares[:, :want].mean(0) / (m * t)


def _right_vectors(x: Shaped[Any, "B N F"], rank: int, seed: int) -> tuple[Array, np.ndarray]:
    """(V [B, F, rank], squared singular values [B, rank]), largest first.

    From the smaller Gram matrix when the rank is near its size, else by a range finder with two power steps (Halko,
    Martinsson and Tropp 2011, algorithm 4.4). All large products run on the device; the host factors only the small
    symmetric matrices, in float64.
    """
    b = backends.of(x)
    _, rows, f = x.shape
    if 2 * (rank + 8) >= min(rows, f):
        if f <= rows:
            values, v = _eigh(x.swapaxes(-1, -2) @ x)
            return b.from_numpy(v[..., :rank], x, "float32"), values[:, :rank]
        sketch = x
    else:
        omega = np.random.default_rng(seed).standard_normal((f, rank + 8)).astype(np.float32)
        y = x @ b.from_numpy(omega, x, "float32")
        for _ in range(2):
            y = x @ _orthonormal(x.swapaxes(-1, -2) @ _orthonormal(y, 1), 1)
        sketch = _orthonormal(y).swapaxes(-1, -2) @ x
    values, u = _eigh(sketch @ sketch.swapaxes(-1, -2))
    # of the weak ones, u holds rounding of the strong ones, which may be many times larger: hence orthonormal once more
    vectors = sketch.swapaxes(-1, -2) @ b.from_numpy(u[..., :rank], x, "float32")
    return _orthonormal(vectors), values[:, :rank]


def _orthonormal(y: Shaped[Any, "B N l"], rounds: int = 4) -> Shaped[Any, "B N l"]:
    """Orthonormal columns of the same span, the first k of them that of the first k columns of y.

    Q = Y R^-1 with R'R = G + shift, G the Gram matrix of the columns brought to length 1 and the shift above its
    rounding; a round makes the columns up to 1,000 times better conditioned (Fukaya et al. 2020, shifted Cholesky QR).
    What y lacks stays 0 or comes out as rounding, never longer than 1.
    """
    b = backends.of(y)
    for _ in range(rounds):
        gram = b.to_numpy(y.swapaxes(-1, -2) @ y).astype(np.float64)
        square = np.diagonal(gram, axis1=-2, axis2=-1)
        length = np.where(square > 1e-30, np.sqrt(square), np.inf)  # what underflows in float32 has no direction
        inverse = np.linalg.inv(_cholesky(gram / length[:, :, None] / length[:, None])).swapaxes(-1, -2)
        y = y @ b.from_numpy(inverse / length[:, :, None], y, "float32")
    return y


def _cholesky(gram: np.ndarray) -> np.ndarray:
    """Of gram + shift, the least shift that makes it positive definite."""
    for shift in (1e-6, 1e-5, 1e-4):
        try:
            return np.linalg.cholesky(gram + shift * np.eye(gram.shape[-1]))
        except np.linalg.LinAlgError:  # its rounding is larger: many rows, all alike
            continue
    return np.linalg.cholesky(gram + 1e-2 * np.eye(gram.shape[-1]))


def _eigh(gram: Shaped[Any, "B l l"]) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (not negative) and eigenvectors, largest first, float64 on the host."""
    values, u = np.linalg.eigh(backends.of(gram).to_numpy(gram).astype(np.float64))
    return np.maximum(values[..., ::-1], 0), u[..., ::-1].copy()  # a 1 x 1 one would keep its negative strides


# ---- bits ----


def allocate(errors: Sequence[Float[np.ndarray, "options r"]], budget: float) -> list[np.ndarray]:
    """Bits for every latent so that the sum of errors is least while the sum of bits is at most `budget`.

    errors: one table per kind of latents, row i the error with BITS[i] bits. Each latent's table is replaced by its
    lower convex hull; then bits are given where an error falls most per bit (reverse water-filling for tables).
    Returns the bits of each table's latents.
    """
    table = np.concatenate([np.asarray(e, np.float64) for e in errors], 1)
    gains, costs, options = _edges(table)
    order = np.argsort(-gains, axis=None, kind="stable")  # step-major: of equal gains, a latent's earlier edge is first
    order = order[gains.ravel()[order] > 0]
    chosen, left = np.zeros(table.shape[1], int), budget
    sure = int(np.searchsorted(np.cumsum(costs.ravel()[order]), budget, side="right"))
    np.maximum.at(chosen, order[:sure] % table.shape[1], options.ravel()[order[:sure]])
    left -= costs.ravel()[order[:sure]].sum()
    stopped: set[int] = set()
    for i in order[sure:].tolist():  # the dearest edge that is left may not fit where a cheaper one does
        if left < 1:
            break
        owner, cost = i % table.shape[1], costs.flat[i]
        if cost > left or owner in stopped:
            stopped.add(owner)
            continue
        left -= cost
        chosen[owner] = options.flat[i]
    bits = np.asarray(BITS)[chosen]
    return np.split(bits, np.cumsum([e.shape[1] for e in errors])[:-1])


def _edges(table: Float[np.ndarray, "options r"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lower convex hull of every column, edge after edge: (fall per bit, bits, option reached), each [steps, r].

    A fall of 0: the hull has ended.
    """
    bits, columns = np.asarray(BITS, float), np.arange(table.shape[1])
    at = np.zeros(table.shape[1], int)
    gains: list[np.ndarray] = []
    costs, options = [], []
    for _ in range(len(BITS) - 1):
        width = bits[:, None] - bits[at]
        slopes = np.where(width > 0, (table[at, columns] - table) / np.where(width > 0, width, 1), 0)
        to = slopes.argmax(0)  # the steepest way down is an edge of the hull
        gain = slopes[to, columns]
        # on a straight line rounding must not put a later edge before an earlier one of the same latent
        gain = np.minimum(gain, gains[-1]) if gains else gain
        gains.append(np.maximum(gain, 0))
        costs.append(np.where(gain > 0, width[to, columns], 0))
        options.append(np.where(gain > 0, to, at))
        at = options[-1]
    return np.stack(gains), np.stack(costs), np.stack(options)


def fixed_steps(latents: Float[np.ndarray, "N r"]) -> tuple[np.ndarray, np.ndarray]:
    """(limits, errors), each [options, r]: for every number of bits, where a uniform quantiser of a latent should clip
    so that the mean squared error on these rows is least, and that error. docs/maths.md, section 7.
    """
    latents = latents[:: -(-len(latents) // ROWS)]
    largest = np.maximum(np.abs(latents).max(0), 1e-30)
    limits = np.zeros((len(BITS), latents.shape[1]))
    errors = np.zeros_like(limits)
    errors[0] = (latents**2).mean(0)
    x = (latents / largest).astype(np.float32)
    for i, bits in enumerate(BITS[1:], 1):
        found = np.stack([_clipped_error(x, c, bits) for c in CLIPS])
        best = found.argmin(0)
        limits[i] = np.asarray(CLIPS)[best] * largest
        errors[i] = found[best, np.arange(len(best))] * largest**2
    return limits, np.minimum.accumulate(errors, 0)


def _clipped_error(x: np.ndarray, limit: float, bits: int) -> np.ndarray:
    step = np.float32(2 * limit / (2**bits - 1))
    codes = np.clip(np.rint((x + np.float32(limit)) / step), 0, 2**bits - 1)
    return ((codes * step - np.float32(limit) - x) ** 2).mean(0)


def runs(bits: Sequence[int] | np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, bits) of the stretches of equal bits; those with none are left out."""
    cuts = [0, *(i for i in range(1, len(bits)) if bits[i] != bits[i - 1]), len(bits)]
    return tuple((a, b, int(bits[a])) for a, b in pairwise(cuts) if b > a and bits[a] > 0)


def check_rank(rank: Any, most: int | None, name: str) -> None:
    """most: None where the model is not known yet."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= (rank if most is None else most):
        wanted = "of at least 1" if most is None else f"from 1 to {most}"
        raise BadInput(f"{name} must be an integer {wanted}, got {rank!r}.")
