"""Live models: geometry, RoPE, capture and install, against the host's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import LLAMA3, YARN, greedy, hf, mlx, model_hosts, small, twin

from crosskv import backends, rope
from crosskv.errors import BadInput, MatchedKVError
from crosskv.layout import ModelKVSpec, differs

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

# kind, changes -> rotated pairs, interleaved, number of distinct ropes
FAMILIES = [
    ("Qwen3", {}, 8, False, 1),
    ("Llama", {"rope_parameters": LLAMA3}, 8, False, 1),
    ("Llama", {"rope_parameters": YARN}, 8, False, 1),
    ("Llama", {"rope_parameters": LINEAR}, 8, False, 1),
    ("Phi", {"rope_parameters": PARTIAL}, 4, False, 1),
    ("StableLm", {"rope_parameters": PARTIAL}, 4, False, 1),
    ("Glm", {"rope_parameters": PARTIAL}, 4, True, 1),
    ("Glm4", {"rope_parameters": PARTIAL}, 4, True, 1),
    ("Cohere", {}, 8, True, 1),
    ("Cohere2", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 8}, 8, True, 2),
    ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}, 8, False, 2),
    ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}, 8, False, 2),
    ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}, 8, False, 1),
    ("Mistral", {"sliding_window": 8}, 8, False, 1),
    ("Olmo2", {}, 8, False, 1),
    ("Helium", {}, 8, True, 1),
    ("Nemotron", {}, 4, False, 1),
    ("GPTNeoX", {"num_key_value_heads": 4}, 2, False, 1),
]


@pytest.mark.parametrize(("kind", "changes", "pairs", "interleaved", "distinct"), FAMILIES)
def test_rope_of_every_family(kind: str, changes: dict, pairs: int, interleaved: bool, distinct: int) -> None:
    spec = ModelKVSpec.from_model(hf(kind, **changes))
    heads = changes.get("num_key_value_heads", 2)
    assert (spec.n_layers, spec.n_kv_heads, spec.head_dim) == (4, heads, 16)
    assert len(set(spec.ropes)) == distinct
    rotating = [r for r in spec.ropes if r.inv_freq]
    assert {(len(r.inv_freq), r.interleaved) for r in rotating} == {(pairs, interleaved)}


def _hooked(model: object, ids: np.ndarray) -> dict[int, np.ndarray]:
    """Pre-RoPE keys as the model's own modules compute them: k_norm's output where there is one, else k_proj's."""
    import torch

    got: dict[int, np.ndarray] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):  # type: ignore[attr-defined]
        attention = layer.self_attn
        module = getattr(attention, "k_norm", None) or attention.k_proj

        def keep(_m: object, _a: object, out: torch.Tensor, i: int = i) -> None:
            out = out.detach()
            by_head = tuple(out.shape) == (ids.shape[0], 2, ids.shape[1], 16)
            got[i] = (out if by_head else out.reshape(*ids.shape, 2, 16).swapaxes(1, 2)).numpy()

        handles.append(module.register_forward_hook(keep))
    backends.of(model).capture(model, ids)
    for h in handles:
        h.remove()
    return got


@pytest.mark.parametrize(("kind", "changes"), [f[:2] for f in FAMILIES if f[0] not in ("GPTNeoX", "Phi", "StableLm")])
def test_unrotated_keys_are_the_keys_before_rope(kind: str, changes: dict) -> None:
    model = hf(kind, **changes)
    ids = np.random.default_rng(0).integers(0, 128, (2, 40))
    want = _hooked(model, ids)
    spec = ModelKVSpec.from_model(model)
    got = backends.of(model).capture(model, ids)
    for i, r in enumerate(spec.ropes):
        k = got[i][0]
        pre = rope.unrotate(k, rope.tables(r, np.arange(40), k, "float32"), r.interleaved).numpy()
        assert np.abs(pre - want[i]).max() <= 32 * 2**-24 * np.abs(want[i]).max(), (i, r)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_the_length(kind: str) -> None:
    if kind == "dynamic":
        parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model, limit = hf("Llama", rope_parameters=parameters, max_position_embeddings=64), 64
    else:
        parameters = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + 0.1 * i for i in range(8)],
            "long_factor": [2 + 0.5 * i for i in range(8)],
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        }
        model, limit = hf("Llama", rope_parameters=parameters, max_position_embeddings=256), 64
    spec = ModelKVSpec.from_model(model)
    assert spec.ropes[0].lengths == (1, limit)
    with pytest.raises(MatchedKVError, match=f"lengths 1 to {limit}"):
        rope.tables(spec.ropes[0], np.arange(limit + 1))
    ids = np.random.default_rng(0).integers(0, 128, (1, 100))
    want = _hooked(model, ids)
    r = spec.at(model, 100).ropes[0]
    assert r.inv_freq != spec.ropes[0].inv_freq
    k = backends.of(model).capture(model, ids)[0][0]
    pre = rope.unrotate(k, rope.tables(r, np.arange(100), k, "float32")).numpy()
    assert np.abs(pre - want[0]).max() <= 32 * 2**-24 * np.abs(want[0]).max()


def test_refused_models_say_why() -> None:
    with pytest.raises(MatchedKVError, match=r"keys of layer 0 .* norm after RoPE"):
        ModelKVSpec.from_model(hf("HunYuanDenseV1"))
    with pytest.raises(MatchedKVError, match="values of layer 0 change with the position"):
        ModelKVSpec.from_model(hf("GPT2", n_embd=64, n_layer=2, n_head=4))
    with pytest.raises(MatchedKVError, match="keeps a LinearAttentionLayer"):
        ModelKVSpec.from_model(hf("Mamba2", num_heads=8, state_size=8, n_groups=1))
    with pytest.raises(MatchedKVError, match="keeps a "):
        ModelKVSpec.from_model(
            mlx("mamba", state_size=8, conv_kernel=2, use_bias=False, use_conv_bias=True, time_step_rank=4)
        )


def test_a_model_with_nan_weights_is_named() -> None:
    import torch

    model = hf("Qwen3")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[3, 0] = float("nan")
    with pytest.raises(BadInput, match=r"Qwen3ForCausalLM values of layer 2 have \d+ NaN or Inf"):
        ModelKVSpec.from_model(model)


TWINS = [
    ("Qwen3", "qwen3", {}, {}),
    ("Llama", "llama", {"rope_parameters": LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ("Qwen3", "qwen3", {"rope_parameters": YARN}, {"rope_scaling": YARN}),
    (
        "Cohere",
        "cohere",
        {},
        {"rope_theta": 5e5, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    ),
    ("SmolLM3", "smollm3", {"no_rope_layers": [1, 0, 1, 1]}, {"no_rope_layers": [1, 0, 1, 1], "rope_theta": 2e6}),
]


@pytest.mark.parametrize(("kind", "name", "ours", "theirs"), TWINS)
def test_both_hosts_give_the_same_cache_and_spec(kind: str, name: str, ours: dict, theirs: dict) -> None:
    a = hf(kind, **ours)
    b = twin(name, a, **theirs)
    sa, sb = ModelKVSpec.from_model(a), ModelKVSpec.from_model(b)
    assert differs(sa, sb) is None
    for x, y in zip(sa.ropes, sb.ropes, strict=True):
        assert x.interleaved == y.interleaved
        np.testing.assert_allclose(x.inv_freq, y.inv_freq, rtol=2e-6)
        assert x.scale == pytest.approx(y.scale, rel=1e-6)
    ids = np.random.default_rng(0).integers(0, 128, (2, 30))
    ca, cb = backends.of(a).capture(a, ids), backends.of(b).capture(b, ids)
    for i in ca:
        for x, y in zip(ca[i], cb[i], strict=True):
            np.testing.assert_allclose(np.asarray(y), x.numpy(), atol=3e-5 * float(x.abs().max()))


@pytest.mark.parametrize(("pairs", "changes"), [(8, {}), (8, {"rope": "yarn"}), (8, {"rope": "llama3"})])
@pytest.mark.parametrize("host", model_hosts())
def test_tables_equal_the_live_module_far_out(host: str, pairs: int, changes: dict) -> None:
    scaling = {"yarn": YARN, "llama3": LLAMA3}.get(changes.get("rope", ""), {"rope_type": "default", "rope_theta": 1e4})
    theta = scaling["rope_theta"]
    model = small(host, rope_parameters=scaling, rope_theta=theta)
    r = ModelKVSpec.from_model(model).ropes[0]
    positions = np.array([0, 1, 1000, 65_537, 131_071])
    cos, sin = rope.tables(r, positions)
    if host == "torch":
        import torch

        got = [
            x[0, :, :pairs].numpy() for x in model.model.rotary_emb(torch.zeros(1), torch.from_numpy(positions)[None])
        ]
    else:
        import mlx.core as mx

        x = mx.concatenate([mx.ones((1, 1, 1, pairs)), mx.zeros((1, 1, 1, pairs))], -1)
        live = model.layers[0].self_attn.rope
        rows = np.stack([np.asarray(live(x, offset=int(p)))[0, 0, 0] for p in positions])
        got = [rows[:, :pairs], rows[:, pairs:]]
    np.testing.assert_allclose(got[0], cos, atol=4e-7)
    np.testing.assert_allclose(got[1], sin, atol=4e-7)
    exact = (
        np.cos(positions[:, None] * np.array(r.inv_freq)) * r.scale
    )  # without the rounding of the angle that hosts do
    assert np.abs(exact - got[0]).max() > 1e-4


@pytest.mark.parametrize("host", model_hosts())
def test_spec_survives_json_and_tells_models_apart(host: str) -> None:
    model = small(host)
    spec = ModelKVSpec.from_model(model)
    again = ModelKVSpec.from_json(spec.to_json())
    assert again == spec
    assert again.identity == spec.identity
    assert differs(spec, ModelKVSpec.from_model(small(host))) is None
    assert "layer 0 answers" in (differs(spec, ModelKVSpec.from_model(small(host, seed=1))) or "")
    other = small(host, **({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_theta": 1e5}))
    assert "rotated differently" in (differs(spec, ModelKVSpec.from_model(other)) or "")
    assert "5 layers" in (differs(spec, ModelKVSpec.from_model(small(host, layers=5))) or "")


SLIDING = {
    "torch": lambda: hf("Gemma3Text", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8),
    "mlx": lambda: mlx("gemma3_text", sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=16),
}


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("host", model_hosts())
def test_install_then_decode_equals_a_cold_run(host: str, window: bool) -> None:
    model = SLIDING[host]() if window else small(host)
    b = backends.of(model)
    ids = np.random.default_rng(1).integers(0, 128, (1, 25))
    want = greedy(model, ids, None, 24)
    for held in (1, 5):
        cache = b.install(model, b.capture(model, ids[:, :-held]))
        assert greedy(model, ids[:, -held:], cache, 24) == want
    pieces = b.capture(model, ids[:, 9:-1], past=b.capture(model, ids[:, :9]))
    assert greedy(model, ids[:, -1:], b.install(model, pieces), 24) == want
    swapped = {i: (v, k) for i, (k, v) in pieces.items()}
    assert greedy(model, ids[:, -1:], b.install(model, swapped), 24) != want  # the test can fail


@pytest.mark.parametrize("host", model_hosts())
def test_left_padding_gives_the_rows_of_separate_runs(host: str) -> None:
    model = small(host)
    b = backends.of(model)
    rng = np.random.default_rng(2)
    long, short = rng.integers(1, 128, (1, 20)), rng.integers(1, 128, (1, 13))
    ids = np.concatenate([long, np.concatenate([np.zeros((1, 7), int), short], 1)])
    mask = np.concatenate([np.ones((1, 20), int), np.concatenate([np.zeros((1, 7), int), np.ones((1, 13), int)], 1)])
    got, alone = b.capture(model, ids[:, :-1], mask[:, :-1]), b.capture(model, short[:, :-1])
    for i in got:
        for x, y in zip(got[i], alone[i], strict=True):
            x, y = b.to_numpy(x)[1:, :, 7:], b.to_numpy(y)
            np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())
    cache = b.install(model, got, mask[:, :-1])
    logits = b.to_numpy(b.logits(model, ids[:, -1:], cache, mask))
    want = b.to_numpy(b.logits(model, short))
    np.testing.assert_allclose(logits[1, -1], want[0, -1], atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("host", model_hosts())
def test_half_precision_models(host: str) -> None:
    model = small(host)
    exact = ModelKVSpec.from_model(model)
    if host == "torch":
        for p in model.parameters():  # model.bfloat16() would round the frequencies of RoPE as well
            p.data = p.data.bfloat16()
    else:
        import mlx.core as mx

        model.set_dtype(mx.bfloat16)
    spec = ModelKVSpec.from_model(model)
    assert spec.identity["dtype"] == "bfloat16"
    assert differs(exact, spec) is None
    b = backends.of(model)
    layers = b.capture(model, np.arange(10)[None])
    assert b.dtype_of(layers[0][0]) == "bfloat16"
    cache = b.install(model, {i: tuple(b.cast(x, "float32") for x in kv) for i, kv in layers.items()})
    assert b.dtype_of(b.read(model, cache)[0][0]) == "bfloat16"


@pytest.mark.parametrize("host", model_hosts())
def test_a_cache_that_lost_tokens_is_refused(host: str) -> None:
    model = SLIDING[host]()
    b = backends.of(model)
    cache = b.install(model, b.capture(model, np.arange(20)[None]))
    b.logits(model, np.arange(3)[None, :1], cache)
    with pytest.raises(BadInput, match="no longer holds all"):
        b.read(model, cache)
