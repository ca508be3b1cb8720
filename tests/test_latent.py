"""Layers compressed together as the hosts use them: generate, batches, padding, beams, crop, turns, copies, mishaps.

Oracles: the host's own cache on the same model (at full rank without quantisation nothing may differ but rounding), and
the factorisation done here with numpy.linalg.svd on the arrays that the host's own cache holds.
"""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import greedy, hf, mlx, model_hosts, small, storage_bytes
from test_compress import close, generate, ids, length, new, run, trim

from crosskv import XKVConfig, backends, compress, make_cache, rope
from crosskv.errors import BadInput, IncompatibleModels, MatchedKVError
from crosskv.layout import EPS
from crosskv.live import measured

HOSTS = pytest.mark.parametrize("host", model_hosts())
SMALL = {"sinks": 2, "tail": 5, "block": 8, "first": 32}
WIDTH = 2 * 16  # of one layer of the tiny models: heads * head dim
# One layer's features fit into the first 32 tokens, so the basis is complete and nothing may be lost, ever.
EXACT = [
    pytest.param(XKVConfig("tokens", group=1, **SMALL), id="tokens"),
    pytest.param(XKVConfig("features", group=3, **SMALL), id="features"),
    pytest.param(XKVConfig("tokens", group=1, values=False, **SMALL), id="keys only"),
    pytest.param(XKVConfig("tokens", group=2, **{**SMALL, "first": 64, "tail": 0, "sinks": 0}), id="two layers"),
]
FULL = XKVConfig("features", group=2, **SMALL)
EIGHT = XKVConfig("tokens", group=2, bits=8, **{**SMALL, "first": 64})


def same(got, want):
    """Rounding of rotations and of a few products, through four layers."""
    np.testing.assert_allclose(got, want, atol=1000 * EPS["float32"] * abs(want).max(), rtol=0)


def held(cache):
    """The members of a cache of either host."""
    return [x.held for x in getattr(cache, "layers", cache) if hasattr(x, "held")]


def groups(cache):
    return list({id(m.group): m.group for m in held(cache)}.values())


def middle(cache):
    return [g.packed_tokens for g in groups(cache)]


def select(cache, rows):
    if hasattr(cache, "layers"):
        import torch

        return cache.reorder_cache(torch.tensor(rows))
    import mlx.core as mx

    for c in cache:
        c.select(mx.array(rows))
    return None


# ---- what attention sees ----


@HOSTS
@pytest.mark.parametrize("config", EXACT)
def test_full_rank_without_quantisation_is_the_hosts_own(host, config):
    """A prompt in chunks, single tokens, a second turn: logits to rounding, and the generated tokens are folded too."""
    model = small(host)
    mine, own = make_cache(model, config), new(model)
    parts = np.split(ids(150, batch=2), [90, 100, *range(101, 121), 149], axis=1)
    folded = []
    for part in parts:
        same(run(model, part, mine), run(model, part, own))
        folded.append(middle(mine)[0])
    assert length(mine) == length(own) == 150
    assert folded[0] >= 80 and folded[-2] > folded[2]
    assert all(0 <= 150 - n - config.sinks - config.tail < 8 for n in middle(mine))


@HOSTS
def test_generate_as_with_the_hosts_own(host):
    model = small(host)
    for config in (EXACT[0].values[0], FULL):
        mine = make_cache(model, config)
        assert greedy(model, ids(60), mine, 30) == greedy(model, ids(60), None, 30)
        assert min(middle(mine)) >= 72  # 89 or 90 tokens, 2 + 5 exact, less than a block over


@HOSTS
@pytest.mark.parametrize("kind", ["joint", "stacked"])
@pytest.mark.parametrize("values", [True, False])
def test_attention_reads_what_numpy_factorises(host, kind, values):
    """The middle of the host's own cache, un-rotated, truncated by numpy.linalg.svd, rotated and installed."""
    model = small(host)
    b, ropes = backends.of(model), measured(model).ropes
    prompt, more = np.split(ids(75), [73], axis=1)
    rank = {"joint": 30, "stacked": 9}[kind]  # 30 of 64: from the Gram matrix, exact; the range finder is not
    ranks = {"rank_keys": rank, "rank_values": rank + 2} if values else {"rank_keys": rank}
    config = XKVConfig("tokens" if kind == "joint" else "features", group=3, values=values, sinks=4, tail=5, block=32,
                       first=64, **ranks)  # fmt: skip
    mine = make_cache(model, config)
    run(model, prompt, mine)
    assert middle(mine) == [64, 64]
    m, layers = slice(4, 68), {}
    wide = {i: [b.to_numpy(x).astype(np.float64) for x in kv] for i, kv in b.capture(model, prompt).items()}
    for group in ((0, 1, 2), (3,)):  # the last group is smaller
        for side in (0, 1):
            parts, tables = [], [rope.tables(ropes[i], np.arange(4, 68)) for i in group]
            for i, t in zip(group, tables, strict=True):
                x = wide[i][side][:, :, m]
                parts.append(rope.unrotate(x, t, ropes[i].interleaved) if side == 0 else x)
            if side == 1 and not values:
                continue
            r = rank + 2 * side
            if kind == "joint":
                a = np.concatenate([x[0].swapaxes(0, 1).reshape(64, WIDTH) for x in parts], 1)
                back = [x.reshape(64, 2, 16).swapaxes(0, 1)[None] for x in np.split(cut(a, r), len(group), 1)]
            else:
                a = np.concatenate([x[0].reshape(-1, 16) for x in parts])
                back = [x.reshape(1, 2, 64, 16) for x in np.split(cut(a - a.mean(0), r) + a.mean(0), len(group))]
            for i, t, x in zip(group, tables, back, strict=True):
                wide[i][side][:, :, m] = rope.rotate(x, t, ropes[i].interleaved) if side == 0 else x
    for i, kv in wide.items():
        layers[i] = tuple(b.from_numpy(x.astype(np.float32)) for x in kv)
    got, want = run(model, more, mine), run(model, more, b.install(model, layers))
    far = run(model, more, b.install(model, b.capture(model, prompt)))
    close(got, want, 2e-3)
    assert abs(far - want).max() > 0.1 * want.std()


def cut(a, rank):
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


@HOSTS
def test_keys_only_keeps_values_to_the_last_bit(host):
    model = small(host)
    b = backends.of(model)
    mine = make_cache(model, XKVConfig(group=2, rank_keys=10, bits=3, values=False, **SMALL))
    run(model, ids(70), mine)
    for i, (k, v) in b.read(model, mine).items():
        keys, values = (b.to_numpy(x) for x in b.capture(model, ids(70))[i])
        np.testing.assert_array_equal(b.to_numpy(v), values)
        assert abs(b.to_numpy(k) - keys)[:, :, 2:60].max() > 0.01 * abs(keys).max()


@HOSTS
@pytest.mark.parametrize("bits", [8, (8, 6, 5, 4)])
def test_quantised_latents_stay_close_and_more_bits_closer(host, bits):
    model = small(host)
    shares, errors = {}, {}
    for b in (bits, 3 if isinstance(bits, int) else (3, 2, 1, 0)):
        mine, own = make_cache(model, XKVConfig(group=2, bits=b, **{**SMALL, "first": 64})), new(model)
        for part in np.split(ids(120), [100], axis=1):
            got, want = run(model, part, mine), run(model, part, own)
        errors[b] = abs(got - want).max() / want.std()
        shares[b] = compress.nbytes(model, mine)
    few, many = sorted(shares, key=shares.get)
    assert shares[few] < shares[many] and errors[many] < 0.5 * errors[few]
    assert errors[bits] < (0.1 if bits == 8 else 1.5)


@HOSTS
def test_sequences_of_a_batch_have_their_own_bases(host):
    """Rows of a batch are compressed as they would be alone."""
    model = small(host)
    tokens = ids(90, batch=3)
    config = XKVConfig(group=2, rank_keys=12, rank_values=14, **SMALL)
    both = make_cache(model, config)
    run(model, tokens, both)
    got = run(model, ids(3, 1, batch=3), both)
    for i in range(3):
        alone = make_cache(model, config)
        run(model, tokens[i : i + 1], alone)
        close(got[i : i + 1], run(model, ids(3, 1, batch=3)[i : i + 1], alone), 2e-3)


@HOSTS
@pytest.mark.parametrize(("group", "want"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (9, [4]), ("all", [4])])
def test_groups_of_layers(host, group, want):
    model = small(host)
    mine = make_cache(model, XKVConfig("features", group=group, **SMALL))
    assert [len(g.layers) for g in groups(mine)] == want
    assert [i for g in groups(mine) for i in g.layers] == list(range(4))
    own = new(model)
    for part in (ids(60), ids(3, 1)):
        same(run(model, part, mine), run(model, part, own))


@HOSTS
def test_a_rank_beyond_a_smaller_last_group_is_all_that_group_has(host):
    model = small(host)
    mine, own = (
        make_cache(model, XKVConfig(group=3, rank_keys=90, rank_values=96, **{**SMALL, "first": 96})),
        new(model),
    )
    for part in (ids(120), ids(2, 1)):
        got, want = run(model, part, mine), run(model, part, own)
    close(got, want, 0.2)
    assert [g.middle[0].sides[0].basis.rank for g in groups(mine)] == [90, 32]


@HOSTS
def test_a_small_first_chunk_freezes_no_basis(host):
    """Two tokens, then the prompt: nothing is compressed before there are `first` tokens, and then by all of them."""
    model = small(host)
    tokens, rest = ids(82), ids(3, 1)
    config = XKVConfig(group=2, rank_keys=16, rank_values=16, **SMALL)
    one, two = make_cache(model, config), make_cache(model, config)
    run(model, tokens, one)
    run(model, tokens[:, :2], two)
    assert middle(two) == [0, 0]
    run(model, tokens[:, 2:], two)
    assert middle(one) == middle(two) == [72, 72]
    same(run(model, rest, two), run(model, rest, one))
    # one token after the other: the first 32 tokens that are old enough are the first basis, later ones join it
    slow = make_cache(model, config)
    counts = []
    for j in range(82):
        run(model, tokens[:, j : j + 1], slow)
        counts.append(middle(slow)[0])
    assert counts[37] == 0 and counts[38] == 32 and counts[-1] == 72 and set(np.diff(counts)) == {0, 8, 32}
    assert [len(g.middle) for g in groups(slow)] == [1, 1]


@HOSTS
def test_half_precision(host):
    model = small(host)
    b = backends.of(model)
    model = model.to(b.xp.bfloat16) if host == "torch" else model
    if host == "mlx":
        model.set_dtype(b.xp.bfloat16)
    for config in (
        FULL,
        XKVConfig(group=2, bits=8, **{**SMALL, "first": 64}),
        XKVConfig(group=2, exact="float16", **SMALL),
    ):
        mine, own = make_cache(model, config), new(model)
        for part in (ids(90), ids(2, 1)):
            got, want = (b.to_numpy(b.logits(model, part, c)).astype(np.float32) for c in (mine, own))
        close(got, want, 0.2)
        assert {b.dtype_of(x) for kv in b.read(model, mine).values() for x in kv} == {"bfloat16"}


@HOSTS
def test_exact_dtype_halves_sinks_and_tail(host):
    model = small(host)
    one, two = (make_cache(model, XKVConfig(exact=e, **SMALL)) for e in (None, "float16"))
    for c in (one, two):
        run(model, ids(20), c)
    assert compress.nbytes(model, two) * 2 == compress.nbytes(model, one)
    close(run(model, ids(2, 1), two), run(model, ids(2, 1), one), 0.02)


# ---- bytes ----

SIZES = [
    pytest.param(XKVConfig("tokens", group=2, **SMALL), id="raw"),
    pytest.param(XKVConfig("tokens", group=2, energy=0.8, **SMALL), id="energy"),
    pytest.param(XKVConfig("features", group=4, bits=3, **SMALL), id="features"),
    pytest.param(XKVConfig("tokens", group=3, bits=(8, 4, 2, 0), exact="float16", **SMALL), id="shares"),
    pytest.param(XKVConfig("tokens", group=2, bits=5, values=False, **SMALL), id="keys only"),
    pytest.param(XKVConfig("tokens", group="all", ratio=4, **{**SMALL, "first": 64}), id="ratio"),
]


@HOSTS
@pytest.mark.parametrize("config", SIZES)
def test_nbytes_is_the_sum_of_the_arrays_that_live(host, config):
    model = small(host)
    mine = make_cache(model, config)
    assert compress.nbytes(model, mine) == 0
    for part in (ids(100, batch=2), *np.split(ids(20, 1, batch=2), 20, axis=1)):
        run(model, part, mine)
    want = sum(a.nbytes for g in groups(mine) for j in range(len(g.layers)) for a in g.arrays(j))
    assert compress.nbytes(model, mine) == want > 0
    if host == "torch":
        assert storage_bytes(mine) == want == mine.nbytes
        for n in (3, 30, 60, 20):  # what is left after a trim holds no more than it needs, either
            trim(mine, n)
            assert storage_bytes(mine) == mine.nbytes
    else:
        assert want == sum(a.nbytes for c in mine for a in c.state if hasattr(a, "nbytes"))


@HOSTS
def test_bytes_by_hand(host):
    """2 sequences of 106 tokens: 2 sinks, 96 in the middle, 8 in the tail; 4-bit latents, scales for every 8 tokens."""
    model = small(host)
    mine = make_cache(model, XKVConfig(group=2, rank_keys=10, rank_values=20, bits=4, **SMALL))
    run(model, ids(106, batch=2), mine)
    exact = 4 * 2 * (2 * 2) * (2 + 8) * 16 * 4  # layers, keys and values, batch and heads, tokens, head dim, float32
    rank = 10 + 20
    codes, scales, bases = 2 * 96 * rank // 2, 2 * 96 // 8 * rank * 4, 2 * 2 * WIDTH * rank * 2
    assert middle(mine) == [96, 96]
    assert compress.nbytes(model, mine) == exact + 2 * (codes + scales + bases)
    members = held(mine)
    assert [m.shared_basis_bytes for m in members] == [bases, 0, bases, 0]
    assert sum(m.compressed_key_bytes + m.compressed_value_bytes for m in members) == 2 * (codes + scales)
    assert {m.fp16_key_bytes for m in members} == {m.value_fp16_bytes for m in members} == {2 * 2 * 106 * 16 * 2}
    stacked = make_cache(model, XKVConfig("features", group=4, rank_keys=8, rank_values=8, bits=4, **SMALL))
    run(model, ids(106), stacked)
    assert len({m.compressed_key_bytes for m in held(stacked)}) == 1
    assert held(stacked)[2].compressed_key_bytes == 2 * 96 * 8 // 2 + 2 * 96 // 8 * 8 * 4


@HOSTS
@pytest.mark.parametrize("ratio", [3, 6, 12])
@pytest.mark.parametrize("basis", ["tokens", "features"])
def test_the_ratio_is_reached_by_the_bytes_that_are_held(host, ratio, basis):
    """Basis, codes and scales of the middle against 2 bytes an entry; never more, and hardly less than asked."""
    model = small(host)
    config = XKVConfig(basis, ratio=ratio, group=4, **{**SMALL, "block": 32, "first": 256, "tail": 0})
    mine = make_cache(model, config)
    run(model, ids(322), mine)
    (group,) = groups(mine)
    packed = sum(p.nbytes for s in group.middle for side in s.packed for p in side)
    fp16 = 2 * 2 * 4 * WIDTH * 320
    assert middle(mine) == [320] and group.basis_bytes > 0
    least = 0.85 if basis == "tokens" else 0.65  # whole bytes per token and head are 10 % of so few latents
    assert least * fp16 / ratio <= packed + group.basis_bytes <= fp16 / ratio


@HOSTS
def test_a_ratio_out_of_reach_says_the_best_there_is(host):
    import re

    model = small(host)
    big = {"group": 4, **SMALL, "first": 64}
    with pytest.raises(BadInput, match="ratio of 500 cannot be reached.*these 64 tokens; at most") as e:
        run(model, ids(71), make_cache(model, XKVConfig(ratio=500, **big)))
    most = float(re.search(r"at most ([\d.]+)", str(e.value))[1])
    mine = make_cache(model, XKVConfig(ratio=most * 0.99, **big))
    run(model, ids(71), mine)
    (group,) = groups(mine)
    packed = sum(p.nbytes for s in group.middle for side in s.packed for p in side) + group.basis_bytes
    assert packed <= 2 * 2 * 4 * WIDTH * 64 / (0.99 * most)
    with pytest.raises(BadInput, match="cannot be reached"):
        run(model, ids(71), make_cache(model, XKVConfig(ratio=most * 1.01, **big)))
    for bits in (8, 2):  # bits that are given count as such
        with pytest.raises(BadInput, match="at most") as e:
            run(model, ids(71), make_cache(model, XKVConfig(ratio=500, bits=bits, **big)))
        most = float(re.search(r"at most ([\d.]+)", str(e.value))[1])
        mine = make_cache(model, XKVConfig(ratio=most * 0.99, bits=bits, **big))
        run(model, ids(71), mine)
        packed = sum(p.nbytes for s in groups(mine)[0].middle for side in s.packed for p in side)
        assert packed + groups(mine)[0].basis_bytes <= 2 * 2 * 4 * WIDTH * 64 / (most * 0.99)
    mine = make_cache(model, XKVConfig(ratio=5, bits=8, **big))
    run(model, ids(71), mine)
    packed = sum(p.nbytes for s in groups(mine)[0].middle for side in s.packed for p in side)
    assert packed + groups(mine)[0].basis_bytes <= 2 * 2 * 4 * WIDTH * 64 / 5


@HOSTS
def test_uncompressed_arrays_are_let_go(host, monkeypatch):
    """The tensors that the model handed over die with the call; torch shows it, MLX's allocator counts it."""
    model = small(host)
    mine = make_cache(model, XKVConfig(group=2, bits=4, **SMALL))
    if host == "torch":
        from crosskv.latent import Group

        seen, plain = [], Group.append

        def watched(self, j, keys, values, positions):
            seen.extend(weakref.ref(x) for x in (keys, values))
            return plain(self, j, keys, values, positions)

        monkeypatch.setattr(Group, "append", watched)
        run(model, ids(100), mine)
        gc.collect()
        assert len(seen) == 8 and all(r() is None for r in seen)
        return
    import mlx.core as mx

    model = mlx("qwen3", num_key_value_heads=4, head_dim=64, max_position_embeddings=4096)
    config = XKVConfig(group=2, rank_keys=64, rank_values=64, bits=4, tail=64, block=64)
    run(model, ids(40), make_cache(model, config))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mine = make_cache(model, config)
    run(model, ids(900), mine)
    mx.eval([c.state for c in mine])
    gc.collect()
    held_, said = mx.get_active_memory() - before, compress.nbytes(model, mine)
    assert said <= held_ + 4096 and held_ <= 1.05 * said + 256 * 1024
    assert said < 0.35 * 900 * 4 * 4 * 2 * 64 * 4


def test_a_tail_is_no_view_of_what_the_model_made():
    """Queries, keys and values may come out of one product: a slice would keep all of it."""
    import torch

    model = small("torch")
    mine = make_cache(model, XKVConfig(sinks=0, tail=40))
    big = [torch.zeros(1, 2, 5, 80)[..., :16] for _ in "kv"]
    for m in held(mine):
        m.append(*big)
    assert storage_bytes(mine) == mine.nbytes == 4 * 2 * 2 * 5 * 16 * 4


# ---- trim ----

# 77 tokens: 2 sinks, 64 in the middle, 11 in the tail (5 and up to 7 more)
PLACES = {"tail": 4, "border": 11, "within a block": 20, "at a block": 27, "almost all of the middle": 73,
          "border of the sinks": 75, "sinks": 76, "all": 77, "more than all": 90, "none": 0}  # fmt: skip


@HOSTS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", [FULL, EIGHT], ids=["full", "8 bits"])
def test_trim_anywhere_and_go_on(host, place, config):
    """As the host's own cache does it; the tokens that stay read as they did before."""
    model, n = small(host), PLACES[place]
    b = backends.of(model)
    mine, own = make_cache(model, config), new(model)
    for c in (mine, own):
        run(model, ids(77), c)
    before = {i: [b.to_numpy(x) for x in kv] for i, kv in b.read(model, mine).items()}
    for c in (mine, own):
        if place == "more than all":
            [x.trim(n) for x in c] if host == "mlx" else trim(c, 77 if c is own else n)
        elif n:
            trim(c, n)
    keep = max(0, 77 - n)
    assert length(mine) == keep == length(own)
    if keep:
        for i, kv in b.read(model, mine).items():
            for x, want in zip(kv, before[i], strict=True):
                np.testing.assert_allclose(b.to_numpy(x), want[:, :, :keep], atol=1e-5 * abs(want).max())
    else:
        assert compress.nbytes(model, mine) == 0
        own = new(model)
    for seed in (1, 2, 3):
        part = ids(40 if seed == 2 else 3, seed)
        got, want = run(model, part, mine), run(model, part, own)
        same(got, want) if config is FULL else close(got, want, 0.3)
    assert length(mine) == keep + 46


@HOSTS
def test_trim_cuts_a_scale_group_as_two_lines_of_numpy_do(host):
    """8-bit latents, a scale for 8 tokens: 20 off 77 leaves 6 blocks packed, and 7 tokens, as read, in the tail."""
    model = small(host)
    mine = make_cache(model, EIGHT)
    run(model, ids(77), mine)
    trim(mine, 20)
    for g in groups(mine):
        assert g.packed_tokens == 48 and [x[0].shape[2] for x in g.tails] == [7, 7]
    again = copy.deepcopy(mine)
    trim(again, 7)  # at the border of a block: nothing left over
    assert middle(again) == [48, 48] and groups(again)[0].tails == [None, None]


@HOSTS
def test_trim_through_several_segments(host):
    """Chunks of 32 tokens and more have bases of their own; a trim drops whole segments and cuts one."""
    model = small(host)
    config = XKVConfig("features", group=2, **SMALL)
    mine, own = make_cache(model, config), new(model)
    for part in np.split(ids(160), [50, 100], axis=1):
        for c in (mine, own):
            run(model, part, c)
    segments = len(groups(mine)[0].middle)
    assert segments == 3
    for n, left in ((40, 3), (50, 2), (40, 1)):
        for c in (mine, own):
            trim(c, n)
        assert len(groups(mine)[0].middle) <= left and length(mine) == length(own)
        forks = copy.deepcopy(mine), copy.deepcopy(own)
        for seed in (1, 2):
            same(run(model, ids(20, seed), forks[0]), run(model, ids(20, seed), forks[1]))


# ---- copies, rows, resets ----


@HOSTS
@pytest.mark.parametrize("config", [FULL, EIGHT], ids=["full", "8 bits"])
def test_copies_go_on_differently(host, config):
    model = small(host)
    check = same if config is FULL else (lambda a, b: close(a, b, 0.3))
    mine, own = make_cache(model, config), new(model)
    for c in (mine, own):
        run(model, ids(80), c)
    fork, own2 = copy.deepcopy(mine), copy.deepcopy(own)
    assert not {id(g) for g in groups(fork)} & {id(g) for g in groups(mine)} and len(groups(fork)) == len(groups(mine))
    for seed in (1, 2):
        check(run(model, ids(30, seed), mine), run(model, ids(30, seed), own))
        check(run(model, ids(9, 10 + seed), fork), run(model, ids(9, 10 + seed), own2))
    trim(mine, 70)
    check(run(model, ids(5, 8), fork), run(model, ids(5, 8), own2))
    assert (length(mine), length(fork)) == (70, 103)


@HOSTS
@pytest.mark.parametrize("config", [FULL, EIGHT], ids=["full", "8 bits"])
def test_rows_are_reordered_once_per_group(host, config):
    """A cycle of three rows: applied once per layer instead of once per group it would be wrong."""
    model = small(host)
    mine, own = make_cache(model, config), new(model)
    tokens, rows = ids(80, batch=3), [2, 0, 1]
    run(model, tokens, mine)
    run(model, tokens[rows], own)
    select(mine, rows)
    check = same if config is FULL else (lambda a, b: close(a, b, 0.3))
    check(run(model, ids(2, 5, batch=3), mine), run(model, ids(2, 5, batch=3), own))
    select(mine, [1, 1])
    select(own, [1, 1]) if host == "torch" else None
    if host == "torch":
        check(run(model, ids(30, 6, batch=2), mine), run(model, ids(30, 6, batch=2), own))


def test_transformers_ways_to_change_the_batch():
    import torch

    model = small("torch")
    mine, own = make_cache(model, FULL), new(model)
    for c in (mine, own):
        run(model, ids(50, batch=2), c)
        c.batch_repeat_interleave(3)
        c.batch_select_indices(torch.tensor([0, 5, 2, 3]))
        c.reorder_cache(torch.tensor([3, 3, 0, 1]))
    for seed in (5, 6):
        same(run(model, ids(20, seed, batch=4), mine), run(model, ids(20, seed, batch=4), own))


@pytest.mark.parametrize("n", [30, 70])
def test_beams(n):
    model = small("torch")
    want = generate(model, ids(n), new(model), num_beams=3)
    for config in (FULL, EXACT[0].values[0]):
        mine = make_cache(model, config)
        assert generate(model, ids(n), mine, num_beams=3) == want
        assert min(middle(mine)) > 0


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_speculative_decoding_rolls_back(kind):
    model, prompt = small("torch"), np.tile(ids(12), (1, 5))
    more = {"prompt_lookup_num_tokens": 4} if kind == "prompt lookup" else {"assistant_model": small("torch", 2, 3)}
    for config in (FULL, XKVConfig("features", group=4, **{**SMALL, "tail": 0, "sinks": 0, "block": 1})):
        mine = make_cache(model, config)
        assert generate(model, prompt, mine, **more)[0] == generate(model, prompt, new(model))[0]
        assert mine.get_seq_length() == 60 + 23 and min(middle(mine)) > 0


def test_mlx_speculative_decoding_rolls_back():
    import mlx.core as mx
    from mlx_lm.generate import speculative_generate_step

    model, draft = small("mlx"), small("mlx", layers=2, seed=5)
    caches = make_cache(model, FULL) + make_cache(draft, FULL)
    steps = speculative_generate_step(
        mx.array(ids(60)[0]), model, draft, num_draft_tokens=3, max_tokens=20, prompt_cache=caches
    )
    assert [int(t) for t, *_ in steps] == greedy(model, ids(60), None, 20)


def test_offload_and_prefetch():
    model = small("torch")
    mine, own = make_cache(model, EIGHT), make_cache(model, EIGHT)
    for c in (mine, own):
        run(model, ids(80), c)
    for layer in mine.layers:
        layer.offload()
    for layer in mine.layers:
        layer.prefetch()
    np.testing.assert_array_equal(run(model, ids(3, 1), mine), run(model, ids(3, 1), own))


@HOSTS
def test_a_second_prompt_after_reset(host):
    model = small(host)
    mine, fresh = make_cache(model, EIGHT), make_cache(model, EIGHT)
    run(model, ids(90), mine)
    if host == "torch":
        mine.reset()
    else:
        for c in mine:
            c.held = c.held.clear()
    assert length(mine) == 0 == compress.nbytes(model, mine)
    for part in (ids(80, 7, batch=2), ids(2, 8, batch=2)):  # of another batch size
        np.testing.assert_array_equal(run(model, part, mine), run(model, part, fresh))


@HOSTS
def test_a_cache_that_is_there_already(host):
    """The host's own, prefilled, becomes compressed; it stays as it was."""
    model = small(host)
    own, read = new(model), make_cache(model, EIGHT)
    for c in (own, read):
        run(model, ids(90, batch=2), c)
    mine = make_cache(model, EIGHT, own)
    assert length(mine) == length(own) == 90 and compress.nbytes(model, mine) == compress.nbytes(model, read)
    step = ids(3, 1, batch=2)
    same(run(model, step, mine), run(model, step, read))
    assert length(own) == 90


# ---- positions ----


def positioned(model, tokens, cache, positions, mask=None):
    import torch

    more = {} if mask is None else {"attention_mask": torch.as_tensor(mask)}
    with torch.no_grad():
        return model(
            torch.as_tensor(tokens), past_key_values=cache, position_ids=torch.as_tensor(positions), **more
        ).logits.numpy()


@pytest.mark.parametrize("config", [FULL, XKVConfig(group=2, rank_keys=12, rank_values=12, **SMALL)])
def test_a_cache_that_does_not_start_at_position_0(config):
    """Keys are un-rotated from where they stand: the same basis and the same logits as from position 0, for RoPE knows
    distances only. With the positions taken for 0, 1, ... they would differ: the second check."""
    model = small("torch")
    prompt, more = ids(80), ids(3, 1)
    far, near = make_cache(model, config), make_cache(model, config)
    for c, at in ((far, 100), (near, 0)):
        positioned(model, prompt, c, np.arange(80)[None] + at)
    got = positioned(model, more, far, np.arange(80, 83)[None] + 100)
    want = positioned(model, more, near, np.arange(80, 83)[None])
    np.testing.assert_allclose(got, want, atol=0.01 * want.std())
    assert float(groups(far)[0].start[0, 0]) == 100 and groups(near)[0].start is None
    rotated = [g.middle[0].sides[0].basis for g in groups(far)]
    for a, b in zip(rotated, (g.middle[0].sides[0].basis for g in groups(near)), strict=True):
        a, b = (x.vectors.numpy()[0].astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a @ a.T, b @ b.T, atol=0.01)


@pytest.mark.parametrize("basis", ["tokens", "features"])
def test_left_padding(basis):
    """Rows of a padded batch against the host's own cache, and positions that start below 0."""
    model = small("torch")
    tokens, mask = ids(90, batch=2), np.ones((2, 90), np.int64)
    tokens[0, :17], mask[0, :17] = 0, 0
    config = XKVConfig(basis, group=1, **SMALL)
    assert generate(model, tokens, make_cache(model, config), mask) == generate(model, tokens, new(model), mask)
    mine, own = make_cache(model, config), new(model)
    longer = np.concatenate([mask, np.ones((2, 1), np.int64)], 1)
    for c in (mine, own):
        run(model, tokens, c, mask=mask)
    same(run(model, ids(1, 5, batch=2), mine, mask=longer), run(model, ids(1, 5, batch=2), own, mask=longer))
    (group, *_) = groups(mine)
    assert group.start.ravel().tolist() == [-17, 0]
    assert group.sinks[0][0].shape[2] == 2 + 17  # every row has its first two tokens exact


def test_padding_is_forgotten_with_the_tokens():
    model = small("torch")
    tokens, mask = ids(60, batch=2), np.ones((2, 60), np.int64)
    tokens[0, :17], mask[0, :17] = 0, 0
    mine = make_cache(model, FULL)
    run(model, tokens, mine, mask=mask)
    mine.crop(-60)
    same(run(model, ids(50, 2, batch=2), mine), run(model, ids(50, 2, batch=2), new(model)))
    assert groups(mine)[0].start is None


def test_padded_rows_reorder_with_their_positions():
    model = small("torch")
    tokens, mask = ids(90, batch=2), np.ones((2, 90), np.int64)
    tokens[0, :17], mask[0, :17] = 0, 0
    mine, own = make_cache(model, FULL), new(model)
    rows = [1, 0, 0]
    longer = np.concatenate([mask[rows], np.ones((3, 20), np.int64)], 1)
    for c in (mine, own):
        run(model, tokens, c, mask=mask)
        select(c, rows)
    same(run(model, ids(20, 5, batch=3), mine, mask=longer), run(model, ids(20, 5, batch=3), own, mask=longer))
    assert groups(mine)[0].start.ravel().tolist() == [0, -17, -17]


# ---- mishaps ----


@HOSTS
def test_an_interrupted_call_is_noticed(host):
    """Only the first layers got their tokens: within a group, and between two groups."""
    model = small(host)
    for layer in (1, 2, 3):
        mine = make_cache(model, FULL)
        run(model, ids(50), mine)
        stop = held(mine)[layer]
        kind = type(stop)

        def broken(self, *_, **__):
            raise KeyboardInterrupt

        changed = SimpleNamespace(plain=kind.append)

        def append(self, *args, stop=stop, changed=changed, **more):
            return broken(self) if self == stop else changed.plain(self, *args, **more)

        kind.append = append
        try:
            with pytest.raises(KeyboardInterrupt):
                run(model, ids(1, 2), mine)
        finally:
            kind.append = changed.plain
        for _ in range(2):  # and it stays so
            with pytest.raises(BadInput, match="share one compressed cache, but.*after an interrupted call make a new"):
                run(model, ids(1, 2), mine)


@HOSTS
def test_layers_that_are_asked_different_things_are_noticed(host):
    model = small(host)

    def ask(member, n):
        member.trim(n)

    mine = make_cache(model, FULL)
    run(model, ids(50), mine)
    one, two, *_ = held(mine)
    ask(one, 1)
    with pytest.raises(BadInput, match=r"Layers \[0, 1\] share one.*but layer 1 is asked to trim.*another was to trim"):
        ask(two, 2)
    with pytest.raises(BadInput, match="not every layer was asked to trim"):
        run(model, ids(1, 1), mine)
    ask(two, 1)
    with pytest.raises(BadInput, match="share one compressed cache, but"):  # the other group still has all
        run(model, ids(1, 1), mine)
    for m in held(mine)[2:]:
        ask(m, 1)
    run(model, ids(1, 1), mine)
    one.trim(3)
    with pytest.raises(BadInput, match="asked to reorder, another was to trim"):
        two.map(lambda x: x)
    with pytest.raises(BadInput, match="layer 0 is asked to trim while others lag behind"):
        one.trim(3)
    with pytest.raises(BadInput, match="Cannot trim -1 tokens"):
        one.trim(-1)


@HOSTS
def test_a_trim_of_more_than_is_left_is_the_same_for_every_layer(host):
    """40 of 50, then 40 of the 10 that are left: each layer is asked after the first has already done it."""
    model = small(host)
    mine, own = make_cache(model, FULL), new(model)
    for c in (mine, own):
        run(model, ids(50), c)
        trim(c, 40)
    assert length(mine) == length(own) == 10
    same(run(model, ids(3, 1), mine), run(model, ids(3, 1), own))
    trim(mine, 13)
    assert length(mine) == 0
    same(run(model, ids(60, 2), mine), run(model, ids(60, 2), new(model)))


@HOSTS
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_named_with_its_layer_and_the_tokens_stay(host, what, bad):
    model = small(host)
    b = backends.of(model)
    mine = make_cache(model, XKVConfig(group=2, bits=4, rank_keys=16, rank_values=16, **SMALL))
    members = held(mine)
    rng = np.random.default_rng(0)
    kv = [[b.from_numpy(rng.standard_normal((1, 2, 60, 16)).astype(np.float32)) for _ in "kv"] for _ in "ab"]
    wrong = b.to_numpy(kv[1][what == "values"]).copy()
    wrong[0, 1, 30, 3] = bad
    kv[1][what == "values"] = b.from_numpy(wrong)
    for j in (0, 1, 2):
        members[j].append(*kv[0])
    with pytest.raises(BadInput, match=f"the {what} of layer 3 hold NaN or Inf"):
        members[3].append(*kv[1])
    assert members[2].length == members[3].length == 60  # no token twice
    for x, want in zip(members[2].read(), kv[0], strict=True):
        np.testing.assert_array_equal(b.to_numpy(x), b.to_numpy(want))


@HOSTS
def test_wrong_shapes_are_refused(host):
    model = small(host)
    mine = make_cache(model, FULL)
    run(model, ids(50, batch=2), mine)
    with pytest.raises(BadInput, match=r"holds \(2, 2, 2, 16\).*the new tokens are \(1, 2, 1, 16\)"):
        run(model, ids(1, 1), mine)
    with pytest.raises(BadInput, match="keys and values .* of the same shape"):
        held(mine)[0].append(
            *(backends.of(model).from_numpy(np.zeros(s, np.float32)) for s in ((2, 2, 1, 16), (2, 2, 2, 16)))
        )
    with pytest.raises(BadInput, match="one by one.*crosskv.park and crosskv.resume"):
        held(mine)[0].restore([])


# ---- other models ----


@pytest.mark.parametrize(("host", "kind"), [("torch", "Gemma2"), ("mlx", "gemma3_text")])
def test_sliding_windows_keep_the_hosts_own_layers(host, kind):
    if host == "torch":
        model = hf(kind, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
                   query_pre_attn_scalar=16)  # fmt: skip
    else:
        model = mlx(kind, sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16)
    mine, own = make_cache(model, XKVConfig("features", group=2, **SMALL)), new(model)
    layers = getattr(mine, "layers", mine)
    assert [hasattr(x, "held") for x in layers] == [False, True] * 2
    assert [g.layers for g in groups(mine)] == [(1, 3)]
    for part in (ids(60), *np.split(ids(12, 1), 12, axis=1), ids(5, 2)):
        same(run(model, part, mine), run(model, part, own))
    assert middle(mine)[0] >= 56


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_a_rope_that_scales(host):
    """llama3 and yarn (whose attention factor is inside the tables): un-rotate and rotate are inverses there, too."""
    from conftest import LLAMA3, YARN

    for scaling in (LLAMA3, YARN):
        if host == "torch":
            model = hf("Llama", rope_parameters=scaling)
        else:
            theta = scaling["rope_theta"]
            model = mlx("llama", rope_scaling={k: v for k, v in scaling.items() if k != "rope_theta"}, rope_theta=theta)
        mine, own = make_cache(model, FULL), new(model)
        for part in (ids(90), ids(4, 1)):
            same(run(model, part, mine), run(model, part, own))


def test_a_rope_that_changes_with_the_length_is_refused():
    model = hf("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(MatchedKVError, match="RoPE changes with the length"):
        make_cache(model, FULL)


# ---- options ----


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rattio": 4}, "XKVConfig has no field 'rattio'; did you mean 'ratio'?"),
        ({"rank": 4}, "XKVConfig has no field 'rank'; did you mean 'rank_keys'"),
        ({"xyzzy": 1}, "has no field 'xyzzy'; there are basis, ratio, group"),
        ({"sinks": -1}, "sinks must be an integer of at least 0, got -1"),
        ({"tail": 1.5}, "tail must be an integer of at least 0, got 1.5"),
        ({"block": 0}, "block must be an integer of at least 1, got 0"),
        ({"first": True}, "first must be an integer of at least 1, got True"),
        ({"group": 0}, "group must be a number of layers, at least 1, or 'all'; got 0"),
        ({"group": "some"}, "group must be .* got 'some'"),
        ({"group": True}, "group must be .* got True"),
        ({"group": 2.0}, "group must be .* got 2.0"),
        ({"energy": 0}, "energy must be above 0 and at most 1, got 0"),
        ({"energy": 1.1}, "energy must be"),
        ({"energy": float("nan")}, "energy must be"),
        ({"energy": "0.9"}, "energy must be"),
        ({"ratio": 1}, "ratio must be above 1, got 1"),
        ({"ratio": "4"}, "ratio must be above 1, got '4'"),
        ({"ratio": float("nan")}, "ratio must be above 1"),
        ({"ratio": 4, "rank_keys": 3}, "ratio sets ranks by itself; leave rank_keys out"),
        ({"ratio": 4, "energy": 0.9}, "leave energy out"),
        ({"ratio": 4, "bits": (4, 2)}, "bits"),
        ({"rank_keys": 0}, "rank_keys must be an integer"),
        ({"rank_keys": -3}, "rank_keys must be an integer"),
        ({"rank_values": 2.5}, "rank_values must be an integer"),
        ({"rank_values": True}, "rank_values must be an integer"),
        ({"values": False, "rank_values": 3}, "rank_values"),
        ({"bits": 7}, r"bits must be of \[1, 2, 3, 4, 5, 6, 8\].* got 7"),
        ({"bits": 0}, "bits must be of"),
        ({"bits": (8, 7)}, "bits must be of.* got 7"),
        ({"bits": "4"}, "bits must be of"),
        ({"bits": 2.5}, "bits must be of"),
        ({"bits": ()}, "bits"),
        ({"bits": (0, 0)}, "bits"),
        ({"bits": (4, 8)}, "bits"),
        ({"bits": (8, 0, 4)}, "bits"),
        ({"exact": "int8"}, "exact must be float16, bfloat16, float32 or None, got 'int8'"),
        ({"basis": 3}, "basis must be a Calibrated, its directory, 'tokens' or 'features'; got 3"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong, says):
    with pytest.raises(BadInput, match=says):
        XKVConfig(**wrong)


@HOSTS
def test_ranks_that_the_model_does_not_have_are_refused_at_once(host):
    model = small(host)
    with pytest.raises(BadInput, match="rank_keys must be an integer from 1 to 64, got 65"):
        make_cache(model, XKVConfig(group=2, rank_keys=65))
    with pytest.raises(BadInput, match="rank_values must be an integer from 1 to 16, got 17"):
        make_cache(model, XKVConfig("features", rank_values=17))
    make_cache(model, XKVConfig(group=3, rank_keys=96))
    make_cache(model, XKVConfig("features", rank_values=16))


@HOSTS
def test_more_bits_shares_than_latents_and_one_latent(host):
    model = small(host)
    few, fewer = {"rank_keys": 2, "rank_values": 3, "bits": (8, 4, 2, 0)}, {"rank_keys": 1, "rank_values": 1, "bits": 4}
    for options in (few, fewer, {"energy": 1e-6, "bits": 2}):
        mine = make_cache(model, XKVConfig(group=2, **SMALL, **options))
        for part in (ids(60), ids(20, 1)):
            assert np.isfinite(run(model, part, mine)).all()


def test_a_basis_of_another_kind_of_model_is_not_taken_for_a_path(tmp_path):
    from crosskv.errors import BadArtifact

    with pytest.raises(BadArtifact, match="not a readable calibrated basis"):
        XKVConfig(tmp_path)
    assert issubclass(MatchedKVError, IncompatibleModels)
