"""Group-affine quantisation and bit packing, against NumPy in float64, in every backend."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import array_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import backends
from crosskv.errors import BadInput
from crosskv.layout import EPS
from crosskv.quant import PLANES, TINY, dequantise, fixed_codes, fixed_values, pack, quantise, unpack

EVERY = pytest.mark.parametrize("name", array_backends())
NP = backends.load("numpy")


def made(name, a, dtype="float32"):
    b = backends.load(name)
    return b.cast(b.from_numpy(np.asarray(a, np.float32)), dtype)


def wide(x):
    return backends.of(x).to_numpy(x).astype(np.float64)


@EVERY
@settings(deadline=None, max_examples=25)
@given(bits=st.sampled_from(list(PLANES)), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_packing_is_a_bijection(name, bits, n, seed):
    b = backends.load(name)
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, n)).astype(np.uint8)
    planes = pack(b.from_numpy(codes), bits)
    np.testing.assert_array_equal(b.to_numpy(unpack(planes, bits, n)), codes)
    assert sum(p.shape[-1] for p in planes) == sum(-(-n * w // 8) for w in PLANES[bits])
    assert all(b.dtype_of(p) == "uint8" for p in planes)
    if n % 8 == 0:  # no byte to spare: as many different rows of bytes as of codes
        assert sum(p.shape[-1] for p in planes) * 8 == n * bits


def bound(x: np.ndarray, bits: int, group: int, axis: int, scales: str) -> np.ndarray:
    """Half a step for each entry, from the float64 extremes of its own group: an oracle that shares no code."""
    x = np.moveaxis(x, axis, -1)
    out = np.empty_like(x)
    for i in range(0, x.shape[-1], group):
        part = x[..., i : i + group]
        low, high = part.min(-1, keepdims=True), part.max(-1, keepdims=True)
        out[..., i : i + group] = (high - low + 1.6 * EPS[scales] * abs(low)) / (2**bits - 1) / 2
    out = out * (1 + 2 * EPS[scales]) + TINY[scales] + 4 * EPS["float32"] * abs(x).max()
    return np.moveaxis(out, -1, axis)


@EVERY
@settings(deadline=None, max_examples=30)
@given(
    bits=st.sampled_from(list(PLANES)),
    group=st.sampled_from([1, 3, 8, 32, 64]),
    axis=st.sampled_from([-1, -2]),
    scales=st.sampled_from(["float16", "bfloat16", "float32"]),
    tokens=st.integers(1, 70),
    channels=st.integers(1, 33),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_error_is_at_most_half_a_step(name, bits, group, axis, scales, tokens, channels, size, offset, seed):
    a = np.random.default_rng(seed).standard_normal((2, tokens, channels)) * size + offset
    x = made(name, a)
    q = quantise(x, bits, group, axis, scales)
    error = abs(wide(dequantise(q)) - wide(x))
    assert (error <= bound(wide(x), bits, group, axis, scales)).all()
    groups = -(-channels // group) * tokens if axis == -1 else -(-tokens // group) * channels
    codes = sum(-(-channels * width // 8) for width in PLANES[bits]) * tokens
    assert q.nbytes == 2 * (codes + groups * 2 * (4 if scales == "float32" else 2))


@EVERY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.333, 1e4, 1e-7])
def test_groups_of_equal_values_stay(name, dtype, axis, value):
    x = made(name, np.full((2, 5, 7), value), dtype)
    got = wide(dequantise(quantise(x, 2, 4, axis)))
    np.testing.assert_allclose(got, wide(x), rtol=2 * EPS[dtype] if dtype != "float32" else 1e-6, atol=TINY["float16"])


@EVERY
@pytest.mark.parametrize("bits", list(PLANES))
def test_outliers_of_1e4_in_half_precision_cost_only_their_channel(name, bits):
    """Qwen2.5: a few key channels are huge. Grouped along the tokens they leave the others alone."""
    a = np.random.default_rng(0).standard_normal((1, 2, 64, 16))
    a[..., 3] = 1e4 + 100 * a[..., 3]
    a[..., 7] *= 1e4
    x = made(name, a, "float16")
    error = abs(wide(dequantise(quantise(x, bits, 32, -2))) - wide(x))
    rest = np.delete(np.arange(16), [3, 7])
    spread = (wide(x).max(-2) - wide(x).min(-2))[..., None, :]
    step = spread / (2**bits - 1)
    assert (error[..., rest] <= 0.51 * step[..., rest] + 2e-3).all()
    assert (error <= 0.51 * step + 8).all()  # 8: the spacing of float16 at 1e4


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's own, before we refuse
@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [-1, -2])
def test_nan_and_infinity_are_refused(name, bad, axis):
    a = np.ones((1, 2, 9, 8), np.float32)
    a[0, 1, 8, 5] = bad
    with pytest.raises(BadInput, match="NaN or Inf"):
        quantise(made(name, a), 4, 4, axis, "float32")


@EVERY
def test_values_beyond_float16_are_refused_or_kept_in_float32(name):
    a = np.random.default_rng(0).standard_normal((4, 8)) * 1e6
    with pytest.raises(BadInput, match="scales='float32'"):
        quantise(made(name, a), 4, 4, -1)
    got = wide(dequantise(quantise(made(name, a), 8, 4, -1, "float32")))
    np.testing.assert_allclose(got, a, atol=abs(a).max() / 100)


@EVERY
@pytest.mark.parametrize("bits", list(PLANES))
@pytest.mark.parametrize("axis", [-1, -2])
def test_join_and_cut_give_the_same_tokens(name, bits, axis):
    x = made(name, np.random.default_rng(0).standard_normal((2, 3, 24, 10)))
    whole = quantise(x, bits, 8, axis)
    joined = quantise(x[..., :16, :], bits, 8, axis).join(quantise(x[..., 16:, :], bits, 8, axis))
    np.testing.assert_array_equal(wide(dequantise(joined)), wide(dequantise(whole)))
    np.testing.assert_array_equal(wide(dequantise(whole.cut(8, 16))), wide(dequantise(whole))[..., 8:16, :])
    assert whole.cut(0, 8).nbytes * 3 == whole.nbytes and joined.nbytes == whole.nbytes


def test_what_would_break_a_group_is_refused():
    x = made("numpy", np.ones((1, 1, 10, 4)))
    q = quantise(x, 4, 8, -2)
    with pytest.raises(BadInput, match="whole group"):
        q.join(q)
    with pytest.raises(BadInput, match="cut through"):
        q.cut(0, 5)


@pytest.mark.parametrize("wrong", [{"bits": 7}, {"group": 0}, {"axis": 0}, {"scales": "int8"}])
def test_wrong_options_are_refused(wrong):
    options = {"bits": 4, "group": 8, "axis": -1, "scales": "float16", **wrong}
    with pytest.raises(BadInput, match="Expected bits of"):
        quantise(made("numpy", np.ones((2, 8))), **options)


def test_backends_make_the_same_bytes():
    """Same codes in every backend (a tie may round apart by one): what one host saved, another reads."""
    a = np.random.default_rng(0).standard_normal((2, 2, 64, 32)).astype(np.float32)
    first = quantise(made("numpy", a), 3, 32, -2)
    for name in array_backends():
        q = quantise(made(name, a), 3, 32, -2)
        codes = [unpack(z.planes, 3, 32) for z in (first, q)]
        different = wide(codes[0]) != wide(codes[1])
        assert different.mean() < 1e-3 and abs(wide(codes[0]) - wide(codes[1])).max() <= 1
        np.testing.assert_array_equal(wide(q.low), wide(first.low))


# ---- ranges known beforehand ----


@EVERY
@settings(deadline=None, max_examples=30)
@given(
    bits=st.sampled_from(list(PLANES)),
    tokens=st.integers(1, 9),
    channels=st.integers(1, 20),
    size=st.sampled_from([1e-30, 1e-4, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_fixed_codes_are_the_nearest_of_the_levels(name, bits, tokens, channels, size, seed):
    """Against a search over all 2^bits levels, -limit to limit, in float64: the nearest to rounding, or clipped."""
    rng = np.random.default_rng(seed)
    limits = rng.uniform(0.5, 2, channels) * size
    x = made(name, rng.standard_normal((2, tokens, channels)) * size)
    lim = made(name, limits)
    q = fixed_codes(x, bits, lim)
    got = wide(fixed_values(q, lim))
    levels = np.linspace(-1, 1, 2**bits) * wide(lim)[:, None]  # [channels, levels]
    nearest = abs(wide(x)[..., None] - levels).min(-1)
    slack = 8 * EPS["float32"] * wide(lim)
    assert (abs(got - wide(x)) <= nearest + slack).all()
    assert (abs(got[..., None] - levels).min(-1) <= slack).all() and (abs(got) <= wide(lim) + slack).all()
    assert q.nbytes == sum(2 * tokens * -(-channels * w // 8) for w in PLANES[bits]) and q.length == tokens
    assert q.nbytes == sum(a.nbytes for a in q.arrays)


def flipped(name, q):
    rows = backends.load(name).from_numpy(np.array([1, 0]))
    return q.map(lambda p: p[rows])


@EVERY
@pytest.mark.parametrize("bits", list(PLANES))
def test_fixed_codes_join_and_cut_anywhere(name, bits):
    x = made(name, np.random.default_rng(0).standard_normal((2, 1, 13, 11)))
    lim = made(name, np.full(11, 2.0))
    whole = fixed_codes(x, bits, lim)
    joined = fixed_codes(x[..., :5, :], bits, lim).join(fixed_codes(x[..., 5:, :], bits, lim))
    for a, b in ((joined, whole), (whole.cut(0, 13), whole), (flipped(name, flipped(name, whole)), whole)):
        np.testing.assert_array_equal(wide(fixed_values(a, lim)), wide(fixed_values(b, lim)))
    part = whole.cut(3, 7)
    np.testing.assert_array_equal(wide(fixed_values(part, lim)), wide(fixed_values(whole, lim))[..., 3:7, :])
    assert part.length == 4 and part.nbytes * 13 == whole.nbytes * 4
    if name == "torch":
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in part.arrays)
