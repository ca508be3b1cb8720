"""Ridge and selection against SciPy on the rows themselves, and against planted truths."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import select
from crosskv.errors import BadInput
from crosskv.moments import Moments, moments
from crosskv.ridge import r2, reduced_rank, residual, ridge


def _augmented(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge as least squares on more rows: sqrt(lambda) I below the centred rows. SciPy does the rest."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    shift = penalty * (xc**2).sum() / x.shape[1]
    rows = np.concatenate([xc, np.sqrt(shift) * np.eye(x.shape[1])])
    w = scipy.linalg.lstsq(rows, np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))]))[0]
    return w, y.mean(0) - x.mean(0) @ w


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([1e-6, 1e-2, 1.0]),
    st.sampled_from([1e-6, 1.0, 1e4]),
    st.integers(0, 999),
)
def test_equals_least_squares_on_augmented_rows(p: int, q: int, penalty: float, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = scale * (rng.standard_normal((60, p)) + 3), rng.standard_normal((60, q)) - 2
    got = ridge(moments(x, y), penalty)
    w, b = _augmented(x, y, penalty)
    np.testing.assert_allclose(got.weight * scale, w * scale, atol=1e-8)
    np.testing.assert_allclose(got.bias, b, atol=1e-8)


@pytest.mark.parametrize(("p", "q"), [(9, 6), (6, 9)])
@pytest.mark.parametrize("penalty", [1e-6, 0.1])
def test_reduced_rank_is_ridge_projected_on_its_leading_fits(p: int, q: int, penalty: float) -> None:
    """Izenman: B V V', B the ridge map and V the leading right singular vectors of its fits (on the augmented rows)."""
    rng = np.random.default_rng(p)
    x = rng.standard_normal((300, p)) @ rng.standard_normal((p, p)) + 2
    y = x @ rng.standard_normal((p, q)) + 3 * rng.standard_normal((300, q)) - 1
    b, _ = _augmented(x, y, penalty)
    xc = x - x.mean(0)
    rows = np.concatenate([xc, np.sqrt(penalty * (xc**2).sum() / p) * np.eye(p)])
    v = np.linalg.svd(rows @ b)[2][:3].T
    m = moments(x, y)
    e = reduced_rank(m, penalty, 3)
    assert scipy.linalg.subspace_angles(e.weight, b @ v).max() < 1e-6
    assert scipy.linalg.subspace_angles(e.weight, b @ np.linalg.svd(b)[2][:3].T).max() > 1e-3  # V matters
    z = m.through(e.weight, e.bias)
    np.testing.assert_allclose(z.mean_x, 0, atol=1e-9)
    if penalty < 1e-3:
        np.testing.assert_allclose(z.xx / z.count, np.eye(3), atol=1e-3)


def test_penalty_means_the_same_for_any_scale_and_any_number_of_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 5))
    y = x @ rng.standard_normal((5, 2)) + rng.standard_normal((400, 2))
    one = ridge(moments(x, y), 0.1)
    for s in (1e-6, 1e-3, 1e5):
        np.testing.assert_allclose(ridge(moments(s * x, y), 0.1).weight * s, one.weight, rtol=1e-9)
    m = moments(x, y)
    np.testing.assert_allclose(ridge(m + m + m, 0.1).weight, one.weight, rtol=1e-9)


def _planted(kind: str, rng: np.random.Generator) -> np.ndarray:
    a = 30 * rng.standard_normal((2048, 32))
    if kind == "repeated":
        return np.concatenate([a, a], 1)
    if kind == "constant":
        return np.concatenate([a, np.full((2048, 4), 7.0), np.zeros((2048, 2))], 1)
    if kind == "low rank":
        return a @ rng.standard_normal((32, 80))
    return np.concatenate([a[:, :16], 1e-5 * a[:, 16:]], 1)  # scales apart


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", ["repeated", "constant", "low rank", "scales apart"])
@pytest.mark.parametrize("penalty", [0.0, 1e-2])
def test_dependent_features_do_not_fail_and_penalty_zero_is_exact(kind: str, dtype: type, penalty: float) -> None:
    rng = np.random.default_rng(0)
    x = _planted(kind, rng).astype(dtype)
    y = (x @ (rng.standard_normal((x.shape[1], 3)) / x.std(0).max()) + 5).astype(dtype)
    a = ridge(moments(x, y), penalty)
    assert np.isfinite(a.weight).all()
    assert np.abs(a.weight).max() * x.std() < 1e3 if kind != "scales apart" else True
    error = np.abs(x @ a.weight + a.bias - y).max() / y.std()
    if penalty == 0:
        sd = x.std(0).astype(np.float64)  # the least-norm solution in units of each feature's deviation
        scaled = np.divide(x - x.mean(0, dtype=np.float64), sd, out=np.zeros(x.shape), where=sd > 0)
        least = np.linalg.lstsq(scaled, y - y.mean(0), rcond=1e-5)[0]
        np.testing.assert_allclose(a.weight * sd[:, None], least, atol=1e-3 * np.abs(least).max())
        assert error < (1e-10 if dtype == np.float64 else 2e-4)


def test_residual_and_r2_equal_those_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300, 8)) + 1, rng.standard_normal((300, 6)) + 2
    y[:, :3] += x[:, :3]
    a = ridge(moments(x[:200], y[:200]), 1e-3)
    held = moments(x[200:], y[200:])
    error = ((y[200:] - x[200:] @ a.weight - a.bias) ** 2).sum(0)
    np.testing.assert_allclose(residual(held, a), error, rtol=1e-10)
    total = ((y[200:] - y[200:].mean(0)) ** 2).sum(0)
    want = np.mean([1 - error[h].sum() / total[h].sum() for h in (slice(0, 2), slice(2, 4), slice(4, 6))])
    assert r2(held, a, 3) == pytest.approx(want, rel=1e-10)


def test_noise_has_no_held_out_r2() -> None:
    """200 rows of 256 features: in sample they explain everything, held out nothing."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 256)), rng.standard_normal((400, 4))
    train = moments(x[:200], y[:200])
    a = ridge(train, 1e-6)
    assert r2(train, a, 1) > 0.99
    assert r2(moments(x[200:], y[200:]), a, 1) < 0


def test_constant_outputs_count_as_predicted() -> None:
    x = np.random.default_rng(0).standard_normal((100, 3))
    m = moments(x, np.full((100, 2), 3.3))
    assert r2(m, ridge(m, 0.0), 1) == 1


# ---- selection ----


def _pair(x: np.ndarray, y: np.ndarray, cut: int) -> tuple[Moments, Moments]:
    return moments(x[:cut], y[:cut]), moments(x[cut:], y[cut:])


def _layers(rng: np.random.Generator, n: int, rows: int = 1200, width: int = 8) -> list[np.ndarray]:
    return [rng.standard_normal((rows, width)) for _ in range(n)]


def test_scores_equal_least_squares_head_by_head() -> None:
    rng = np.random.default_rng(0)
    source = _layers(rng, 3)
    target = [source[0] + 0.5 * source[1] + rng.standard_normal((1200, 8)), source[2] * 2]
    pairs = [_pair(np.concatenate(source, 1), np.concatenate(target, 1), 1000)] * 2
    got = select.scores(pairs, 3, 2, heads=2)
    for t in range(2):
        for s in range(3):
            scores = []
            for h in (slice(0, 4), slice(4, 8)):
                x, y = source[s][:, h], target[t][:, h]
                ones = np.ones((1200, 1))
                w = scipy.linalg.lstsq(np.concatenate([x, ones], 1)[:1000], y[:1000])[0]
                e = y[1000:] - np.concatenate([x, ones], 1)[1000:] @ w
                about = y[1000:] - y[:1000].mean(0)  # the intercept alone
                scores.append(1 - (e**2).sum() / (about**2).sum())
            assert got[t, s] == pytest.approx(np.mean(scores), abs=1e-4)


def test_keys_and_values_count_the_same_whatever_their_scale() -> None:
    """Peers pool: keys 50 times larger hide that the values come from another layer."""
    rng = np.random.default_rng(0)
    layers = _layers(rng, 4)
    x = np.concatenate(layers, 1)
    keys = 50 * (layers[0] + 0.3 * layers[1])
    pairs = [_pair(x, keys, 1000), _pair(x, layers[3], 1000)]
    for method in ("topk", "greedy"):
        assert sorted(select.choose(pairs, 4, 1, 2, 2, method)[0]) == [0, 3]


def test_greedy_does_not_pick_copies() -> None:
    rng = np.random.default_rng(0)
    base, other = _layers(rng, 2)
    copies = [base + 0.05 * n for n in _layers(rng, 3)]
    x = np.concatenate([*copies, other], 1)
    pairs = [_pair(x, base + 0.5 * other, 1000)] * 2
    assert sorted(select.choose(pairs, 4, 1, 2, 3, "topk")[0]) == [0, 1, 2]
    assert 3 in select.choose(pairs, 4, 1, 2, 2, "greedy")[0]


def test_greedy_equals_trying_every_set() -> None:
    """Oracle: at each step, refit on rows with every candidate and take the best held-out R2."""
    rng = np.random.default_rng(1)
    layers = _layers(rng, 5, width=4)
    layers[1] = layers[0] + 0.3 * layers[1]
    layers[2] = 0.7 * layers[0] + 0.7 * layers[3] + 0.3 * layers[2]
    layers[4] = layers[3] + 0.8 * layers[4]
    y = layers[0] @ rng.standard_normal((4, 4)) + layers[3] + 0.5 * layers[4] + 0.3 * rng.standard_normal((1200, 4))
    pairs = [_pair(np.concatenate(layers, 1), y, 1000)] * 2
    chosen: list[int] = []
    for _ in range(4):
        scores = {}
        for c in set(range(5)) - set(chosen):
            x = np.concatenate([*(layers[i] for i in [*chosen, c]), np.ones((1200, 1))], 1)
            w = scipy.linalg.lstsq(x[:1000], y[:1000])[0]
            scores[c] = -((y[1000:] - x[1000:] @ w) ** 2).sum()
        chosen.append(max(scores, key=lambda c: scores[c]))
    assert select.choose(pairs, 5, 1, 1, 4, "greedy")[0] == chosen


@pytest.mark.parametrize("method", ["topk", "greedy"])
def test_constant_layers_and_outputs_are_survived(method: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1200, 8))
    x = np.concatenate([np.ones((1200, 8)), a], 1)
    y = np.concatenate([a[:, :4], np.zeros((1200, 4))], 1)
    assert select.choose([_pair(x, y, 1000)] * 2, 2, 1, 2, 2, method)[0] == [1, 0]


def test_unknown_method() -> None:
    with pytest.raises(BadInput, match="'topk' or 'greedy'"):
        select.choose([], 1, 1, 1, 1, "best")
