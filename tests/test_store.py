"""The packed store of one layer against a list of tokens in NumPy, through any order of operations."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import numpy as np
import pytest
from conftest import array_backends, storage_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from crosskv import backends
from crosskv.errors import BadInput
from crosskv.store import IntConfig, Store

EVERY = pytest.mark.parametrize("name", array_backends())
CONFIG = IntConfig(8, 8, group=8, sinks=3, tail=5)


def tokens(name, n, seed=0, batch=2):
    rng = np.random.default_rng(seed)
    b = backends.load(name)
    return tuple(b.from_numpy(rng.standard_normal((batch, 2, n, d)).astype(np.float32)) for d in (12, 20))


def wide(x):
    return backends.of(x).to_numpy(x)


def filled(name, n, config=CONFIG, steps=None):
    kv = tokens(name, n)
    store, at = Store(config), 0
    for step in steps or [n]:
        store, _ = store.append(*(x[..., at : at + step, :] for x in kv))
        at += step
    return store, kv


@EVERY
def test_attention_of_the_first_step_is_exact_and_then_it_is_packed(name):
    kv = tokens(name, 50)
    store, whole = Store(CONFIG).append(*kv)
    for got, want in zip(whole, kv, strict=True):
        np.testing.assert_array_equal(wide(got), wide(want))
    assert store.lengths == (3, 40, 7) and store.length == 50
    for got, want in zip(store.read(), kv, strict=True):
        np.testing.assert_array_equal(wide(got)[..., :3, :], wide(want)[..., :3, :])
        np.testing.assert_array_equal(wide(got)[..., 43:, :], wide(want)[..., 43:, :])
        error = abs(wide(got) - wide(want))[..., 3:43, :]
        assert 0 < error.max() < 8 / 255  # half a step of a spread below 16


@EVERY
@pytest.mark.parametrize("steps", [[50], [1] * 50, [20, 30], [2, 1, 13, 34], [3, 47], [49, 1]])
def test_however_the_tokens_come_the_same_is_held(name, steps):
    """Prefill whole, in chunks, one by one: same groups, same bytes, same tokens."""
    want, _ = filled(name, 50)
    got, _ = filled(name, 50, steps=steps)
    assert got.lengths == want.lengths and got.nbytes == want.nbytes
    for x, y in zip(got.read(), want.read(), strict=True):
        np.testing.assert_array_equal(wide(x), wide(y))


OPERATION = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 30)),
    st.tuples(st.just("trim"), st.integers(0, 40)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("fork"), st.just(0)),
    st.tuples(st.just("state"), st.just(0)),
)


@EVERY
@settings(deadline=None, max_examples=40)
@given(
    operations=st.lists(OPERATION, min_size=1, max_size=12),
    sinks=st.integers(0, 6),
    tail=st.integers(0, 20),
    group=st.sampled_from([1, 5, 8]),
)
def test_any_order_of_operations_holds_the_right_tokens(name, operations, sinks, tail, group):
    """The oracle is a NumPy array of the tokens that should be there: values within the error of 8 bits, packed up to
    three times (trims cut through groups), sinks exact, and never a token too many or too few."""
    b = backends.load(name)
    store, want = Store(IntConfig(8, 8, group, sinks, tail)), [np.zeros((2, 2, 0, d), np.float32) for d in (12, 20)]
    for i, (what, n) in enumerate(operations):
        before = store
        if what == "append":
            new = tokens(name, n, seed=i)
            store, whole = store.append(*new)
            want = [np.concatenate([w, wide(x)], -2) for w, x in zip(want, new, strict=True)]
            for w, x in zip(want, whole, strict=True):
                np.testing.assert_array_equal(wide(x)[..., -n:, :], w[..., -n:, :])
                np.testing.assert_allclose(wide(x), w, atol=0.2)
        elif what == "trim":
            store = store.trim(n)
            want = [w[..., : max(0, w.shape[-2] - n), :] for w in want]
        elif what == "rows":
            index = b.from_numpy(np.array(n))
            store = store.map(lambda x, index=index: x[index])
            want = [w[np.array(n)] for w in want]
        elif what == "fork":
            before.append(*tokens(name, 20, seed=99))  # what a fork does must not be seen
        else:
            store = Store(IntConfig()).restore(store.state())
        s, m, t = store.lengths
        assert store.length == s + m + t == want[0].shape[-2]
        assert m % group == 0 and t < tail + group and s <= sinks
        if store.length == 0:
            assert store.read() is None and store.nbytes == 0
            continue
        for w, x in zip(want, store.read(), strict=True):
            np.testing.assert_allclose(wide(x), w, atol=0.2)
            np.testing.assert_array_equal(wide(x)[..., : min(s, 1), :], w[..., : min(s, 1), :])


@EVERY
def test_trim_within_the_tail_to_the_border_into_the_packed_and_into_the_sinks(name):
    store, _ = filled(name, 50)  # 3 + 40 + 7
    full = [wide(x) for x in store.read()]
    for n, lengths in ((2, (3, 40, 5)), (7, (3, 40, 0)), (10, (3, 32, 5)), (15, (3, 32, 0)), (47, (3, 0, 0)),
                       (49, (1, 0, 0)), (50, (0, 0, 0)), (60, (0, 0, 0))):  # fmt: skip
        cut = store.trim(n)
        assert cut.lengths == lengths
        for x, want in zip(cut.read() or [], full, strict=False):
            np.testing.assert_array_equal(wide(x), want[..., : 50 - n, :])
    with pytest.raises(BadInput, match="trim -1"):
        store.trim(-1)


@EVERY
def test_copies_share_memory_but_no_future(name):
    store, _ = filled(name, 50)
    fork = copy.deepcopy(store)
    grown, _ = fork.append(*tokens(name, 30, seed=5))
    assert grown.length == 80 and store.length == fork.length == 50


@EVERY
def test_bytes_are_what_is_planned(name):
    """4-bit keys, 2-bit values, groups of 32: by hand."""
    config = IntConfig(4, 2, group=32, sinks=4, tail=16)
    store = Store(config)
    rng = np.random.default_rng(0)
    b = backends.load(name)
    kv = [b.from_numpy(rng.standard_normal((1, 2, 4 + 320 + 16, 64)).astype(np.float32)) for _ in "kv"]
    store, _ = store.append(*kv)
    heads, packed = 2, 320
    keys = heads * (packed * 64 // 2 + packed // 32 * 64 * 2 * 2)
    values = heads * packed * (64 // 4 + 64 // 32 * 2 * 2)
    exact = heads * (4 + 16) * 64 * 4 * 2
    assert store.nbytes == keys + values + exact


def test_nothing_else_is_kept_alive_in_torch():
    """All storages reachable from the store, as torch sees them, weigh what nbytes says: no views of larger arrays."""

    first, kv = filled("torch", 500)
    store, _ = first.append(*(x[..., :1, :] for x in kv))
    store = store.trim(2)
    del kv
    for s in (first, store, store.trim(8), store.trim(40), filled("torch", 4)[0], filled("torch", 2)[0]):
        assert storage_bytes(s) == s.nbytes


def test_nothing_else_is_kept_alive_in_mlx():
    """What MLX's own allocator counts."""
    import mlx.core as mx

    gc.collect()
    before = mx.get_active_memory()
    config = replace(CONFIG, group=32, tail=32)
    kv = [mx.random.normal((1, 4, 4096, 64)) for _ in "kv"]
    mx.eval(kv)
    new = [x[..., :1, :] + 0 for x in kv]
    store, whole = Store(config).append(*kv)
    mx.eval([store.state(), whole, new])
    del kv
    for _ in range(2):
        whole = None
        gc.collect()
        held = mx.get_active_memory() - before
        assert store.nbytes <= held <= 1.02 * store.nbytes + 16 * len(store.arrays) * 1024
        store, whole = store.append(*new)
        mx.eval([store.state(), whole])


@EVERY
def test_wrong_shapes_are_refused(name):
    store, kv = filled(name, 50)
    with pytest.raises(BadInput, match=r"holds \(2, 2, 12, 20\)"):
        store.append(*tokens(name, 1, batch=1))
    with pytest.raises(BadInput, match="of the same tokens"):
        store.append(kv[0], kv[1][..., :1, :])
    with pytest.raises(BadInput, match="not the state"):
        store.restore([1, 2])
    assert store.length == 50


@EVERY
def test_nan_is_refused_and_the_store_stays(name):
    store, kv = filled(name, 50)
    bad = [backends.of(x).from_numpy(np.full_like(wide(x), np.nan)) for x in kv]
    with pytest.raises(BadInput, match="NaN or Inf"):
        store.append(*bad)
    assert store.lengths == (3, 40, 7)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bits_keys": 5}, r"bits_keys must be one of \[2, 3, 4, 8\], got 5"),
        ({"bits_values": 16}, "bits_values must be one of"),
        ({"bits_keys": True}, "bits_keys must be an integer"),
        ({"group": 0}, "group must be an integer of at least 1, got 0"),
        ({"sinks": -1}, "sinks must be"),
        ({"tail": 1.5}, "tail must be"),
        ({"scales": "float64"}, "scales must be"),
    ],
)
def test_wrong_options_are_refused(wrong, says):
    with pytest.raises(BadInput, match=says):
        IntConfig(**wrong)
