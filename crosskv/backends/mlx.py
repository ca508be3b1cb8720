"""MLX arrays and mlx-lm models. The one file that knows how mlx-lm spells things (0.32)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from crosskv.backends import Held, Layers, Rope
from crosskv.errors import BadInput, MatchedKVError

xp = mx


# ---- arrays ----


def dtype_of(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")


def cast(x: mx.array, dtype: str) -> mx.array:
    return x if dtype_of(x) == dtype else x.astype(getattr(mx, dtype))


def to_numpy(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def from_numpy(a: np.ndarray, like: mx.array | None = None, dtype: str | None = None) -> mx.array:
    x = mx.array(np.ascontiguousarray(a))
    x = x.view(mx.bfloat16) if a.dtype == np.uint16 else x
    return x if dtype is None else cast(x, dtype)


def move(x: mx.array, like: mx.array) -> mx.array:
    return x  # memory is unified


def local(x: mx.array) -> Any:
    return to_numpy(x) if mx.default_device() == mx.Device(mx.cpu) else x


def amin(x: mx.array, axis: int) -> mx.array:
    return mx.min(x, axis=axis, keepdims=True)


def amax(x: mx.array, axis: int) -> mx.array:
    return mx.max(x, axis=axis, keepdims=True)


def owned(x: mx.array) -> mx.array:
    return mx.contiguous(x)  # copies unless x fills its buffer to 16 kB


# ---- models ----


def _weights(model: Any) -> Iterator[mx.array]:
    from mlx.utils import tree_flatten

    return (v for _, v in tree_flatten(model.parameters()))


def _dtype(model: Any) -> Any:
    return next(w.dtype for w in _weights(model) if mx.issubdtype(w.dtype, mx.floating))


def _embedding(model: Any) -> Any:
    return next(m for n, m in model.named_modules() if n.endswith(("embed_tokens", "wte", "embed_in", "embeddings")))


def describe(model: Any) -> dict[str, Any]:
    args = getattr(model, "args", None)
    config = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else {}
    return {
        "framework": "mlx",
        "name": str(getattr(model, "name", "") or ""),
        "revision": "",
        "kind": f"{type(model).__module__.rsplit('.', 1)[-1]}.{type(model).__name__}",
        "dtype": str(_dtype(model)).removeprefix("mlx.core."),
        "vocab": int(_embedding(model)["weight"].shape[0]),
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }


def check(model: Any) -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(model)
    if len(caches) != len(model.layers):
        raise MatchedKVError(
            f"{describe(model)['kind']}: {len(model.layers)} layers share {len(caches)} caches. "
            "Only layers that each hold their own keys and values can be mapped."
        )
    for i, c in enumerate(caches):
        if type(c) not in (KVCache, RotatingKVCache):
            raise MatchedKVError(
                f"{describe(model)['kind']}: layer {i} keeps a {type(c).__name__}. Only layers that each hold their "
                "own keys and values can be mapped (no recurrent state, no shared or latent caches)."
            )


def ropes(model: Any, length: int) -> tuple[Rope, ...]:
    found: dict[Rope, None] = {}
    for _, m in model.named_modules():
        rope = _rope(m, length)
        if rope is not None:
            found[rope] = None
    return tuple(found)


def _rope(m: Any, length: int) -> Rope | None:
    """The frequencies that one rotary module hands to mx.fast.rope, in its own float32 arithmetic."""
    dims = getattr(m, "dims", getattr(m, "dim", None))
    if hasattr(m, "_freqs"):
        scale = float(getattr(m, "mscale", getattr(m, "_scale", 1.0)))
        return Rope(_floats(1.0 / m._freqs.astype(mx.float32)), scale)
    if not (isinstance(dims, int) and hasattr(m, "base")):
        return None
    base, lengths = m.base, None
    if hasattr(m, "factor"):  # dynamic NTK: the base grows with the length of the sequence
        limit = m.max_position_embeddings
        base = base * ((m.factor * max(length, limit) / limit) - (m.factor - 1)) ** (dims / (dims - 2))
        lengths = (length, length)
    freq = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * (np.log(base) / (dims // 2)))
    return Rope(_floats(freq * getattr(m, "scale", 1.0)), lengths=lengths)


def _floats(x: mx.array) -> tuple[float, ...]:
    return tuple(np.asarray(x).tolist())


class _ProbeCache:
    """An empty cache that says it is `offset` tokens long, and keeps what it is given."""

    def __init__(self, offset: int):
        self.offset = offset
        self.got: Any = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.got = (keys, values)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def probe(model: Any, tokens: Sequence[int], position: int) -> dict[int, tuple[mx.array, mx.array]]:
    caches = [_ProbeCache(position) for _ in model.layers]
    mx.eval(model(mx.array(list(tokens))[:, None], cache=caches))
    return {i: c.got for i, c in enumerate(caches)}


def _full_cache(model: Any, mask: np.ndarray | None, past: Layers | None) -> list[Any]:
    """Caches that keep all tokens, also in sliding-window layers (the model still masks those)."""
    from mlx_lm.models.cache import BatchKVCache, KVCache

    padding = _padding(mask)
    caches = [KVCache() if padding is None else BatchKVCache(padding) for _ in model.layers]
    for i, c in enumerate(caches if past else []):
        c.update_and_fetch(*past[i])  # type: ignore[index]
    return caches


def _padding(mask: Any) -> list[int] | None:
    """Left padding per row, or None when there is none. mlx-lm knows no other mask."""
    if mask is None:
        return None
    mask = np.asarray(mask).astype(bool)
    if not (np.diff(mask.astype(np.int8), axis=-1) >= 0).all():
        raise BadInput("mlx-lm batches are padded on the left: each row of the mask must be zeros, then ones.")
    padding = (~mask).sum(-1)
    return padding.tolist() if padding.any() else None


def capture(model: Any, tokens: Any, mask: Any = None, past: Layers | None = None) -> dict:
    caches = _full_cache(model, mask, past)
    model(mx.array(np.asarray(tokens)), cache=caches)  # lazy: the logits are never computed
    mx.eval([c.state for c in caches])
    return {i: c.keys_and_values() for i, c in enumerate(caches)}


def install(model: Any, layers: Layers, mask: Any = None) -> Any:
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache, make_prompt_cache

    dtype, padding = _dtype(model), _padding(mask)
    caches = make_prompt_cache(model)
    if padding is not None:
        caches = [
            BatchRotatingKVCache(c.max_size, padding) if isinstance(c, RotatingKVCache) else BatchKVCache(padding)
            for c in caches
        ]
    for i, c in enumerate(caches):
        k, v = (x.astype(dtype) for x in layers[i])
        c.update_and_fetch(k, v)
    mx.eval([c.state for c in caches])
    return caches


def read(model: Any, cache: Any) -> dict[int, tuple[mx.array, mx.array]]:
    layers = {}
    for i, c in enumerate(cache):
        if c.empty() or (hasattr(c, "max_size") and c.offset > c.keys.shape[2]):
            raise BadInput(
                f"Layer {i} of this cache no longer holds all of its tokens (sliding window, or empty). "
                "Pass the token ids and let crosskv prefill, or prefill into a plain KVCache per layer."
            )
        layers[i] = c.keys_and_values()
    return layers


def logits(model: Any, tokens: Any, cache: Any = None, mask: Any = None) -> mx.array:
    from mlx_lm.models.cache import make_prompt_cache

    if cache is None:
        cache = make_prompt_cache(model) if _padding(mask) is None else _full_cache(model, mask, None)
    out = model(mx.array(np.asarray(tokens)), cache=cache)
    mx.eval(out)
    return out


def tokens(model: Any, ids: np.ndarray) -> mx.array:
    return mx.array(ids)


def open_model(place: str, dtype: str = "float32") -> tuple[Any, Any]:
    import mlx_lm

    try:
        model, tokenizer, *_ = mlx_lm.load(place)
    except (OSError, ValueError) as e:
        raise BadInput(f"mlx-lm cannot open {place}: {e}") from e
    model.set_dtype(getattr(mx, dtype))
    return model, tokenizer


def generate(model: Any, tokenizer: Any, ids: Sequence[int], limit: int, cache: Any = None) -> list[int]:
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model) if cache is None else cache
    rest = mx.array(list(ids)[cache[0].offset :])
    out: list[int] = []
    for token, _ in generate_step(rest, model, max_tokens=limit, prompt_cache=cache):
        if int(token) in tokenizer.eos_token_ids:
            break
        out.append(int(token))
    return out


class HeldKVCache:
    """An mlx-lm cache of one layer that keeps its tokens in a `Held`.

    No attribute here may be called bits or group_size: mlx-lm would take the arrays for its own quantised ones.
    """

    def __init__(self, new: Held):
        self.held = new

    @property
    def offset(self) -> int:
        return self.held.length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held, both = self.held.append(keys, values)
        return both

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        both = self.held.read()
        if both is None:
            raise BadInput("This cache is empty.")
        return both

    @property
    def state(self) -> list[Any]:
        return self.held.state()

    @state.setter
    def state(self, v: list[Any]) -> None:
        self.held = self.held.restore(v)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(n, offset=self.offset, return_array=return_array, window_size=window_size)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        done = min(n, self.offset)
        self.held = self.held.trim(n)  # not done: layers that share a group have to ask for the same
        return done

    def select(self, rows: mx.array) -> None:
        """Keep (or repeat, or reorder) the given rows of the batch."""
        self.held = self.held.map(lambda x: x[rows])

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the layer holds now."""
        return self.held.nbytes


def full_layers(model: Any) -> list[int]:
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    check(model)
    return [i for i, c in enumerate(make_prompt_cache(model)) if type(c) is KVCache]


def weight(model: Any) -> mx.array:
    return next(_weights(model))


def held_cache(model: Any, new: Callable[[int], Held], layers: Layers | None = None) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    full = full_layers(model)
    caches = [HeldKVCache(new(i)) if i in full else c for i, c in enumerate(make_prompt_cache(model))]
    for i, kv in (layers or {}).items():
        caches[i].update_and_fetch(*(x.astype(_dtype(model)) for x in kv))
    mx.eval([c.state for c in caches])
    return caches


def cache_bytes(cache: Any) -> int:
    return sum(c.nbytes for c in cache)


def devices() -> list[str]:
    return [str(mx.default_device()), str(mx.device_info().get("device_name", ""))]
