"""The seed page of xKV: its usage block with only the package's name changed, its byte properties, its guard."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import model_hosts, small
from test_compress import ids, new, run

from crosskv import KVCacheBuilder, KVCacheConfig, backends, compress, family
from crosskv.errors import BadInput

HOSTS = pytest.mark.parametrize("host", model_hosts())


def layers_of(cache):
    return getattr(cache, "layers", cache)


def test_the_usage_block_on_a_trained_model():
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(family.path("S")))

    config = KVCacheConfig(
        method="xkv",
        head_dim=64,
        xkv_group_size=2,  # layers per shared-subspace group (2 = pairs)
        xkv_rank=None,  # None -> energy-threshold rank selection
        xkv_energy_threshold=0.95,  # fraction of singular value energy to retain
        xkv_latent_bits=4,  # single-bit-width latent quantization
        xkv_group_quant_size=32,  # token group size for latent quantization
        xkv_max_ctx=8192,  # coordinator per-group token budget
    )
    caches = KVCacheBuilder.for_model(model, config)
    model.make_cache = lambda *_a, **_k: caches

    prompt = tokenizer.encode(family.text("heldout")[2000:3600])
    out = mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
    assert isinstance(out, str) and caches[0].offset >= len(prompt) > 350
    assert 0 < caches[1].compressed_key_bytes < 0.6 * caches[1].fp16_key_bytes


@HOSTS
def test_bytes_are_those_of_the_arrays_held(host):
    model = small(host, layers=3)  # the last group has one layer
    cache = KVCacheBuilder.for_model(model, KVCacheConfig(head_dim=16, xkv_rank=8, xkv_group_quant_size=16))
    run(model, ids(320), cache)
    layers = layers_of(cache)
    groups = [layers[0].held.group, layers[2].held.group]
    assert [c.held.group for c in layers] == [groups[0], groups[0], groups[1]]
    for j, c in enumerate(layers):
        g, at = c.held.group, c.held.index
        (segment,) = g.middle
        codes = sum(p.nbytes for p in segment.packed[0])
        assert c.compressed_key_bytes == codes // len(g.layers) > 0
        assert c.shared_basis_bytes == (segment.sides[0].basis.nbytes if at == 0 else 0) and (at > 0) == (j == 1)
        assert c.fp16_key_bytes == c.value_fp16_bytes == 2 * 320 * 2 * 16
        own = [*(g.sinks[at] or ()), *(g.tails[at] or ())]
        values = segment.packed[1][0].nbytes // len(g.layers)  # kept as they are, and counted where they lie
        assert sum(a.nbytes for a in own) == 4 * 2 * 2 * 16 * (320 - g.packed_tokens)
        assert values == 4 * 2 * 16 * g.packed_tokens
    assert compress.nbytes(model, cache) == sum(a.nbytes for g in groups for j in range(len(g.layers))
                                                for a in g.arrays(j))  # fmt: skip
    with pytest.raises(AttributeError):
        layers_of(compress.make_cache(model))[0].compressed_key_bytes  # noqa: B018  (plain integers have no basis)


@HOSTS
def test_values_stay_and_keys_of_full_rank_lose_nothing_but_bits(host):
    model = small(host)
    config = KVCacheConfig(xkv_group_size=2, xkv_rank=16, xkv_latent_bits=8, xkv_group_quant_size=16)
    mine, own = KVCacheBuilder.for_model(model, config), new(model)
    for part in (ids(300), ids(1, 1)):
        got, want = run(model, part, mine), run(model, part, own)
    assert np.abs(got - want).max() < 0.03 * want.std()
    b = backends.of(model)
    for i, (_, v) in b.read(model, mine).items():
        np.testing.assert_allclose(b.to_numpy(v), b.to_numpy(b.read(model, own)[i][1]), atol=0.05)


@HOSTS
def test_the_guard_holds_for_later_chunks_too(host):
    model = small(host)
    cache = KVCacheBuilder.for_model(model, KVCacheConfig(xkv_max_ctx=128))
    run(model, ids(100), cache)
    with pytest.raises(BadInput, match=r"256 tokens, but this cache is for at most 128 \(xkv_max_ctx"):
        run(model, ids(156, 1), cache)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"xkv_grup_size": 2}, "did you mean 'xkv_group_size'"),
        ({"method": "xvk"}, "method must be 'xkv'.*did you mean 'xkv'"),
        ({"head_dim": 16, "xkv_rank": 17}, "xkv_rank must be an integer from 1 to 16"),
        ({"xkv_rank": -3}, "rank_keys must be an integer of at least 1"),
        ({"xkv_energy_threshold": 2}, "energy must be above 0"),
        ({"xkv_latent_bits": 16}, "bits must be of"),
        ({"xkv_group_size": 0}, "group must be a number of layers"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(BadInput, match=says):
        KVCacheConfig(**options)


def test_a_head_dim_that_is_not_the_models():
    with pytest.raises(BadInput, match="head_dim is 128, but this model has 16"):
        KVCacheBuilder.for_model(small("torch"), KVCacheConfig(head_dim=128))
