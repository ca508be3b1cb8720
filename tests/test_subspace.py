"""Shared subspaces against numpy.linalg.svd in float64, and bit allocation against every combination there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import array_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import backends
from crosskv.errors import BadInput
from crosskv.layout import EPS
from crosskv.subspace import BITS, CLIPS, Basis, allocate, check_rank, fixed_steps, gathered, prompt_basis, runs

EVERY = pytest.mark.parametrize("name", array_backends())
KINDS = pytest.mark.parametrize("kind", ["joint", "stacked"])


def made(name, a, dtype="float32"):
    b = backends.load(name)
    return b.cast(b.from_numpy(np.asarray(a, np.float32)), dtype)


def wide(x):
    return backends.of(x).to_numpy(x).astype(np.float64)


def planted(rows, features, rank, noise=0.01, batch=2, mean=0.0, seed=0):
    """[B, 1, rows, features]: `rank` strong directions, falling singular values, noise, perhaps far from 0."""
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((batch, rows, rank)), rng.standard_normal((batch, rank, features))
    x = left * np.linspace(3, 1, rank) @ right / np.sqrt(features) + noise * rng.standard_normal(
        (batch, rows, features)
    )
    return (x + mean * rng.standard_normal((batch, 1, features)))[:, None].astype(np.float32)


def svd(x, kind="joint"):
    """Per row of the batch, float64: (matrix, singular values, right vectors as columns)."""
    for rows in wide(x).reshape(x.shape[0], -1, x.shape[-1]):
        a = rows - rows.mean(0) if kind == "stacked" else rows
        _, s, vt = np.linalg.svd(a, full_matrices=False)
        yield a, s, vt.T


def turned(s, rank):
    """By how much rounding turns the subspace: that of the Gram matrix against the gap (Davis-Kahan)."""
    return 16 * EPS["float32"] * s[0] ** 2 / (s[rank - 1] ** 2 - s[rank] ** 2)


def reconstruction(basis, layers, heads):
    """What the group's layers become: through the latents and back."""
    latents = basis.encode(layers)
    return [wide(basis.decode(latents, j, len(layers), heads)) for j in range(len(layers))]


# ---- the subspace ----

SHAPES = [  # (rows, features, rank): the Gram matrix of the features, that of the rows, the range finder both ways
    pytest.param(200, 24, 6, id="features' Gram"),
    pytest.param(20, 60, 6, id="rows' Gram"),
    pytest.param(300, 90, 6, id="range finder"),
    pytest.param(90, 300, 6, id="range finder, wide"),
]


@EVERY
@KINDS
@pytest.mark.parametrize(("rows", "features", "rank"), SHAPES)
def test_the_subspace_is_that_of_the_svd(name, kind, rows, features, rank):
    """Gap between the 6th and 7th singular value of 10 and more, so the subspace is well defined: both projectors
    differ by at most eps * s_1^2 / gap^2 (Davis-Kahan for the Gram matrix), 30 for the sums of rounding errors."""
    x = planted(rows, features, rank)
    basis, squares = prompt_basis(made(name, x), kind, rank, None, "float32")
    assert basis.rank == rank and tuple(basis.vectors.shape) == (2, features, rank) and squares.shape == (rank,)
    assert (basis.mean is None) == (kind == "joint")
    want = np.zeros(rank)
    for v, (a, s, right) in zip(wide(basis.vectors), svd(x, kind), strict=True):
        bound = 30 * EPS["float32"] * (s[0] / s[rank - 1]) ** 2
        bound += 1e-3 if 2 * (rank + 8) < min(a.shape) else 0  # the finder: (s_7/s_6)^5 of the tail, two power steps
        assert abs(v @ v.T - right[:, :rank] @ right[:, :rank].T).max() <= bound
        assert abs(v.T @ v - np.eye(rank)).max() <= bound
        want += s[:rank] ** 2 / len(a) / 2
    np.testing.assert_allclose(squares, want, rtol=1e-4)


@KINDS
def test_float64_agrees_to_float64(kind):
    x = np.random.default_rng(0).standard_normal((2, 3, 40, 12))
    basis, squares = prompt_basis(x, kind, 12, None, "float64")
    for v, (a, s, right) in zip(basis.vectors, svd(x, kind), strict=True):
        np.testing.assert_allclose(abs(right.T @ v), np.eye(12), atol=1e-6)  # vectors come back through float32
        np.testing.assert_allclose(np.linalg.norm(a @ v, axis=0), s, rtol=1e-6)
    assert squares.sum() == pytest.approx(np.mean([(a * a).sum() for a, *_ in svd(x, kind)]) / 120, rel=1e-9)


@EVERY
@pytest.mark.parametrize(("rows", "features"), [(200, 24), (20, 60), (300, 90)])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_the_error_is_that_of_eckart_young_at_every_rank(name, rows, features, mean):
    """No basis of that rank does better than the SVD's; ours is as good to 1 % and the rounding of float32."""
    x = planted(rows, features, 6, noise=0.1, mean=mean)
    for rank in (1, 2, 6, 9, min(rows, features)):
        basis, _ = prompt_basis(made(name, x), "joint", rank, None, "float32")
        for v, (a, s, _) in zip(wide(basis.vectors), svd(x), strict=True):
            error, best = ((a - a @ v @ v.T) ** 2).sum(), (s[rank:] ** 2).sum()
            assert error >= best * (1 - 1e-6) - 1e-9
            assert error <= 1.01 * best + 8 * EPS["float32"] * (s**2).sum()


@EVERY
@pytest.mark.parametrize(("rows", "features", "rank"), [(40, 120, 40), (120, 40, 40), (40, 120, 30), (200, 300, 60)])
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
def test_vectors_are_orthonormal_however_large_one_direction_is(name, rows, features, rank, mean):
    """Keys far from 0 leave other directions below the rounding of a float32 Gram matrix. Vectors that are not
    orthonormal would blow them up, so that full rank is worse than none."""
    x = planted(rows, features, 6, noise=0.3, mean=mean)
    basis, _ = prompt_basis(made(name, x), "joint", rank, None, "float32")
    for v, (a, s, _) in zip(wide(basis.vectors), svd(x), strict=True):
        assert abs(v.T @ v - np.eye(rank)).max() <= 16 * EPS["float32"]
        error = np.linalg.norm(a - a @ v @ v.T)
        assert error <= 1.5 * np.sqrt((s[rank:] ** 2).sum()) + 16 * EPS["float32"] * s[0] * np.sqrt(len(s))


@EVERY
@KINDS
@pytest.mark.parametrize("shape", [(30, 12), (8, 40), (300, 90)])
def test_full_rank_loses_nothing(name, kind, shape):
    x = planted(*shape, 3, noise=1.0)
    basis, _ = prompt_basis(made(name, x), kind, None, None, "float32")
    assert basis.rank == min(shape)
    layers = [made(name, x)]
    (got,) = reconstruction(basis, layers, 1)
    np.testing.assert_allclose(got, wide(layers[0]), atol=64 * EPS["float32"] * abs(x).max())


@EVERY
@KINDS
@pytest.mark.parametrize("shape", [(60, 16), (12, 40), (300, 90)])
@pytest.mark.parametrize("what", ["rank deficient", "constant", "zero", "one row"])
def test_poor_prompts(name, kind, shape, what):
    """Directions that the prompt lacks: nothing infinite, and what there is comes back."""
    x = planted(*shape, 2, noise=0.0)
    if what in ("constant", "zero"):
        x = np.full_like(x, {"constant": 3.7, "zero": 0.0}[what])
    elif what == "one row":
        x = x[:, :, :1]
    for rank, energy in ((None, None), (5, None), (None, 0.99), (None, 1.0)):
        basis, squares = prompt_basis(made(name, x), kind, rank, energy, "float32")
        assert all(np.isfinite(wide(a)).all() for a in basis.arrays) and np.isfinite(squares).all()
        (got,) = reconstruction(basis, [made(name, x)], 1)
        lost = 0.0 if energy != 0.99 else np.sqrt(0.011 * (x.astype(np.float64) ** 2).sum((1, 2, 3)).max())
        np.testing.assert_allclose(got, x, atol=lost + 256 * EPS["float32"] * abs(x).max())


# ---- rank by energy ----


@EVERY
def test_energy_keeps_the_least_rank_that_holds_it_in_every_sequence(name):
    """Squared singular values 8, 4, 2, 1, 1 and 1, 1, 8, 2, 4: shares 1/2, 3/4, 7/8, 15/16, 1, exact in binary."""
    x = np.zeros((2, 1, 32, 5))
    for i, squares in enumerate(([8, 4, 2, 1, 1], [1, 1, 8, 2, 4])):
        signs = np.sign(np.linalg.qr(np.ones((1, 1)))[0])[0, 0] * _hadamard(32)[:, 1:6]
        x[i, 0] = signs * np.sqrt(squares)
    for energy, want in ((0.5, 1), (0.500001, 2), (0.75, 2), (0.8, 3), (0.875, 3), (0.9, 4), (0.9375, 4), (0.95, 5)):
        basis, _ = prompt_basis(made(name, x) if name != "numpy" else x, "joint", None, energy, "float32")
        if energy in (0.5, 0.75, 0.875, 0.9375) and name != "numpy":
            assert basis.rank in (want, want + 1)  # float32: sqrt(2) squared is not 2
        else:
            assert basis.rank == want, energy
    x[1] = np.random.default_rng(0).standard_normal((32, 5))  # needs more: both get it
    basis, _ = prompt_basis(made(name, x), "joint", None, 0.8, "float32")
    need = [int((np.cumsum(s**2) < 0.8 * (s**2).sum()).sum()) + 1 for _, s, _ in svd(x)]
    assert basis.rank == max(need) > min(need)


def _hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@EVERY
def test_rank_limits_what_energy_asks_for(name):
    x = made(name, planted(100, 20, 20, noise=1.0))
    assert prompt_basis(x, "joint", 3, 0.999, "float32")[0].rank == 3
    assert prompt_basis(x, "joint", None, 0.999, "float32")[0].rank > 3


@EVERY
def test_what_is_kept_takes_no_more_memory_than_it_says(name):
    """A basis cut by energy is not a view of all vectors."""
    x = made(name, planted(100, 64, 3))
    basis, _ = prompt_basis(x, "joint", None, 0.9, "float32")
    assert basis.rank < 10 and basis.nbytes == 2 * 64 * basis.rank * 4
    if name == "torch":
        assert basis.vectors.untyped_storage().nbytes() == basis.vectors.nbytes
    if name == "numpy":
        assert basis.vectors.base is None or basis.vectors.base.nbytes == basis.vectors.nbytes


# ---- groups of layers ----


def layers_of(name, n=3, batch=2, heads=2, tokens=50, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((batch, heads, tokens, dim))
    return [made(name, shared + 0.5 * rng.standard_normal(shared.shape) + j) for j in range(n)]


@EVERY
def test_stacked_with_a_group_of_one_is_the_per_layer_svd(name):
    """The seed page: a group of one is plain per-layer SVD of the centred keys, [heads * tokens, head dim]."""
    (x,) = layers_of(name, 1)
    rank = 5
    basis, _ = prompt_basis(gathered([x], "stacked"), "stacked", rank, None, "float32")
    (got,) = reconstruction(basis, [x], 2)
    for i in range(2):
        rows = wide(x)[i].reshape(-1, 8)
        a = rows - rows.mean(0)
        u, s, vt = np.linalg.svd(a, full_matrices=False)
        want = (u[:, :rank] * s[:rank] @ vt[:rank] + rows.mean(0)).reshape(2, 50, 8)
        np.testing.assert_allclose(got[i], want, atol=turned(s, rank) * abs(rows).max())
        np.testing.assert_allclose(wide(basis.mean)[i, 0], rows.mean(0), atol=8 * EPS["float32"] * abs(rows).max())


@EVERY
def test_joint_is_the_svd_of_the_layers_side_by_side(name):
    layers = layers_of(name, tokens=40)
    rank = 20
    basis, _ = prompt_basis(gathered(layers, "joint"), "joint", rank, None, "float32")
    got = reconstruction(basis, layers, 2)
    for i in range(2):
        side = np.concatenate([wide(x)[i].swapaxes(0, 1).reshape(40, -1) for x in layers], 1)  # [T, layers * H * D]
        u, s, vt = np.linalg.svd(side, full_matrices=False)
        want = u[:, :rank] * s[:rank] @ vt[:rank]
        for j, x in enumerate(got):
            part = want[:, j * 16 : (j + 1) * 16].reshape(40, 2, 8).swapaxes(0, 1)
            np.testing.assert_allclose(x[i], part, atol=turned(s, rank) * abs(side).max())


@EVERY
def test_joint_errs_less_than_per_layer_and_that_less_than_stacked(name):
    """Eckart-Young and set inclusion, at equal latents per token: one factor for all layers can be the per-layer ones
    side by side, and those can all be the same. (No mean: it is a rank that the others lack.)"""
    layers = layers_of(name, n=3)
    per_layer = 4

    def error(bases):
        total = 0.0
        for basis, part, heads in bases:
            back = reconstruction(basis, part, heads)
            total += sum(((g - wide(x)) ** 2).sum() for g, x in zip(back, part, strict=True))
        return total

    def fitted(part, kind, rank):
        return Basis(kind, prompt_basis(gathered(part, kind), "joint", rank, None, "float32")[0].vectors)

    joint = error([(fitted(layers, "joint", 3 * per_layer), layers, 2)])
    single = error([(fitted([x], "joint", per_layer), [x], 2) for x in layers])
    heads = error([(fitted(layers, "stacked", per_layer // 2), layers, 2)])
    assert 0 < joint < single < heads


@EVERY
@KINDS
def test_mean_and_scale_go_both_ways(name, kind):
    layers = layers_of(name, n=2)
    features = gathered(layers, kind).shape[-1]
    rng = np.random.default_rng(1)
    v = np.linalg.qr(rng.standard_normal((features, features)))[0][None]
    mean, scale = rng.standard_normal((1, 1, features)), rng.uniform(0.1, 10, (1, 1, features))
    basis = Basis(kind, *(made(name, a) for a in (v, mean, scale)))
    a = basis.encode(layers)
    np.testing.assert_allclose(wide(a), (wide(gathered(layers, kind)) - mean) / scale @ v[0], atol=1e-3)
    for x, y in zip(reconstruction(basis, layers, 2), layers, strict=True):
        np.testing.assert_allclose(x, wide(y), atol=256 * EPS["float32"] * 100)
    assert len(basis.arrays) == 3 and basis.nbytes == 4 * features * (features + 2)
    assert basis.map(lambda x: x[:, :1]).vectors.shape == (1, 1, features)


# ---- bits ----


def cost(tables, chosen):
    return sum(t[np.searchsorted(BITS, b), np.arange(len(b))].sum() for t, b in zip(tables, chosen, strict=True))


def best(table, budget):
    """The least error over all combinations."""
    return min(
        sum(table[BITS.index(b), i] for i, b in enumerate(c))
        for c in itertools.product(BITS, repeat=table.shape[1])
        if sum(c) <= budget
    )


@settings(deadline=None, max_examples=60)
@given(
    columns=st.integers(1, 4),
    budget=st.integers(0, 30),
    shape=st.sampled_from(["normal", "linear", "random", "rising"]),
    seed=st.integers(0, 10_000),
)
def test_bits_are_given_as_well_as_they_can_be(columns, budget, shape, seed):
    """Against all combinations. Until something does not fit, a table's hull is followed exactly; so the error is at
    most the best one for a budget that is smaller by one edge of the hull, less one bit."""
    rng = np.random.default_rng(seed)
    variances = rng.lognormal(0, 2, columns)
    bits = np.asarray(BITS)[:, None]
    table = {
        "normal": variances * 4.0**-bits,
        "linear": variances * (1 - bits / 8),
        "random": variances * np.sort(rng.uniform(0, 1, (len(BITS), columns)), 0)[::-1],
        "rising": variances * rng.uniform(0, 1, (len(BITS), columns)),
    }[shape]
    (got,) = allocate([table], budget)
    assert got.sum() <= budget and set(got) <= set(BITS)
    edge = 2 if shape == "normal" else 8  # 7 bits there are not; a table that is no curve has longer edges
    assert cost([table], [got]) <= best(table, max(0, budget - edge + 1)) * (1 + 1e-9) + 1e-300
    if shape == "normal" and got.max() < 6:
        assert cost([table], [got]) == pytest.approx(best(table, budget))


@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 40)), each=st.floats(0, 9), seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=60)
def test_larger_variances_get_more_bits_and_nothing_is_left_over(shape, each, seed):
    rng = np.random.default_rng(seed)
    variances = [np.sort(rng.lognormal(0, 2, n))[::-1] for n in shape]
    tables = [v * 4.0 ** -np.asarray(BITS)[:, None] for v in variances]
    budget = each * sum(shape)
    got = allocate(tables, budget)
    assert [len(b) for b in got] == list(shape)
    used = sum(b.sum() for b in got)
    assert used <= budget and (used > budget - 2 or used == 8 * sum(shape))
    both, order = np.concatenate(got), np.argsort(-np.concatenate(variances), kind="stable")
    assert (np.diff(both[order]) <= (1 if used > budget - 2 else 0)).all()  # the last bit may miss one of 2
    for b, v in zip(got, variances, strict=True):  # and reverse water-filling: errors left are equal to a factor of 4
        left = (v * 4.0**-b)[(b > 0) & (b < 6)]
        assert len(left) == 0 or left.max() <= 16.01 * left.min()


def test_bits_that_do_not_help_are_not_given():
    table = np.array([[1.0, 1.0], [1.0, 1.5], [1.0, 1.5], [1.0, 0.2], [1.0, 0.2], [1.0, 0.2], [1.0, 0.2], [1.0, 0.2]])
    (got,) = allocate([table], 100)
    assert got.tolist() == [0, 3]  # over the hump of 1 and 2 bits in one step
    assert allocate([table], 2)[0].tolist() == [0, 0]


@pytest.mark.parametrize("law", ["normal", "laplace", "uniform", "outlier", "constant"])
def test_clipping_is_where_a_search_finds_it(law):
    """Against float64 brute force over all limits and bits: never better than the best, and at most 12 % worse."""
    rng = np.random.default_rng(0)
    x = {
        "normal": rng.standard_normal((3000, 2)),
        "laplace": rng.laplace(size=(3000, 2)),
        "uniform": rng.uniform(-1, 1, (3000, 2)),
        "outlier": np.concatenate([rng.standard_normal((2999, 2)), [[20.0, -12.0]]]),
        "constant": np.tile([0.0, 2.0], (3000, 1)),
    }[law] * [1.0, 1e-3]
    limits, errors = fixed_steps(x)
    assert limits.shape == errors.shape == (len(BITS), 2)
    np.testing.assert_allclose(errors[0], (x**2).mean(0))
    assert (np.diff(errors, axis=0) <= 0).all()
    for i, bits in enumerate(BITS[1:], 1):

        def error(limit, bits=bits):
            step = 2 * limit / (2**bits - 1)
            codes = np.clip(np.rint((x + limit) / step), 0, 2**bits - 1)
            return ((codes * step - limit - x) ** 2).mean(0)

        largest = np.maximum(abs(x).max(0), 1e-30)
        found = np.min([error(c * largest) for c in np.geomspace(0.05, 1.05, 160)], 0)
        mine = error(limits[i])
        noise = 1e-5 * (x**2).mean(0) * 4.0**-bits + (4 * EPS["float32"] * largest) ** 2
        np.testing.assert_allclose(np.minimum(mine, errors[i - 1]), errors[i], rtol=1e-2, atol=noise.max())
        if law != "constant":
            assert (errors[i] <= 1.12 * found + noise).all(), (bits, errors[i], found)
        assert all(np.isclose(limits[i, j], np.multiply(CLIPS, largest[j]), rtol=1e-6).any() for j in (0, 1))


def test_runs():
    assert runs([8, 8, 4, 2, 2, 0]) == ((0, 2, 8), (2, 3, 4), (3, 5, 2))
    assert runs([3]) == ((0, 1, 3),) and runs([0, 0]) == () and runs([]) == ()
    assert runs([0, 1, 1, 0, 1]) == ((1, 3, 1), (4, 5, 1))
    assert runs(np.array([5, 5])) == ((0, 2, 5),) and all(type(n) is int for n in runs(np.array([5, 5]))[0])


@pytest.mark.parametrize("rank", [0, -1, 9, 2.0, True, "3", None])
def test_wrong_ranks(rank):
    with pytest.raises(BadInput, match=f"rank_keys must be an integer from 1 to 8, got {rank!r}"):
        check_rank(rank, 8, "rank_keys")
    check_rank(8, 8, "rank_keys")
