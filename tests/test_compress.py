"""The packed cache as the hosts use it: generate, batches, left padding, beams, crop, turns, copies, saved state.

Oracles: the host's own cache on the same model; NumPy arithmetic over the arrays that the host's own cache holds.
"""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
from conftest import greedy, hf, mlx, model_hosts, small, storage_bytes, twin

import crosskv
from crosskv import IntConfig, backends, compress, make_cache
from crosskv.errors import BadInput, MatchedKVError
from crosskv.layout import EPS

HOSTS = pytest.mark.parametrize("host", model_hosts())
ALL_TAIL = IntConfig(2, 2, group=8, tail=1000)
EIGHT = IntConfig(8, 8, group=8, sinks=2, tail=4)
FOUR = IntConfig(4, 4, group=16, sinks=2, tail=8)


def ids(n, seed=0, batch=1, vocab=128):
    return np.random.default_rng(seed).integers(1, vocab, (batch, n))


def run(model, tokens, cache, **more):
    b = backends.of(model)
    return b.to_numpy(b.logits(model, tokens, cache, **more))


def new(model):
    """The host's own empty cache."""
    if backends.of(model).__name__.endswith("torch"):
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def length(cache):
    return cache.get_seq_length() if hasattr(cache, "get_seq_length") else cache[0].offset


def trim(cache, n):
    if hasattr(cache, "crop"):
        return cache.crop(-n)
    from mlx_lm.models.cache import trim_prompt_cache

    assert trim_prompt_cache(cache, n) == n


def close(got, want, share):
    """Relative to the spread of the logits."""
    np.testing.assert_allclose(got, want, atol=share * want.std(), rtol=0)


# ---- what attention sees ----


@HOSTS
def test_with_everything_in_the_tail_logits_are_the_hosts_own(host):
    model = small(host)
    mine, own = make_cache(model, ALL_TAIL), new(model)
    for part in np.split(ids(60, batch=2), [40, 41, 45], axis=1):
        got, want = run(model, part, mine), run(model, part, own)
        np.testing.assert_allclose(got, want, atol=64 * EPS["float32"] * abs(want).max(), rtol=0)
    assert compress.nbytes(model, mine) <= compress.nbytes(model, own)


@HOSTS
def test_prefill_is_exact_and_eight_bits_stay_close(host):
    model = small(host)
    mine, own = make_cache(model, EIGHT), new(model)
    prompt, rest = np.split(ids(90, batch=2), [70], axis=1)
    np.testing.assert_array_equal(run(model, prompt, mine), run(model, prompt, own))
    for j in range(rest.shape[1]):
        close(run(model, rest[:, j : j + 1], mine), run(model, rest[:, j : j + 1], own), 0.05)
    assert length(mine) == length(own) == 90


@HOSTS
def test_attention_reads_just_the_numbers_that_two_lines_of_numpy_give(host):
    """The host's own cache, quantised here in float64 and installed, gives the logits of the packed cache."""
    model = small(host)
    b, config = backends.of(model), IntConfig(3, 2, group=16, sinks=2, tail=8, scales="float32")
    prompt, more = np.split(ids(60), [58], axis=1)
    mine = make_cache(model, config)
    run(model, prompt, mine)
    layers = {}
    for i, kv in b.capture(model, prompt).items():
        k, v = (b.to_numpy(x).astype(np.float64) for x in kv)
        m = slice(2, 2 + 48)

        def rounded(x, axis, bits):
            shape = x.shape
            x = x.reshape(*shape[:2], 3, 16, 16) if axis == 2 else x[:, :, :, None]
            axis = 3 if axis == 2 else 4
            low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
            step = (high - low) / (2**bits - 1)
            return (np.rint((x - low) / step) * step + low).reshape(shape)

        k[:, :, m], v[:, :, m] = rounded(k[:, :, m], 2, 3), rounded(v[:, :, m], 3, 2)
        layers[i] = tuple(b.from_numpy(x.astype(np.float32)) for x in (k, v))
    got, want = run(model, more, mine), run(model, more, b.install(model, layers))
    far = run(model, more, b.install(model, b.capture(model, prompt)))
    close(got, want, 1e-3)
    assert abs(far - want).max() > 0.1 * want.std()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_both_hosts_read_the_same(bits):
    one = hf("Qwen3", num_hidden_layers=3)
    other = twin("qwen3", one, num_hidden_layers=3)
    config = IntConfig(bits, bits, group=16, sinks=2, tail=8)
    caches = [make_cache(m, config) for m in (one, other)]
    outputs = []
    for m, c in zip((one, other), caches, strict=True):
        run(m, ids(80), c)
        outputs.append(run(m, ids(1, seed=1), c))
    close(outputs[0], outputs[1], 0.02)  # a code at a tie may round apart
    assert caches[0].nbytes == sum(c.nbytes for c in caches[1])


@HOSTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models(host, dtype):
    """The cache is read in the model's dtype, and its exact parts are held in it."""
    model = small(host)
    b = backends.of(model)
    if host == "torch":
        model = model.to(getattr(b.xp, dtype))
    else:
        model.set_dtype(getattr(b.xp, dtype))
    mine, own = make_cache(model, EIGHT), new(model)
    for part in (ids(60), ids(2, 1)):
        got, want = (b.to_numpy(b.logits(model, part, c)).astype(np.float32) for c in (mine, own))
    close(got, want, 0.1)
    assert {b.dtype_of(x) for kv in b.read(model, mine).values() for x in kv} == {dtype}


# ---- bytes ----


@HOSTS
def test_bytes_are_saved_while_the_host_generates(host):
    model = small(host)
    config = IntConfig(2, 2, group=16, sinks=2, tail=8)
    mine = make_cache(model, config)
    greedy(model, ids(200), mine, 60)
    tokens = length(mine)
    own = tokens * 4 * 2 * 2 * 16 * 4  # layers, heads, keys and values, head dim, float32
    exact = (2 + 8 + 15) * 4 * 2 * 2 * 16 * 4
    per_token = 4 * 2 * 2 * (16 * 2 // 8 + 2 * 2)
    assert tokens in (259, 260)
    assert compress.nbytes(model, mine) <= exact + tokens * per_token < own / 4


def test_storages_reachable_from_a_transformers_cache_weigh_nbytes():

    model = small("torch")
    mine = make_cache(model, FOUR)
    greedy(model, ids(150), mine, 40)
    assert storage_bytes(mine) == mine.nbytes


def test_mlx_allocator_agrees_with_nbytes():
    import mlx.core as mx

    model = mlx("qwen3", num_key_value_heads=4, head_dim=64, max_position_embeddings=4096)
    config = IntConfig(4, 4, sinks=2, tail=64)
    warm = make_cache(model, config)
    greedy(model, ids(100), warm, 4)
    del warm
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mine = make_cache(model, config)
    greedy(model, ids(1500), mine, 8)
    mx.eval([c.state for c in mine])
    gc.collect()
    held, said = mx.get_active_memory() - before, compress.nbytes(model, mine)
    assert said <= held + 4096 and held <= 1.05 * said + 64 * 1024
    assert said < 0.35 * 1508 * 4 * 4 * 2 * 64 * 4


# ---- lifecycle ----


@HOSTS
@pytest.mark.parametrize("n", [3, 6, 10, 30, 66])
def test_trim_then_another_continuation(host, n):
    """Into the tail, to the border, into the packed part, into the sinks: as the host's own cache does it."""
    model = small(host)
    mine, own = make_cache(model, EIGHT), new(model)
    for c in (mine, own):
        run(model, ids(68), c)
        trim(c, n)
    assert length(mine) == length(own) == 68 - n
    for seed in (1, 2):  # two more steps: what was packed before, and what is packed after
        close(run(model, ids(12, seed), mine), run(model, ids(12, seed), own), 0.08)


@HOSTS
def test_turns_go_on_and_forks_do_not_leak(host):
    model = small(host)
    mine, own = make_cache(model, EIGHT), new(model)
    for c in (mine, own):
        for turn in range(3):
            run(model, ids(25, turn), c)
    forks = [copy.deepcopy(mine), copy.deepcopy(mine)]
    own2 = copy.deepcopy(own)
    run(model, ids(40, 7), forks[0])
    close(run(model, ids(12, 8), forks[1]), run(model, ids(12, 8), own2), 0.08)
    close(run(model, ids(12, 9), mine), run(model, ids(12, 9), own), 0.08)
    assert (length(mine), length(forks[0]), length(forks[1])) == (87, 115, 87)


@HOSTS
def test_a_new_cache_is_empty_and_knows_nothing_of_the_last(host):
    model = small(host)
    first = make_cache(model, EIGHT)
    run(model, ids(50), first)
    second = make_cache(model, EIGHT)
    assert length(second) == 0 and compress.nbytes(model, second) == 0
    np.testing.assert_array_equal(run(model, ids(20, 3), second), run(model, ids(20, 3), new(model)))


@HOSTS
def test_a_cache_that_is_there_already_can_be_packed(host):
    """The host's own, prefilled: the same as if the tokens had been read into the packed cache; it stays as it was."""
    model = small(host)
    own, read = new(model), make_cache(model, EIGHT)
    for c in (own, read):
        run(model, ids(50, batch=2), c)
    mine = make_cache(model, EIGHT, own)
    assert length(mine) == length(own) == 50 and compress.nbytes(model, mine) == compress.nbytes(model, read)
    step = ids(3, 1, batch=2)
    np.testing.assert_array_equal(run(model, step, mine), run(model, step, read))
    assert length(own) == 50


def test_reset_of_a_transformers_cache():
    model = small("torch")
    mine = make_cache(model, EIGHT)
    run(model, ids(50), mine)
    mine.reset()
    assert mine.get_seq_length() == 0 and mine.nbytes == 0
    np.testing.assert_array_equal(run(model, ids(20, 3, batch=2), mine), run(model, ids(20, 3, batch=2), new(model)))


@HOSTS
def test_crosskv_reads_a_packed_cache_as_any_other(host):
    """backends.read, and with it handoff(source_cache=, target_cache=)."""
    model = small(host)
    mine = make_cache(model, EIGHT)
    run(model, ids(40), mine)
    want = backends.of(model).capture(model, ids(40))
    for i, kv in backends.of(model).read(model, mine).items():
        for x, y in zip(kv, want[i], strict=True):
            a, b = (backends.of(z).to_numpy(z) for z in (x, y))
            np.testing.assert_allclose(a, b, atol=0.01 * abs(b).max())


# ---- transformers only ----


def generate(model, tokens, cache, mask=None, **more):
    import torch

    tokens = torch.as_tensor(tokens)
    mask = torch.ones_like(tokens) if mask is None else torch.as_tensor(mask)
    out = model.generate(tokens, attention_mask=mask, cache=cache, max_new_tokens=24, do_sample=False, **more)
    return out[:, tokens.shape[1] :].tolist()


def test_left_padded_batches():
    model = small("torch")
    tokens, mask = ids(60, batch=2), np.ones((2, 60), np.int64)
    tokens[0, :17], mask[0, :17] = 0, 0
    want = generate(model, tokens, new(model), mask)
    assert generate(model, tokens, make_cache(model, ALL_TAIL), mask) == want
    mine, own = make_cache(model, EIGHT), new(model)
    for c in (mine, own):
        run(model, tokens, c, mask=mask)
    longer = np.concatenate([mask, np.ones((2, 1), np.int64)], 1)
    step = ids(1, 5, batch=2)
    close(run(model, step, mine, mask=longer), run(model, step, own, mask=longer), 0.05)


def test_beams():
    """Beam search reorders the cache at every step; in the tail it is exact, packed rows follow their beam."""
    model = small("torch")
    want = generate(model, ids(30), new(model), num_beams=3)
    assert generate(model, ids(30), make_cache(model, ALL_TAIL), num_beams=3) == want
    mine, own = make_cache(model, EIGHT), new(model)
    import torch

    for c in (mine, own):
        run(model, ids(50, batch=3), c)
        c.reorder_cache(torch.tensor([2, 0, 0]))
        c.batch_repeat_interleave(2)
        c.batch_select_indices(torch.tensor([0, 1, 3, 5]))
    step = ids(1, 5, batch=4)
    close(run(model, step, mine), run(model, step, own), 0.05)
    assert generate(model, ids(30), make_cache(model, IntConfig(8, 8, 8, 2, 4)), num_beams=3)


@pytest.mark.parametrize("config", [ALL_TAIL, EIGHT, IntConfig(8, 8, group=4, sinks=1, tail=0)])
@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_speculative_decoding_rolls_back(kind, config):
    """The host crops what it guessed wrongly, also out of the packed part (no tail at all)."""
    model, prompt = small("torch"), np.tile(ids(12), (1, 4))
    more = {"prompt_lookup_num_tokens": 4} if kind == "prompt lookup" else {"assistant_model": small("torch", 2, 3)}
    mine = make_cache(model, config)
    assert generate(model, prompt, mine, **more)[0] == generate(model, prompt, new(model))[0]
    assert mine.get_seq_length() == 48 + 23


def test_prompt_already_in_the_cache_then_generate():
    model = small("torch")
    prompt = ids(40)
    for config in (ALL_TAIL, EIGHT):
        mine, own = make_cache(model, config), new(model)
        for c in (mine, own):
            run(model, prompt[:, :-1], c)
        got, want = generate(model, prompt, mine), generate(model, prompt, own)
        assert got[0][:4] == want[0][:4] and (config is EIGHT or got == want)


@pytest.mark.parametrize(("host", "kind"), [("torch", "Mistral"), ("mlx", "gemma3_text")])
def test_sliding_windows_keep_the_hosts_own_cache(host, kind):
    if host == "torch":
        model = hf(kind, sliding_window=16)
        assert all("Sliding" in type(x).__name__ for x in make_cache(model).layers)
    else:
        model = mlx(kind, sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16)
        kinds = [type(c).__name__ for c in make_cache(model)]
        assert kinds == ["RotatingKVCache", "HeldKVCache"] * 2
    mine, own = make_cache(model, EIGHT), new(model)
    for part in (ids(40), ids(5, 1)):
        got, want = run(model, part, mine), run(model, part, own)
    close(got, want, 0.05)


def test_models_without_plain_caches_are_refused():
    model = hf("Qwen3Next", layer_types=["linear_attention", "full_attention"] * 2, num_experts=2,
               num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
               linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16,
               linear_value_head_dim=16)  # fmt: skip
    with pytest.raises(MatchedKVError, match="LinearAttention"):
        make_cache(model)


# ---- mlx-lm only ----


def test_what_mlx_lm_looks_for():
    cache = make_cache(small("mlx"))[0]
    assert not hasattr(cache, "bits") and not hasattr(cache, "group_size") and not hasattr(cache, "to_quantized")
    assert cache.empty() and cache.size() == 0 and cache.nbytes == 0 and cache.is_trimmable()
    with pytest.raises(BadInput, match="empty"):
        cache.keys_and_values()


def test_mlx_rows_can_be_reordered():
    import mlx.core as mx

    model = small("mlx")
    mine, own = make_cache(model, EIGHT), new(model)
    tokens = ids(50, batch=2)
    run(model, tokens, mine)
    run(model, tokens[[1, 0]], own)
    for c in mine:
        c.select(mx.array([1, 0]))
    close(run(model, ids(1, 5, batch=2), mine), run(model, ids(1, 5, batch=2), own), 0.05)


@pytest.mark.parametrize("config", [ALL_TAIL, EIGHT])
def test_mlx_speculative_decoding_rolls_back(config):
    import mlx.core as mx
    from mlx_lm.generate import speculative_generate_step

    model, draft = small("mlx"), small("mlx", layers=2, seed=5)
    caches = make_cache(model, config) + make_cache(draft, config)
    prompt = mx.array(ids(40)[0])
    steps = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=3, max_tokens=20, prompt_cache=caches
    )  # fmt: skip
    assert [int(t) for t, *_ in steps] == greedy(model, ids(40), None, 20)


# ---- trained models ----


@HOSTS
@pytest.mark.parametrize("name", ["S", "M"])
def test_on_trained_models(host, name, family_model):
    """8 bits choose what the uncompressed cache chooses; 4 bits cost little, and all hold less."""
    from crosskv import family, metrics

    model, tokenizer = family_model(name, host)
    b = backends.of(model)
    tokens = np.asarray([tokenizer.encode(family.text("heldout")[9000:13000])[:448]])
    prompt, rest = tokens[:, :384], tokens[:, 384:]
    own = new(model)
    want = metrics.continuation_logits(model, prompt, rest, own)
    held = compress.nbytes(model, own)
    kl, sizes = {}, {}
    for bits in (8, 4, 2):
        cache = make_cache(model, IntConfig(bits, bits, group=32, sinks=4, tail=32))
        b.logits(model, prompt[:, :-1], cache)
        sizes[bits] = compress.nbytes(model, cache)
        got = metrics.continuation_logits(model, prompt[:, -1:], rest, cache)
        kl[bits] = metrics.kl(want, got).mean()
        assert metrics.top1(want, got).mean() >= {8: 0.98, 4: 0.9, 2: 0.6}[bits]
    assert kl[8] < 2e-4 < kl[2] and kl[8] < kl[4] < 0.02 < 50 * kl[2]
    assert sizes[2] < sizes[4] < sizes[8] < 0.5 * held


def test_the_public_names_and_wrong_configs():
    assert crosskv.make_cache is make_cache and crosskv.IntConfig is IntConfig
    with pytest.raises(BadInput, match="Expected an .*, got dict"):
        make_cache(small("torch"), {"bits": 4})
    with pytest.raises(BadInput, match="array or a model"):
        make_cache("a model")
