"""Packed caches in mlx-lm's batches and in its cache files.

Oracles: mlx-lm's own KVCache and BatchKVCache on the same model; a sequence on its own, outside of any batch.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import mlx, small
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as theirs

from crosskv import IntConfig, XKVConfig, backends, compress, make_cache
from crosskv.backends.mlx import HeldBatchCache, HeldKVCache
from crosskv.errors import BadInput
from crosskv.layout import EPS
from crosskv.store import Store

ALL_TAIL = IntConfig(2, 2, group=8, tail=1000)
FOUR = IntConfig(4, 4, group=8, sinks=2, tail=4)
FULL_RANK = XKVConfig(group=2, sinks=2, tail=4, block=8, first=64)  # 64 features: as many tokens span all of them
RANK = XKVConfig(group=2, sinks=2, tail=4, block=8, first=16, rank_keys=12, rank_values=12, bits=4)
KEYS_ONLY = XKVConfig("features", group="all", sinks=0, tail=0, block=4, first=8, rank_keys=6, values=False)
PACKED = pytest.mark.parametrize("config", [FOUR, RANK, KEYS_ONLY], ids=["int", "rank", "keys"])
TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=str)
LENGTHS = (3, 40, 1, 27)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(1, 128, n).tolist()


PROMPTS = [ids(n, seed) for seed, n in enumerate(LENGTHS)]


@pytest.fixture
def model():
    return small("mlx", layers=4)


def batch(model, config, prompts=PROMPTS, steps=6, caches=None, **more):
    """Tokens and their log-probabilities [rows, steps] by batch_generate, with `config` for those without a cache."""
    if config is not None:
        model.make_cache = lambda: make_cache(model, config)
    try:
        return mlx_lm.batch_generate(
            model, TOKENIZER, prompts, caches, max_tokens=steps, return_token_ids=True, return_logprobs=True, **more
        )
    finally:
        if config is not None:
            del model.make_cache


def alone(model, prompt, steps, cache, **more):
    """The same for one sequence by generate_step, without any batch."""
    got = list(generate_step(mx.array(prompt), model, max_tokens=steps, prompt_cache=cache, **more))
    return [int(t) for t, _ in got], [float(p[int(t)]) for t, p in got]


def run(model, tokens, cache):
    out = model(mx.array(tokens), cache=cache)
    mx.eval(out, [c.state for c in cache])
    return np.array(out)


def same(got, want, share):
    """Within a share of the largest that is wanted."""
    np.testing.assert_allclose(got, want, atol=share * max(1.0, np.abs(want).max(initial=0)), rtol=0)


# ---- against the host's own batches ----


@pytest.mark.parametrize("config", [ALL_TAIL, FULL_RANK], ids=["tail", "full rank"])
@pytest.mark.parametrize("more", [{}, {"prefill_step_size": 16}, {"prefill_batch_size": 2, "completion_batch_size": 3}])
def test_what_loses_nothing_generates_what_the_hosts_own_caches_do(model, config, more):
    prompts = [ids(n, seed) for seed, n in enumerate((3, 90, 1, 77))]
    got, want = batch(model, config, prompts, **more), batch(model, None, prompts, **more)
    assert got.token_ids == want.token_ids
    same(got.logprobs, want.logprobs, 64 * EPS["float32"])


def test_left_padding_announced_by_prepare_is_never_kept(model):
    padding, tokens = [5, 0, 11], np.random.default_rng(0).integers(1, 128, (3, 30))
    mine = [c.merge([c] * 3) for c in make_cache(model, ALL_TAIL)]
    own = [c.merge([c] * 3) for c in theirs.make_prompt_cache(model)]
    for c in mine + own:
        c.prepare(left_padding=padding)
    for start, stop in ((0, 4), (4, 20), (20, 21), (21, 30)):
        assert mine[0].offset.tolist() == own[0].offset.tolist()
        got, want = (run(model, tokens[:, start:stop], c) for c in (mine, own))
        for row, p in enumerate(padding):
            real = slice(max(0, p - start), None)
            same(got[row, real], want[row, real], 64 * EPS["float32"])
    assert mine[0].lengths == [25, 30, 19]


def test_windows_that_slide_are_batched_by_the_host():
    model = mlx("gemma3_text", sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16)
    want = batch(model, None)
    caches = [make_cache(model, ALL_TAIL) for _ in PROMPTS]
    got = batch(model, None, caches=caches, return_prompt_caches=True)
    assert [type(c).__name__ for c in got.caches[0]] == ["RotatingKVCache", "HeldKVCache"] * 2
    assert got.token_ids == want.token_ids
    same(got.logprobs, want.logprobs, 64 * EPS["float32"])


# ---- each row as if it were alone ----


@PACKED
def test_what_a_row_attends_to_is_bit_for_bit_what_it_would_be_alone(model, config):
    """Random keys and values straight into the caches: right padding in chunks, decoding, rows out and in."""
    rng = np.random.default_rng(3)
    single = [make_cache(model, config) for _ in LENGTHS]
    mine = [c.merge([s[i] for s in single]) for i, c in enumerate(single[0])]

    def step(n, take):
        """n columns of noise, of which row i has take[i] tokens."""
        for i, c in enumerate(mine):
            k, v = (mx.array(rng.standard_normal((len(take), 2, n, 16)).astype(np.float32)) for _ in "kv")
            before = c.lengths
            offset, mask = c.offset.tolist(), np.array(c.make_mask(n))
            got = c.update_and_fetch(k, v)
            assert {x.shape[2] for x in got} == {max(before) + n} and mask.shape[-2:] == (n, max(before) + n)
            for row, t in enumerate(take):
                if not t:
                    continue
                assert offset[row] == single[row][i].offset
                want = single[row][i].update_and_fetch(k[row : row + 1, :, :t], v[row : row + 1, :, :t])
                first = max(before) - before[row]
                for x, y in zip(got, want, strict=True):
                    np.testing.assert_array_equal(x[row : row + 1, :, first : first + before[row] + t], y)
                seen = np.arange(max(before) + n)
                for q in range(t):
                    np.testing.assert_array_equal(
                        mask.reshape(-1, *mask.shape[-2:])[row if mask.ndim == 4 else 0, q],
                        (seen >= first) & (seen <= max(before) + q),
                    )
            assert c.lengths == [s[i].offset for s in single]

    for lengths in (LENGTHS, (0, 9, 30, 1)):
        for c in mine:
            c.prepare(lengths=list(lengths), right_padding=[max(lengths) - n for n in lengths])
        for start in range(0, max(lengths), 16):
            n = min(16, max(lengths) - start)
            step(n, [min(n, max(0, t - start)) for t in lengths])
        for c in mine:
            c.finalize()
        step(1, [1] * 4)
    for c in mine:
        c.filter([3, 0])
    single = [single[3], single[0]]
    step(1, [1] * 2)
    more = make_cache(model, config)
    for c, m in zip(mine, more, strict=True):
        c.extend(m.merge([m]))
    single.append(more)
    for c in mine:
        c.prepare(lengths=[1, 1, 20], right_padding=[19, 19, 0])
    step(20, [1, 1, 20])
    for c in mine:
        c.finalize()
    assert [c.trim(7) for c in mine] == [max(s[0].offset for s in single) and 7] * 4
    for s in single:
        assert theirs.trim_prompt_cache(s, 7) == 7
    step(1, [1] * 3)
    assert sum(c.nbytes for c in mine) == sum(compress.nbytes(model, s) for s in single)


@PACKED
def test_rows_of_batch_generate_are_the_rows_alone(model, config):
    """Also in the caches that come back: they go on as the single ones do."""
    out = batch(model, config, return_prompt_caches=True)
    for prompt, tokens, logprobs, cache in zip(PROMPTS, out.token_ids, out.logprobs, out.caches, strict=True):
        own = make_cache(model, config)
        want = alone(model, prompt, 6, own)
        assert tokens == want[0]
        same(logprobs, want[1], 0.02)  # a code at a tie may round apart
        for c in (own, cache):  # the two generators run ahead by different numbers of tokens
            theirs.trim_prompt_cache(c, c[0].offset - len(prompt) - 5)
        got, want = (alone(model, ids(30, 9), 4, c) for c in (cache, own))
        assert got[0] == want[0]
        same(got[1], want[1], 0.02)


@PACKED
def test_caches_made_before_serve_several_prompts_and_stay_as_they_were(model, config):
    """One for two prompts, a copy of it for the other, and an empty one: what follows is what follows each alone."""
    shared = make_cache(model, config)
    run(model, [ids(37, 5)], shared)
    state = copy.deepcopy(shared)
    caches = [shared, shared, make_cache(model, config), copy.deepcopy(shared)]
    out = batch(model, None, caches=caches)
    for i, (tokens, logprobs) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        own = make_cache(model, config) if i == 2 else copy.deepcopy(state)
        want = alone(model, PROMPTS[i], 6, own)
        assert tokens == want[0]
        same(logprobs, want[1], 0.02)
    assert [c.offset for c in shared] == [37] * 4 and caches[2][0].empty()
    np.testing.assert_array_equal(run(model, [ids(5)], shared), run(model, [ids(5)], state))


@pytest.mark.parametrize("config", [FOUR, RANK], ids=["int", "rank"])
def test_prompts_come_and_go_while_others_are_decoded(model, config):
    model.make_cache = lambda: make_cache(model, config)
    gen = BatchGenerator(model, max_tokens=14, prefill_step_size=8)
    first = gen.insert(PROMPTS[:2])
    tokens = {}

    def steps(n):
        for _ in range(n):
            for r in gen.next()[1]:
                tokens.setdefault(r.uid, []).append(r.token)

    steps(9)  # the second prompt is still being read, or has just begun
    (middle,) = gen.extract_cache(first[:1]).values()
    middle, before = (middle[0], middle[1][:]), middle[0][0].offset  # the tokens are a list that grows
    second = gen.insert(PROMPTS[2:], max_tokens=[5, 14])
    steps(4)
    gen.remove(first[:1])
    steps(30)
    gen.close()
    assert middle[0][0].offset == before == len(middle[1])
    for uid, prompt, n in zip(first + second, PROMPTS, (14, 14, 5, 14), strict=True):
        want = alone(model, prompt, 14, make_cache(model, config), prefill_step_size=8)[0]
        assert tokens[uid] == want[: len(tokens[uid])] and (len(tokens[uid]) == n) == (uid != first[0])
    want = make_cache(model, config)
    run(model, [middle[1]], want)
    step = [ids(4, 8)]
    same(run(model, step, middle[0]), run(model, step, want), 0.02 if config is FOUR else 0.3)


def test_a_row_that_is_asked_for_twice_goes_two_ways(model):
    for config in (FOUR, RANK):
        own = make_cache(model, config)
        run(model, [ids(30)], own)
        mine = [c.merge([c]) for c in own]
        for c in mine:
            c.filter(mx.array([0, 0]))
        got = run(model, [ids(9, 1), ids(9, 2)], mine)
        got2 = run(model, [ids(3, 3), ids(3, 4)], mine)
        for row in (0, 1):
            fork = copy.deepcopy(own)
            same(got[row], run(model, [ids(9, row + 1)], fork)[0], 0.001)
            same(got2[row], run(model, [ids(3, row + 3)], fork)[0], 0.02)


@pytest.mark.parametrize("config", [FOUR, RANK], ids=["int", "rank"])
@pytest.mark.parametrize("n", [3, 20, 43, 45, 60])
def test_all_layers_trim_alike(model, config, n):
    """Also all tokens, and more than there are: a group's other layers are shorter already when they are asked."""
    mine, left = make_cache(model, config), max(0, 45 - n)
    run(model, [ids(45)], mine)
    rows = [c.merge([c, c]) for c in mine]
    assert theirs.trim_prompt_cache(rows, n) == min(n, 45) and [c.lengths for c in rows] == [[left] * 2] * 4
    assert theirs.trim_prompt_cache(mine, n) == min(n, 45)
    assert [c.offset for c in mine] == [left] * 4
    got = run(model, [ids(6, 1)], mine)
    if left <= 2:  # exact: empty, or the sinks alone
        own = theirs.make_prompt_cache(model)
        want = run(model, [ids(45)[:left] + ids(6, 1)], own)[:, left:]
        same(got, want, 64 * EPS["float32"])
    assert [c.offset for c in mine] == [left + 6] * 4


def test_the_servers_store_of_prompts_hands_out_copies(model):
    for config in (FOUR, RANK):
        lru, tokens = theirs.LRUPromptCache(), ids(50)
        mine = make_cache(model, config)
        run(model, [tokens], mine)
        lru.insert_cache("m", tokens, mine)
        assert lru.nbytes == compress.nbytes(model, mine)
        for cut in (45, 30):
            got, rest = lru.fetch_nearest_cache("m", [*tokens[:cut], 1, 2])
            assert rest == [1, 2] and [c.offset for c in got] == [cut] * 4
            run(model, [rest], got)
        assert [c.offset for c in mine] == [50] * 4


# ---- files ----


@pytest.mark.parametrize("n", [0, 1, 70])
def test_saved_and_loaded_caches_give_the_same_logits(model, n, tmp_path, monkeypatch):
    file = str(tmp_path / "c.safetensors")
    for config in (FOUR, IntConfig(3, 2, group=16, sinks=0, tail=0), IntConfig(8, 8, scales="float32")):
        mine = make_cache(model, config)
        if n:
            run(model, [ids(n)], mine)
        theirs.save_prompt_cache(file, mine, {"model": "tiny"})
        back, metadata = theirs.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"model": "tiny"} and type(back[0]) is HeldKVCache and back[0].offset == n
        assert [c.nbytes for c in back] == [c.nbytes for c in mine]
        assert back[0].held.config == config
        for part in (ids(20, 1), ids(20, 2)):
            np.testing.assert_array_equal(run(model, [part], back), run(model, [part], mine))


def test_a_process_that_only_reads_says_so_in_one_line(model, tmp_path):
    file = str(tmp_path / "c.safetensors")
    mine = make_cache(model, FOUR)
    run(model, [ids(40)], mine)
    theirs.save_prompt_cache(file, mine)
    code = (
        "import crosskv.compress, mlx.core as mx; from mlx_lm.models.cache import load_prompt_cache as load\n"
        f"try: load({file!r})\nexcept KeyError as e: print(e)\n"
        f"crosskv.compress.register(); c = load({file!r})\n"
        "print([x.offset for x in c], float(c[3].keys_and_values()[1].sum()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == "'HeldKVCache'" and out[1].startswith("[40, 40, 40, 40] ")
    assert float(out[1].split()[-1]) == float(mine[3].keys_and_values()[1].sum())


def test_what_cannot_be_saved_says_so_and_leaves_no_file(model, tmp_path):
    file = tmp_path / "c.safetensors"
    mine = make_cache(model, RANK)
    run(model, [ids(40)], mine)
    with pytest.raises(BadInput, match="crosskv.park and crosskv.resume"):
        theirs.save_prompt_cache(str(file), mine)
    with pytest.raises(BadInput, match="crosskv.park and crosskv.resume"):
        mine[0].state = mine[0].state
    mine = make_cache(model, FOUR)
    with pytest.raises(BadInput, match="save what extract"):
        theirs.save_prompt_cache(str(file), [c.merge([c]) for c in mine])
    assert not file.exists()
    with pytest.raises(BadInput, match="not the state of a packed cache"):
        HeldKVCache.from_state([1, 2])


# ---- what is refused ----


def test_batches_of_ours_and_the_hosts_own_are_refused(model):
    mine, own = make_cache(model, FOUR), theirs.make_prompt_cache(model)
    for c in (mine, own):
        run(model, [ids(10)], c)
    with pytest.raises(BadInput, match="Prompt 1 of this batch has a KVCache"):
        batch(model, None, PROMPTS[:2], caches=[mine, own])
    with pytest.raises(BadInput, match="every prompt needs one of crosskv.make_cache"):
        batch(model, None, PROMPTS[:2], caches=[own, mine])
    with pytest.raises(BadInput, match="cannot take in a BatchKVCache"):
        mine[0].merge([mine[0]]).extend(own[0].merge([own[0]]))
    with pytest.raises(BadInput, match="every prompt needs one of crosskv.make_cache"):
        own[0].merge([own[0]]).extend(mine[0].merge([mine[0]]))
    assert not hasattr(mine[0], "keys")


def test_other_things_that_a_batch_cannot_do(model):
    two = make_cache(model, FOUR)
    run(model, [ids(10), ids(10, 1)], two)
    with pytest.raises(BadInput, match="prompt 0 holds 2 sequences"):
        batch(model, None, PROMPTS[:1], caches=[two])
    one = make_cache(model, FOUR)
    run(model, [ids(10)], one)
    c = one[0].merge([one[0]])
    with pytest.raises(BadInput, match="only be added to an empty batch"):
        c.prepare(left_padding=[3])
    with pytest.raises(BadInput, match="needs lengths"):
        c.prepare(right_padding=[3])
    c.prepare(lengths=[2], right_padding=[1])
    x = mx.zeros((1, 2, 4, 16))
    with pytest.raises(BadInput, match="call finalize"):
        c.update_and_fetch(x, x)
    with pytest.raises(BadInput, match="finalize"):
        c.extend(c)
    with pytest.raises(BadInput, match="holds 1 sequences"):
        c.update_and_fetch(mx.zeros((2, 2, 1, 16)), mx.zeros((2, 2, 1, 16)))
    assert not c.empty() and c.size() == 10 and c.is_trimmable() and not hasattr(c, "bits")
    assert HeldBatchCache([Store(FOUR)]).empty()


def test_a_group_is_not_forked_between_its_layers(model):
    mine = make_cache(model, RANK)
    run(model, [ids(30)], mine)
    a, b = (c.held for c in mine[:2])
    first, second = a.fork(), a.fork()
    assert first.group is b.fork().group is not second.group is b.fork().group
    stale = a.fork()
    run(model, [ids(1)], mine)
    assert b.fork().group is not stale.group
    mine[0].trim(2)
    with pytest.raises(BadInput, match="asked to fork while others lag behind"):
        a.fork()
    assert backends.of(model).cache_bytes(mine) > 0
