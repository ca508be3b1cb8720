"""rotate and unrotate against complex arithmetic in float64, in every backend."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import array_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import backends, rope
from crosskv.backends import Rope
from crosskv.errors import BadInput, MatchedKVError
from crosskv.layout import ModelKVSpec, plain_rope

EPS = {"float64": 2.0**-53, "float32": 2.0**-24}


def _oracle(x: np.ndarray, r: Rope, positions: np.ndarray) -> np.ndarray:
    """Each pair as a complex number, times scale * exp(i * angle)."""
    y, n = x.copy(), len(r.inv_freq)
    a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if r.interleaved else (slice(0, n), slice(n, 2 * n))
    angle = (np.float32(positions)[:, None] * np.float32(r.inv_freq)).astype(np.float64)
    z = (x[..., a] + 1j * x[..., b]) * r.scale * np.exp(1j * angle)
    y[..., a], y[..., b] = z.real, z.imag
    return y


@pytest.mark.parametrize("name", array_backends())
@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(0, 4),
    rest=st.integers(0, 3),
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 1.46, 0.5]),
    start=st.integers(0, 131_000),
    seed=st.integers(0, 1000),
)
def test_rotate_is_complex_multiplication_and_unrotate_undoes_it(
    name: str, pairs: int, rest: int, interleaved: bool, scale: float, start: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    d = max(1, 2 * pairs + rest)
    r = Rope(tuple((1 / 1e4 ** (np.arange(pairs) / max(1, pairs))).tolist()), scale, interleaved)
    x = rng.standard_normal((2, 3, 5, d))
    positions = start + np.arange(5)
    want = _oracle(x, r, positions)
    b = backends.load(name)
    for dtype in ("float64", "float32") if name != "mlx" else ("float32",):
        a = b.from_numpy(x, dtype=dtype)
        tables = rope.tables(r, positions, a, dtype)
        got = rope.rotate(a, tables, interleaved)
        assert b.dtype_of(got) == dtype
        assert got.shape == a.shape
        assert np.abs(b.to_numpy(got) - want).max() <= 8 * EPS[dtype] * np.abs(want).max()
        back = rope.unrotate(got, tables, interleaved)
        assert np.abs(b.to_numpy(back) - b.to_numpy(a)).max() <= 16 * EPS[dtype] * np.abs(x).max()


def test_positions_of_a_padded_batch() -> None:
    r = plain_rope(8, 1e4)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 8))
    positions = np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    got = rope.rotate(x, rope.tables(r, positions))
    for b in range(2):
        np.testing.assert_allclose(got[b], _oracle(x[b], r, positions[b]), atol=1e-14)


def test_relative_positions_are_all_that_matters() -> None:
    """What RoPE is for: q.k depends on the distance only."""
    r = plain_rope(16, 1e4)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16))

    def score(m: int, n: int) -> float:
        a, b = rope.rotate(q, rope.tables(r, np.array([m]))), rope.rotate(k, rope.tables(r, np.array([n])))
        return float((a * b).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)  # angles are rounded to float32
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-2)


def test_length_dependent_rope_refuses_other_lengths() -> None:
    r = Rope((1.0, 0.1), lengths=(1, 64))
    rope.tables(r, np.arange(64))
    with pytest.raises(MatchedKVError, match="lengths 1 to 64, and these positions reach 65"):
        rope.tables(r, np.arange(65))
    rope.tables(Rope((1.0,), lengths=(100, 100)), np.arange(40))  # the first 40 tokens of a sequence of 100


def test_a_spec_by_hand() -> None:
    spec = ModelKVSpec(3, 2, 8, 5e5)
    assert spec.ropes == (plain_rope(8, 5e5),) * 3
    np.testing.assert_allclose(spec.ropes[0].inv_freq, 5e5 ** (-np.arange(4) / 4), rtol=1e-6)
    assert spec.width == 16
    assert ModelKVSpec(3, 2, 8, ropes=spec.ropes) == spec
    assert ModelKVSpec(1, 1, 8, 1e4, True).ropes[0].interleaved
    for wrong, match in (
        ({"n_layers": 0}, "n_layers must be a positive integer"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_theta": 1e4, "ropes": spec.ropes}, "not both"),
        ({"ropes": spec.ropes[:2]}, "one rope for each of 3 layers, got 2"),
        ({"ropes": (Rope((1.0,) * 5),) * 3}, "turns 10 channels, but head_dim is 8"),
    ):
        with pytest.raises(BadInput, match=match):
            ModelKVSpec(**{"n_layers": 3, "n_kv_heads": 2, "head_dim": 8, **wrong})


@pytest.mark.parametrize("name", array_backends())
@pytest.mark.parametrize("start", [-40, 0, 131_000])
def test_tables_on_the_device_are_those_of_the_host(name: str, start: int) -> None:
    """The same float32 angles, so only cosine and sine round; against NumPy in float64, positions below 0 too."""
    b = backends.load(name)
    r = Rope(tuple((1e4 ** -(np.arange(8) / 8)).tolist()), 1.46)
    for positions in (np.arange(start, start + 6), np.stack([np.arange(start, start + 6), np.arange(6)])):
        at = b.from_numpy(positions.astype(np.float32))
        got = rope.tables_at(r, at)
        angle = (positions[..., None].astype(np.float32) * np.float32(r.inv_freq)).astype(np.float64)
        angle = angle if positions.ndim == 1 else angle[:, None]
        for x, want in zip(got, (1.46 * np.cos(angle), 1.46 * np.sin(angle)), strict=True):
            assert b.dtype_of(x) == "float32" and tuple(x.shape) == want.shape
            assert np.abs(b.to_numpy(x) - want).max() <= 8 * EPS["float32"] * 1.46
