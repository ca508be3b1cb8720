"""Tiny models, built from a config and a seed in either host; shapes are checked while tests run."""

from __future__ import annotations

import ctypes
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

for _blas in ("libopenblas.so.0", "libopenblasp.so.0"):  # MLX's own BLAS on Linux is 20-50 times slower
    try:
        ctypes.CDLL(_blas, mode=ctypes.RTLD_GLOBAL)
        break
    except OSError:
        pass

from jaxtyping import install_import_hook  # noqa: E402

SHAPED = [f"crosskv.{m}" for m in ("rope", "layout", "moments", "ridge", "select", "mapper", "transfer", "metrics")]
with install_import_hook(SHAPED, "beartype.beartype"):
    import crosskv.live
    import crosskv.metrics
    import crosskv.transfer  # noqa: F401

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from crosskv import backends  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def hf(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model; weights large enough that every part of the arithmetic matters."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(0.15 * noise if p.ndim > 1 else p + 0.2 * noise)
    return model


def mlx(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random mlx-lm model."""
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    module = importlib.import_module(f"mlx_lm.models.{kind}")
    args = {**BASE, "model_type": kind, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
    model = module.Model(module.ModelArgs.from_dict({**args, **changes}))
    rng = np.random.default_rng(seed)
    new = [
        (n, mx.array((0.15 if w.ndim > 1 else 0.2) * rng.standard_normal(w.shape).astype(np.float32)) + (w.ndim == 1))
        for n, w in sorted(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model


def twin(kind: str, torch_model: Any, **changes: Any) -> Any:
    """The mlx-lm model with the weights of a transformers one."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    model = mlx(kind, **changes)
    weights = {n: mx.array(p.detach().numpy()) for n, p in torch_model.state_dict().items()}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    weights = {n: w for n, w in weights.items() if not (n.startswith("lm_head") and "lm_head" not in model)}
    model.update(tree_unflatten(list(weights.items())))
    mx.eval(model.parameters())
    return model


def array_backends() -> list[str]:
    return backends.names()


FLOAT64 = [(n, "float64") for n in array_backends() if n != "mlx"]  # MLX has none on a GPU: crosskv sends it none


def model_hosts() -> list[str]:
    return [n for n in backends.names() if hasattr(backends.load(n), "capture")]


def small(host: str, layers: int = 4, seed: int = 0, **changes: Any) -> Any:
    """A Qwen3 on either host."""
    if host == "torch":
        changes.pop("rope_theta", None)
        return hf("Qwen3", seed, num_hidden_layers=layers, **changes)
    return mlx("qwen3", seed, num_hidden_layers=layers, **changes)


def greedy(model: Any, tokens: Any, cache: Any, steps: int) -> list[int]:
    """The tokens that the host's own generate continues with."""
    if backends.of(model).__name__.endswith("torch"):
        import torch

        before = cache.get_seq_length() if cache is not None else 0
        ids = torch.as_tensor(np.asarray(tokens))
        mask = torch.ones(ids.shape[0], before + ids.shape[1]).long()
        word = "cache" if cache is not None else None
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, **({word: cache} if word else {})
        )
        return out[0, ids.shape[1] :].tolist()
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps_ = generate_step(mx.array(np.asarray(tokens)[0]), model, max_tokens=steps, prompt_cache=cache)
    return [int(t) for t, _ in steps_]


def storage_bytes(root: Any) -> int:
    """Bytes of every torch storage that can be reached from `root`, each counted once, views with their whole base."""
    import gc

    import torch

    found, seen, queue = {}, set(), [root]
    while queue:
        x = queue.pop()
        if id(x) in seen or isinstance(x, type) or type(x).__name__ in ("module", "function"):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        else:
            queue += gc.get_referents(x)
    return sum(found.values())


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def family_model():
    """family_model(name, host) -> (model, tokenizer) of a shipped model, opened once per session."""
    import functools

    from crosskv import family

    return functools.cache(family.load)
