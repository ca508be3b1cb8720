"""PyTorch arrays and transformers models. The one file that knows how transformers spells things.

Tested with transformers 5.24; `cache` was `past_key_values` before, so the forward's own signature is asked.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from crosskv.backends import Held, LayerBytes, Layers, Rope, Visit, host_peak
from crosskv.errors import BadInput, MatchedKVError

xp = torch


# ---- arrays ----


def dtype_of(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype))


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()


def from_numpy(a: np.ndarray, like: torch.Tensor | None = None, dtype: str | None = None) -> torch.Tensor:
    bits = a.dtype == np.uint16
    a = a.view(np.int16) if bits else a
    t = torch.from_numpy(a if a.flags.writeable else a.copy())
    t = t.view(torch.bfloat16) if bits else t
    return t.to(device=None if like is None else like.device, dtype=None if dtype is None else getattr(torch, dtype))


def move(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.device)


def local(x: torch.Tensor) -> Any:
    return to_numpy(x) if x.device.type == "cpu" else x


def amin(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.amin(axis, keepdim=True)


def amax(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.amax(axis, keepdim=True)


def owned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# ---- models ----


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _dtype(model: Any) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def describe(model: Any) -> dict[str, Any]:
    config = model.config.to_dict()
    name = config.pop("_name_or_path", "") or ""
    name = Path(name).name if Path(name).is_dir() else name  # not where it lies on this machine
    revision = config.pop("_commit_hash", None) or ""
    for volatile in ("transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(volatile, None)
    return {
        "framework": "torch",
        "name": name,
        "revision": revision,
        "kind": type(model).__name__,
        "dtype": str(_dtype(model)).removeprefix("torch."),
        "vocab": int(model.get_input_embeddings().weight.shape[0]),
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }


def check(model: Any) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for i, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise MatchedKVError(
                f"{type(model).__name__}: layer {i} keeps a {type(layer).__name__}. Only layers that each hold "
                "their own keys and values can be mapped (no recurrent state, no shared or latent caches)."
            )


def _rotary(model: Any) -> Iterator[tuple[Any, str]]:
    """(module, prefix) of every set of inverse frequencies; gemma3 and olmo3 keep one per layer type."""
    for _, module in _decoder(model).named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and "long_" not in name:
                yield module, name.removesuffix("inv_freq")


def ropes(model: Any, length: int) -> tuple[Rope, ...]:
    found = []
    for module, prefix in _rotary(model):
        kind = getattr(module, "rope_type", "default")
        kind = kind.get(prefix.rstrip("_"), "default") if isinstance(kind, dict) else kind
        dynamic = kind == "longrope" or "dynamic" in kind
        for last in (0, length - 1) if dynamic else ():  # position 0 first: the module keeps the longest length it saw
            zero, position = torch.zeros(1, device=_device(model)), torch.tensor([[last]], device=_device(model))
            with torch.no_grad():
                module(zero, position, **({"layer_type": prefix[:-1]} if prefix else {}))
        freq = getattr(module, f"{prefix}inv_freq").detach().float().cpu()
        scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        found.append(Rope(tuple(freq.tolist()), scale, lengths=(length, length) if dynamic else None))
    return tuple(found)


def _ids(model: Any, tokens: Any) -> torch.Tensor:
    return torch.as_tensor(tokens, dtype=torch.long, device=_device(model))


def _cache_word(kind: Any) -> str:
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


_differentiating: ContextVar[bool] = ContextVar("crosskv_differentiating", default=False)


def value_and_grad(
    f: Callable[[dict[str, torch.Tensor]], torch.Tensor], params: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    leaves = {k: x.detach().requires_grad_() for k, x in params.items()}
    token = _differentiating.set(True)
    try:
        with torch.enable_grad():
            value = f(leaves)
            grads = torch.autograd.grad(value, list(leaves.values()))  # of these alone: none for the model's weights
    finally:
        _differentiating.reset(token)
    return float(value.detach()), dict(zip(leaves, grads, strict=True))


def _forward(model: Any, tokens: torch.Tensor, cache: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(_differentiating.get()):
        return model(input_ids=tokens, use_cache=True, **{_cache_word(type(model)): cache}, **kwargs)


def _positions(mask: torch.Tensor, new: int) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]


def probe(model: Any, tokens: Sequence[int], position: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    from transformers import DynamicCache

    ids = _ids(model, tokens)[:, None]
    cache = DynamicCache()
    _forward(
        _decoder(model), ids, cache, position_ids=torch.full_like(ids, position), attention_mask=torch.ones_like(ids)
    )
    return _arrays(cache)


def _arrays(cache: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}


class _Enough(Exception):  # noqa: N818 (nothing went wrong)
    """The layers that were asked for have their keys and values."""


class _Until(DynamicCache):
    """A cache that stops the model once layer `last` is there."""

    last: int

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise _Enough
        return out


def capture(model: Any, tokens: Any, mask: Any = None, past: Layers | None = None, layers: int | None = None) -> dict:
    ids = _ids(model, tokens)
    # Without a config the cache keeps all tokens of sliding-window layers; the model still masks them.
    cache = _Until([past[i] for i in sorted(past)] if past else None)
    cache.last = -1 if layers is None else layers - 1
    before = cache.get_seq_length()
    mask = (
        torch.ones(ids.shape[0], before + ids.shape[1], device=ids.device).long() if mask is None else _ids(model, mask)
    )
    with suppress(_Enough):
        _forward(_decoder(model), ids, cache, attention_mask=mask, position_ids=_positions(mask, ids.shape[1]))
    return _arrays(cache)


def install(model: Any, layers: Layers, mask: Any = None) -> Any:
    from transformers import DynamicCache

    like = {"device": _device(model), "dtype": _dtype(model)}
    return DynamicCache([tuple(x.to(**like) for x in layers[i]) for i in sorted(layers)], config=model.config)


def read(model: Any, cache: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    layers = _arrays(cache)
    for i, (k, _) in layers.items():
        if k is None or k.shape[-2] < cache.get_seq_length(i):
            raise BadInput(
                f"Layer {i} of this cache no longer holds all of its {cache.get_seq_length(i)} tokens (sliding window, "
                "or empty). Pass the token ids and let crosskv prefill, or prefill into a DynamicCache with no config."
            )
    return layers


def logits(model: Any, tokens: Any, cache: Any = None, mask: Any = None) -> torch.Tensor:
    from transformers import DynamicCache

    ids = _ids(model, tokens)
    cache = DynamicCache(config=model.config) if cache is None else cache
    kwargs: dict[str, Any] = {}
    if mask is not None:
        mask = _ids(model, mask)
        kwargs = {"attention_mask": mask, "position_ids": _positions(mask, ids.shape[1])}
    return _forward(model, ids, cache, **kwargs).logits


VISITED = "crosskv_visited"
"""The name under which transformers knows the attention function that calls a visitor."""


@dataclass
class _Run:
    """One run of `attention`: who is called, the implementation that each configuration names, layers seen so far."""

    visit: Visit
    names: dict[int, Any]
    seen: list[int] = field(default_factory=list)


_running: ContextVar[_Run] = ContextVar("crosskv_running")


def _visited(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """An attention function for transformers: the model's own one, after a call of the visitor."""
    run, home = _running.get(), sys.modules[type(module).__module__]
    functions = getattr(home, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    own = functions.get_interface(run.names[id(module.config)], getattr(home, "eager_attention_forward", None))

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return own(module, query, keys, values, attention_mask, **kwargs)[0].transpose(1, 2)

    run.seen.append(module.layer_idx)
    run.visit(module.layer_idx, query, key, value, attend)
    return own(module, query, key, value, attention_mask, **kwargs)


def _visited_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask that the model's own implementation wants."""
    return AttentionMaskInterface()[_running.get().names[None]](*args, **kwargs)  # type: ignore[index]


AttentionInterface.register(VISITED, _visited)
AttentionMaskInterface.register(VISITED, _visited_mask)


def _configs(decoder: Any) -> list[Any]:
    """The configurations that the decoder and its parts look into, each once."""
    found = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    return list(found.values())


@contextmanager
def _visiting(decoder: Any, visit: Visit) -> Iterator[_Run]:
    """While it lasts, the decoder's attention calls `visit`."""
    configs = _configs(decoder)
    names: dict[Any, Any] = {id(c): c._attn_implementation for c in configs}
    run = _Run(visit, names | {None: decoder.config._attn_implementation})
    token = _running.set(run)
    try:
        for c in configs:
            c._attn_implementation = VISITED
        yield run
    finally:
        for c in configs:
            c._attn_implementation = names[id(c)]
        _running.reset(token)


def attention(model: Any, tokens: Any, visit: Visit) -> None:
    decoder, layers = _decoder(model), len(DynamicCache(config=model.config).layers)
    with torch.no_grad(), _visiting(decoder, visit) as run:
        decoder(input_ids=_ids(model, tokens), use_cache=False)
    if run.seen != list(range(layers)):
        raise BadInput(
            f"{type(model).__name__}: attention was seen at the layers {run.seen}, not once at each of {layers}; it "
            "does not go through transformers' AttentionInterface."
        )


def tokens(model: Any, ids: np.ndarray) -> torch.Tensor:
    return _ids(model, ids)


def open_model(place: str, dtype: str = "float32") -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype)).eval()
        return model, AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as e:
        raise BadInput(f"transformers cannot open {place}: {e}") from e
    finally:
        if shown:
            logging.enable_progress_bar()


def generate(model: Any, tokenizer: Any, ids: Sequence[int], limit: int, cache: Any = None) -> list[int]:
    prompt = torch.tensor([list(ids)], device=_device(model))
    known = {} if cache is None else {_cache_word(type(model)): cache}
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False, **known
    )[0, len(ids) :].tolist()
    return out[:-1] if out and out[-1] == tokenizer.eos_token_id else out


class HeldLayer(LayerBytes, DynamicLayer):
    """A transformers cache layer that keeps its tokens in a `Held`."""

    def __init__(self, new: Held):
        self.held = new
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:  # what DynamicLayer keeps as tensors is made when asked for
        both = self.held.read()
        return None if both is None else both[0]

    @property
    def values(self) -> torch.Tensor | None:
        both = self.held.read()
        return None if both is None else both[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **more: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = more.get("kwargs", {}).get("position_ids")  # what the attention layer was called with
        self.held, both = self.held.append(key_states, value_states, positions)
        return both

    def get_seq_length(self) -> int:
        return self.held.length

    def reset(self) -> None:
        self.held, self.is_initialized = self.held.clear(), False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise BadInput(f"crop takes minus the number of tokens to remove; got {tokens_to_remove}.")
        self.held = self.held.trim(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.held = self.held.map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.held = self.held.map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self.held = self.held.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.held = self.held.map(lambda x: x.to(self.device, non_blocking=True))


class HeldCache(Cache):
    """A transformers cache of `HeldLayer`s, with the host's own layers where a window slides."""

    about: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the cache holds now."""
        return cache_bytes(self)


def full_layers(model: Any) -> list[int]:
    check(model)
    return [i for i, x in enumerate(DynamicCache(config=model.config).layers) if type(x) is DynamicLayer]


def weight(model: Any) -> torch.Tensor:
    return next(model.parameters())


def held_cache(
    model: Any, new: Callable[[int], Held], layers: Layers | None = None, about: Any = None, positions: Any = None
) -> HeldCache:
    own, full = DynamicCache(config=model.config).layers, full_layers(model)
    cache = HeldCache(layers=[HeldLayer(new(i)) if i in full else x for i, x in enumerate(own)])
    cache.about = about
    like = {"device": _device(model), "dtype": _dtype(model)}
    for i, kv in sorted((layers or {}).items()):
        cache.update(*(x.to(**like) for x in kv), i, kwargs={"position_ids": positions})
    return cache


def held(cache: Any) -> tuple[list[Held | None], Any]:
    if not isinstance(cache, HeldCache):
        raise BadInput(f"Expected a cache made by crosskv.make_cache, got {type(cache).__name__}.")
    return [layer.held if isinstance(layer, HeldLayer) else None for layer in cache.layers], cache.about


def put(cache: Any, layer: int, held: Held) -> None:
    cache.layers[layer].held = held


def register(restore: Callable[[Sequence[Any]], Held]) -> None:
    """transformers writes no caches to files."""


def cache_bytes(cache: Any) -> int:
    def one(layer: Any) -> int:
        if isinstance(layer, HeldLayer):
            return layer.held.nbytes
        return 0 if layer.keys is None else layer.keys.nbytes + layer.values.nbytes

    return sum(map(one, cache.layers))


def memory(reset: bool = False) -> int | None:
    if not torch.cuda.is_available():
        return host_peak(reset)
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()


def devices() -> list[str]:
    return ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
