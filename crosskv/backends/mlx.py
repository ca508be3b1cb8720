"""MLX arrays and mlx-lm models. The one file that knows how mlx-lm spells things (0.32)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np

from crosskv.backends import Held, LayerBytes, Layers, NotSaved, Rope, Visit
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


def _own_caches(model: Any) -> list[Any]:
    """As make_prompt_cache makes them, but for a make_cache that was set on this one model: it may be crosskv's."""
    from mlx_lm.models.cache import KVCache

    make = getattr(type(model), "make_cache", None)
    return [KVCache() for _ in model.layers] if make is None else make(model)


def check(model: Any) -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    caches = _own_caches(model)
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
    for i, kv in (past or {}).items():
        caches[i].update_and_fetch(*kv)
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


class _Enough(Exception):  # noqa: N818 (nothing went wrong)
    """The layers that were asked for have their keys and values."""


def _stopping(cache: Any) -> None:
    """Let this cache stop the model once it has been given its keys and values."""
    update = cache.update_and_fetch

    def stop(keys: mx.array, values: mx.array) -> None:
        update(keys, values)
        raise _Enough

    cache.update_and_fetch = stop


def capture(model: Any, tokens: Any, mask: Any = None, past: Layers | None = None, layers: int | None = None) -> dict:
    caches = _full_cache(model, mask, past)
    wanted = caches[:layers]
    if layers is not None:
        _stopping(wanted[-1])
    with suppress(_Enough):
        model(mx.array(np.asarray(tokens)), cache=caches)  # lazy: the logits are never computed
    mx.eval([c.state for c in wanted])
    return {i: c.keys_and_values() for i, c in enumerate(wanted)}


def install(model: Any, layers: Layers, mask: Any = None) -> Any:
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

    dtype, padding = _dtype(model), _padding(mask)
    caches = _own_caches(model)
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
    if cache is None:
        cache = _own_caches(model) if _padding(mask) is None else _full_cache(model, mask, None)
    out = model(mx.array(np.asarray(tokens)), cache=cache)
    mx.eval(out)
    return out


def value_and_grad(
    f: Callable[[dict[str, mx.array]], mx.array], params: dict[str, mx.array]
) -> tuple[float, dict[str, mx.array]]:
    value, grads = mx.value_and_grad(f)(params)
    mx.eval(value, grads)
    return float(value), grads


def attention(model: Any, tokens: Any, visit: Visit) -> None:
    own, here, seen = mx.fast.scaled_dot_product_attention, threading.get_ident(), 0

    def visited(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        nonlocal seen
        if threading.get_ident() == here:
            layer, seen = seen, seen + 1
            visit(layer, q, k, v, lambda keys, values: own(q, keys, values, **kwargs))
        return own(q, k, v, **kwargs)

    mx.fast.scaled_dot_product_attention = visited
    try:
        mx.eval(model(mx.array(np.asarray(tokens)), cache=_full_cache(model, None, None)))
    finally:
        mx.fast.scaled_dot_product_attention = own
    if seen != len(model.layers):
        raise BadInput(
            f"{describe(model)['kind']}: attention was seen {seen} times in {len(model.layers)} layers; it does not go "
            "through mx.fast.scaled_dot_product_attention once a layer."
        )


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

    cache = _own_caches(model) if cache is None else cache
    rest = mx.array(list(ids)[cache[0].offset :])
    out: list[int] = []
    for token, _ in generate_step(rest, model, max_tokens=limit, prompt_cache=cache):
        if int(token) in tokenizer.eos_token_ids:
            break
        out.append(int(token))
    return out


class _NoArraysError(BadInput, AttributeError):
    """hasattr says False."""


class _Packed:
    """What a cache of one sequence and one of a batch have in common.

    No attribute here may be called bits or group_size: mlx-lm would take the arrays for its own quantised ones.
    """

    @property
    def keys(self) -> mx.array:  # mlx-lm's own caches look here when they are to be batched with one of ours
        raise _NoArraysError(
            "A packed cache has no plain arrays of keys. In a batch with packed caches every prompt needs one of "
            "crosskv.make_cache: pass them, or set model.make_cache = lambda: crosskv.make_cache(model, config)."
        )

    _idx = keys

    def is_trimmable(self) -> bool:
        return True


class HeldKVCache(_Packed, LayerBytes):
    """An mlx-lm cache of one layer that keeps its tokens in a `Held`.

    mlx_lm's save_prompt_cache writes those of plain integers, and load_prompt_cache reads them in any process that has
    made a packed cache or called `crosskv.compress.register()`; it says KeyError: 'HeldKVCache' elsewhere. Layers that
    are compressed together are refused. In mlx_lm's batches a `HeldBatchCache` takes the rows in.
    """

    restore: Callable[[Sequence[Any]], Held]
    """What makes a `Held` of a saved state; see `register`."""

    def __init__(self, new: Held, about: Any = None):
        self.held, self.about = new, about

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> HeldKVCache:
        return cls(cls.restore(state))

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> HeldBatchCache:
        """A batch with these sequences as they are now; the caches are not changed by what happens to it."""
        for i, c in enumerate(caches):
            if not isinstance(c, HeldKVCache):
                raise BadInput(
                    f"Prompt {i} of this batch has a {type(c).__name__}, others a packed cache: give each a cache of "
                    "crosskv.make_cache."
                )
            if c.held.batch > 1:
                raise BadInput(f"The cache of prompt {i} holds {c.held.batch} sequences; in a batch each has its own.")
        return HeldBatchCache([c.held.fork() for c in caches], caches[0].about)

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

    def trim(self, n: int) -> int:
        length = self.offset
        self.held = self.held.trim(n)  # n itself: layers of a group are shorter once the first has trimmed all of them
        return min(n, length)

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


class HeldBatchCache(_Packed):
    """A layer's cache of an mlx-lm batch: one `Held` for each sequence, so that neither padding nor another sequence's
    tokens are ever packed with its own. Sequences are lined up, padded on the left, for attention alone.

    batch_generate and BatchGenerator make it out of `HeldKVCache`s: those passed as prompt_caches, or those that the
    model makes for every prompt after `model.make_cache = lambda: crosskv.make_cache(model, config)`.
    """

    def __init__(self, rows: Sequence[Held], about: Any = None):
        self.rows, self.about = list(rows), about
        self.skip = [0] * len(self.rows)  # left padding that is still to come
        self.coming: list[tuple[int, int]] | None = None  # tokens and right padding that are still to come

    @property
    def lengths(self) -> list[int]:
        return [r.length for r in self.rows]

    @property
    def offset(self) -> mx.array:
        """The position of each sequence's next column; below 0 for left padding."""
        return mx.array([n - s for n, s in zip(self.lengths, self.skip, strict=True)])

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say how many of the next columns of each sequence are padding. lengths: the tokens before right_padding."""
        if left_padding is not None:
            if not self.empty():
                raise BadInput("Left padding can only be added to an empty batch.")
            self.skip = [s + int(n) for s, n in zip(self.skip, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise BadInput("prepare needs lengths with right_padding: what is packed cannot be taken out again.")
            self.coming = [(int(n), int(p)) for n, p in zip(lengths, right_padding, strict=True)]

    def finalize(self) -> None:
        self.coming = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[0] != len(self.rows):
            raise BadInput(f"This cache holds {len(self.rows)} sequences, the new tokens are of {keys.shape[0]}.")
        before, n = max(self.lengths), keys.shape[-2]
        both = [self._update(i, keys[i : i + 1], values[i : i + 1], before, n) for i in range(len(self.rows))]
        k, v = (mx.concatenate(list(x)) for x in zip(*both, strict=True))
        return k, v

    def _update(self, i: int, keys: mx.array, values: mx.array, before: int, n: int) -> tuple[mx.array, ...]:
        """Sequence i with its share of n more columns, to the right of `before`."""
        skip = min(n, self.skip[i])
        self.skip[i] -= skip
        take = n - skip
        if self.coming is not None:
            tokens, padding = self.coming[i]
            take = min(take, tokens)
            self.coming[i] = tokens - take, padding - (n - skip - take)
            if self.coming[i][1] < 0:
                raise BadInput(
                    "More tokens than prepare has announced: call finalize when the padded prompts are read."
                )
        row = self.rows[i]
        if not take:  # nobody looks at what padding attends to
            return mx.zeros_like(_columns(keys, before, 0)), mx.zeros_like(_columns(values, before, 0))
        left = before - row.length + skip
        self.rows[i], both = row.append(*(x[..., skip : skip + take, :] for x in (keys, values)))
        return tuple(_columns(x, left, n - skip - take) for x in both)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        from mlx_lm.models.base import create_causal_mask

        before = max(self.lengths)
        padding = mx.array([before - m + s for m, s in zip(self.lengths, self.skip, strict=True)])
        return create_causal_mask(n, offset=before, left_padding=padding, window_size=window_size)

    def filter(self, batch_indices: Any) -> None:
        """Keep the sequences with these numbers."""
        keep = [int(i) for i in batch_indices]
        # One that is asked for twice goes two ways.
        self.rows = [self.rows[i].fork() if i in keep[:at] else self.rows[i] for at, i in enumerate(keep)]
        self.skip = [self.skip[i] for i in keep]
        self.coming = None if self.coming is None else [self.coming[i] for i in keep]

    def extend(self, other: Any) -> None:
        """Take over the sequences of another batch."""
        if not isinstance(other, HeldBatchCache):
            raise BadInput(
                f"A batch of packed caches cannot take in a {type(other).__name__}: give every prompt a cache of "
                "crosskv.make_cache."
            )
        if self.coming is not None or other.coming is not None:
            raise BadInput("Call finalize on both batches before they become one.")
        self.rows, self.skip = self.rows + other.rows, self.skip + other.skip

    def extract(self, idx: int) -> HeldKVCache:
        """Sequence idx as it is now; what follows in the batch does not change it."""
        return HeldKVCache(self.rows[idx].fork(), self.about)

    def trim(self, n: int) -> int:
        """Without the last n tokens of every sequence (at most all)."""
        longest = self.size()
        self.rows = [r.trim(n) for r in self.rows]
        return min(n, longest)

    @property
    def state(self) -> list[Any]:
        return [
            *(r.state() for r in self.rows),
            NotSaved("A batch is not saved as such: save what extract(row) gives."),
        ]

    def size(self) -> int:
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the layer holds now, of all sequences."""
        return sum(r.nbytes for r in self.rows)


def _columns(x: mx.array, left: int, right: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (left, right), (0, 0)]) if left or right else x


def full_layers(model: Any) -> list[int]:
    from mlx_lm.models.cache import KVCache

    check(model)
    return [i for i, c in enumerate(_own_caches(model)) if type(c) is KVCache]


def weight(model: Any) -> mx.array:
    return next(_weights(model))


def held_cache(
    model: Any, new: Callable[[int], Held], layers: Layers | None = None, about: Any = None, positions: Any = None
) -> list[Any]:
    if positions is not None and (positions[:, 0] < 0).any():
        raise BadInput("mlx-lm pads in its own batches: make one packed cache for every prompt and give them to it.")
    full = full_layers(model)
    caches = [HeldKVCache(new(i), about) if i in full else c for i, c in enumerate(_own_caches(model))]
    for i, kv in (layers or {}).items():
        caches[i].update_and_fetch(*(x.astype(_dtype(model)) for x in kv))
    mx.eval([c.state for c in caches])
    return caches


def held(cache: Any) -> tuple[list[Held | None], Any]:
    own = [c for c in cache if isinstance(c, HeldKVCache)] if isinstance(cache, (list, tuple)) else []
    if not own:
        raise BadInput(f"Expected a cache made by crosskv.make_cache, got {type(cache).__name__}.")
    return [c.held if isinstance(c, HeldKVCache) else None for c in cache], own[0].about


def put(cache: Any, layer: int, held: Held) -> None:
    cache[layer].held = held


def register(restore: Callable[[Sequence[Any]], Held]) -> None:
    from mlx_lm.models import cache

    HeldKVCache.restore = staticmethod(restore)
    cache.HeldKVCache = HeldKVCache  # load_prompt_cache finds classes by name among its own module's


def cache_bytes(cache: Any) -> int:
    return sum(c.nbytes for c in cache)


def memory(reset: bool = False) -> int | None:
    if reset:
        mx.reset_peak_memory()
        return mx.get_active_memory()
    return mx.get_peak_memory()


def devices() -> list[str]:
    return [str(mx.default_device()), str(mx.device_info().get("device_name", ""))]
