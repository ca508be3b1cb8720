"""Moments against NumPy in float64; a monoid; exact where float32 sums of squares are not."""

from __future__ import annotations

import operator
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from conftest import array_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import backends
from crosskv.moments import Moments, moments


def _want(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    xc, yc = x - x.mean(0), y - y.mean(0)
    return tuple(
        np.asarray(a, dtype=np.float64) for a in (x.mean(0), y.mean(0), xc.T @ xc, xc.T @ yc, (yc * yc).sum(0))
    )


def _fields(m: Moments) -> tuple[np.ndarray, ...]:
    return m.mean_x, m.mean_y, m.xx, m.xy, m.yy


def _close(got: Moments, want: tuple[np.ndarray, ...], eps: float, rows: int) -> None:
    scale = np.sqrt(np.outer(np.diagonal(want[2]), np.diagonal(want[2]))).max()
    assert got.count == rows
    for a, b, size in zip(
        _fields(got),
        want,
        (np.abs(want[0]).max(), np.abs(want[1]).max(), scale, np.abs(want[3]).max(), want[4].max()),
        strict=True,
    ):
        assert np.abs(a - b).max() <= eps * np.sqrt(rows) * max(float(size), 1e-30)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([0.0, 1e3]))
def test_any_split_in_any_order_gives_the_same(sizes: list[int], seed: int, offset: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((sum(sizes), 5)) + offset, rng.standard_normal((sum(sizes), 3)) - offset
    edges = np.cumsum([0, *sizes])
    parts = [moments(x[a:b], y[a:b]) for a, b in pairwise(edges)]
    for order in (parts, parts[::-1]):
        total = reduce(operator.add, order)
        for got, want in zip(_fields(total), _want(x, y), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10 * max(1, offset))


@pytest.mark.parametrize("name", array_backends())
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_float32_rows_of_any_offset_and_scale(name: str, offset: float, size: float) -> None:
    rng = np.random.default_rng(0)
    x = (size * (rng.standard_normal((3000, 20)) + offset)).astype(np.float32)
    y = (size * (x[:, :7] / np.float32(size) - offset)).astype(np.float32)
    b = backends.load(name)
    parts = [moments(b.from_numpy(x[i : i + 1000]), b.from_numpy(y[i : i + 1000])) for i in (0, 1000, 2000)]
    total = reduce(operator.add, parts)
    assert all(a.dtype == np.float64 for a in _fields(total))
    _close(total, _want(x, y), 2.0**-23, 3000)
    if offset:  # the reason for centring
        naive = x.T @ x - 3000 * np.outer(x.mean(0), x.mean(0))
        assert np.abs(naive - total.xx).max() > 10 * np.abs(_want(x, y)[2] - total.xx).max()


@pytest.mark.parametrize("name", [n for n in array_backends() if n != "mlx"])
def test_float64_rows_stay_float64(name: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((500, 6)), rng.standard_normal((500, 4))
    b = backends.load(name)
    m = moments(b.from_numpy(x), b.from_numpy(y))
    assert m.eps == 2.0**-53
    _close(m, _want(x, y), 2.0**-51, 500)


def test_sub_and_about_are_the_moments_of_those_columns_and_that_centre() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 6)), rng.standard_normal((200, 4))
    m = moments(x, y)
    columns = np.array([1, 4, 5])
    for a, b in zip(_fields(m.sub(columns, slice(1, 3))), _fields(moments(x[:, columns], y[:, 1:3])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    centre = rng.standard_normal(6), rng.standard_normal(4)
    about = m.about(*centre)
    np.testing.assert_allclose(about.xx, (x - centre[0]).T @ (x - centre[0]), atol=1e-10)
    np.testing.assert_allclose(about.xy, (x - centre[0]).T @ (y - centre[1]), atol=1e-10)
    np.testing.assert_allclose(about.yy, ((y - centre[1]) ** 2).sum(0), atol=1e-10)


def test_size_does_not_grow_with_rows() -> None:
    rng = np.random.default_rng(0)
    one = moments(rng.standard_normal((10, 8)), rng.standard_normal((10, 3)))
    many = reduce(operator.add, [one] * 50)
    assert many.count == 500
    assert many.nbytes == one.nbytes


def test_through_equals_the_moments_of_mapped_rows() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 6)) + 3, rng.standard_normal((50, 4))
    w, b = rng.standard_normal((6, 2)), rng.standard_normal(2)
    got, want = moments(x, y).through(w, b), moments(x @ w + b, y)
    for name in ("mean_x", "mean_y", "xx", "xy", "yy"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)
    assert got.count == 50
