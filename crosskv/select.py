"""Which source layers feed which target layer, from moments alone. Paper sec. 3.2; docs/maths.md, section 5.

A layer is scored by how well head h of it predicts head h of the target layer (least squares on the training moments,
R2 on the held-out ones), averaged over heads and over keys and values: one list serves both. topk takes the k best.
greedy takes the best, removes from all others what it explains, and scores again, so that a copy of a chosen layer is
worth nothing. Both are the same step, taken once or k times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crosskv.errors import BadInput
from crosskv.moments import Moments

TINY = 1e-6  # relative ridge that keeps constant or repeated features solvable; too small to change a score


@dataclass
class _Heads:
    """One kind (keys or values) and one target layer, per head: xx [H, S, D, S, D] and xy [H, S, D, Q] of the
    training and of the held-out rows, the variance to explain [H], and the ridge [H, S] that keeps repeated features
    solvable.
    """

    xx: np.ndarray
    xy: np.ndarray
    held_xx: np.ndarray
    held_xy: np.ndarray
    total: np.ndarray
    ridge: np.ndarray


def scores(pairs: Sequence[tuple[Moments, Moments]], layers: int, targets: int, heads: int) -> np.ndarray:
    """Held-out R2 [targets, layers] of every single source layer. pairs: (train, held) for keys and for values."""
    return np.stack([_score(kinds) for kinds in _by_target(pairs, layers, targets, heads)])


def choose(
    pairs: Sequence[tuple[Moments, Moments]], layers: int, targets: int, heads: int, k: int, method: str
) -> list[list[int]]:
    """The k source layers of each target layer, best first."""
    if method == "topk":
        return [np.argsort(-row, kind="stable")[:k].tolist() for row in scores(pairs, layers, targets, heads)]
    if method == "greedy":
        return [_greedy(kinds, k) for kinds in _by_target(pairs, layers, targets, heads)]
    raise BadInput(f"selection must be 'topk' or 'greedy', got {method!r}.")


def _by_target(pairs: Sequence[tuple[Moments, Moments]], s: int, t: int, h: int) -> Iterator[list[_Heads]]:
    def xx(m: Moments) -> np.ndarray:
        return np.einsum("shdthe->hsdte", m.xx.reshape(s, h, -1, s, h, m.xx.shape[0] // (s * h)))

    def xy(m: Moments, i: int) -> np.ndarray:
        return np.einsum("shdhq->hsdq", m.xy.reshape(s, h, m.xx.shape[0] // (s * h), t, h, -1)[:, :, :, i])

    centred = [(train, held.about(train.mean_x, train.mean_y)) for train, held in pairs]
    shared = [(xx(train), xx(held)) for train, held in centred]
    for i in range(t):
        kinds = []
        for (train, held), (a, b) in zip(centred, shared, strict=True):
            variance = np.einsum("hsdsd->hs", a) / a.shape[2]
            total = held.yy.reshape(t, h, -1)[i].sum(-1)
            kinds.append(_Heads(a, xy(train, i), b, xy(held, i), total, TINY * np.where(variance > 0, variance, 1)))
        yield kinds


def _weights(k: _Heads) -> np.ndarray:
    """Least squares from each source layer alone to the target layer: [H, S, D, Q]."""
    diagonal = np.einsum("hsdse->hsde", k.xx)
    eye = np.eye(diagonal.shape[-1])
    return np.linalg.solve(diagonal + k.ridge[..., None, None] * eye, k.xy)


def _explained(k: _Heads, w: np.ndarray) -> np.ndarray:
    """By how much w lowers the held-out squared error: [H, S, Q]."""
    diagonal = np.einsum("hsdse->hsde", k.held_xx)
    return (2 * w * k.held_xy - w * (diagonal @ w)).sum(-2)


def _score(kinds: list[_Heads]) -> np.ndarray:
    """[S]: R2 gained by adding each layer to those already swept out."""
    gains = []
    for k in kinds:  # a head without variance has nothing to explain and counts 0
        total = np.where(k.total > 0, k.total, 1)
        gains.append((_explained(k, _weights(k)).sum(-1) / total[:, None]).mean(0))
    return np.mean(gains, axis=0)


def _greedy(kinds: list[_Heads], k: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(k):
        gain = _score(kinds)
        gain[chosen] = -np.inf
        chosen.append(int(np.argmax(gain)))
        for kind in kinds:
            _sweep(kind, chosen[-1])
    return chosen


def _sweep(k: _Heads, j: int) -> None:
    """Replace every feature and output by what layer j leaves of it, z - C' x_j; C comes from the training rows."""
    h, s, d = k.xy.shape[:3]
    a = k.xx[:, j, :, j] + k.ridge[:, j, None, None] * np.eye(d)
    cx = np.linalg.solve(a, k.xx[:, j].reshape(h, d, s * d))
    cy = np.linalg.solve(a, k.xy[:, j])

    def swept(xx: np.ndarray, xy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        xj, jj = xx[:, :, :, j].reshape(h, s * d, d), xx[:, j, :, j]
        yj = xy[:, j]
        ct = cx.swapaxes(1, 2)
        new = xx.reshape(h, s * d, s * d) - xj @ cx - ct @ xj.swapaxes(1, 2) + ct @ (jj @ cx)
        out = xy.reshape(h, s * d, -1) - xj @ cy - ct @ yj + ct @ (jj @ cy)
        return new.reshape(xx.shape), out.reshape(xy.shape)

    k.xx, k.xy = swept(k.xx, k.xy)
    k.held_xx, k.held_xy = swept(k.held_xx, k.held_xy)
