"""What a mapped cache does to the target's attention, against attention computed in float64, and the verdict on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import hf, mlx, model_hosts

from crosskv import backends
from crosskv.errors import BadInput

# ---- the seam: attention as the host computes it ----


def oracle(q: Any, k: Any, v: Any, scale: float, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64: weights [B, Hq, T, T] and outputs [B, Hq, T, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    t = np.arange(q.shape[2])
    seen = t[:, None] >= t
    if window is not None:
        seen &= t[:, None] - t < window
    logits = np.where(seen, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, p @ v


def check_attention(model: Any, ids: np.ndarray, scale: float, windows: dict[int, int] | None = None) -> list[Any]:
    """Every layer's attention, with its own keys and values and with others, is that of the oracle; and its weights."""
    b, rng, found = backends.of(model), np.random.default_rng(0), []

    def visit(layer: int, q: Any, k: Any, v: Any, attend: Any) -> None:
        q_, k_, v_ = (b.to_numpy(x) for x in (q, k, v))
        assert q_.shape[0] == len(ids) and q_.shape[2] == ids.shape[1] and layer == len(found)
        others = [(rng.standard_normal(k_.shape) * k_.std()).astype(np.float32) for _ in range(2)]
        for keys, values in ((k_, v_), tuple(others)):
            got = attend(b.from_numpy(keys, k), b.from_numpy(values, v))
            weights, want = oracle(q_, keys, values, scale, (windows or {}).get(layer))
            np.testing.assert_allclose(b.to_numpy(got), want, atol=64 * 2**-24 * np.abs(want).max())
            if keys is k_:
                found.append((layer, k_, v_, weights))

    b.attention(model, ids, visit)
    return found


@pytest.mark.parametrize("host", model_hosts())
def test_attention_is_the_hosts_own(host, family_model):
    """On the family's S: the oracle's outputs; the keys and values are those of the cache; the run is undisturbed."""
    model = family_model("S", host)[0]
    b, ids = backends.of(model), np.random.default_rng(1).integers(5, 1000, (2, 40))
    before = b.to_numpy(b.logits(model, ids))
    seen = check_attention(model, ids, 64**-0.5)
    cache = b.capture(model, ids)
    assert [layer for layer, *_ in seen] == sorted(cache)
    for layer, k, v, _ in seen:
        for got, want in zip((k, v), cache[layer], strict=True):
            want = b.to_numpy(want)
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_array_equal(b.to_numpy(b.logits(model, ids)), before)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 8}, {0: 8, 1: 8, 2: 8, 3: 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, {2: 8, 3: 8}),
        ("Qwen3", {}, {}),
    ],
)
def test_attention_of_sliding_windows(kind, changes, windows, implementation):
    """A batch of 2 in torch: the weights are those that transformers itself reports with output_attentions."""
    import torch

    model, ids = hf(kind, **changes), np.random.default_rng(2).integers(1, 128, (2, 24))
    want = model(torch.as_tensor(ids), output_attentions=True).attentions
    model.config._attn_implementation = implementation
    seen = check_attention(model, ids, 16**-0.5, windows)
    assert model.config._attn_implementation == implementation
    for (*_, weights), w in zip(seen, want, strict=True):
        np.testing.assert_allclose(weights, w.detach().numpy(), atol=1e-5)


def test_attention_is_given_back_after_an_error():
    """A visitor that fails leaves the model and the host as they were."""
    import mlx.core as mx

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    one, other, ids = hf("Llama"), mlx("llama"), np.ones((1, 4), int)
    own = mx.fast.scaled_dot_product_attention
    for model in (one, other):
        with pytest.raises(ZeroDivisionError):
            backends.of(model).attention(model, ids, fails)
    assert one.config._attn_implementation == "eager" and mx.fast.scaled_dot_product_attention is own


def test_attention_elsewhere_is_refused(monkeypatch):
    """A model whose layers do not all pass through the host's attention function."""
    one, other = hf("Llama"), mlx("llama")
    calm = one.model.layers[1].self_attn
    monkeypatch.setattr(calm, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(BadInput, match=r"seen at the layers \[0, 2, 3\], not once at each of 4"):
        backends.of(one).attention(one, np.ones((1, 4), int), lambda *_: None)
    monkeypatch.setattr(type(other.model.layers[0].self_attn), "__call__", lambda _, x, *a, **k: x)
    with pytest.raises(BadInput, match="seen 0 times in 4 layers"):
        backends.of(other).attention(other, np.ones((1, 4), int), lambda *_: None)
