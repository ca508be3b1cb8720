"""The seam: everything that differs between array frameworks and model hosts, one module per framework.

Shared code is written with the operations that NumPy, PyTorch and MLX spell the same (`@ .T .swapaxes .reshape
concatenate stack`), and asks `of(x)` for the few that differ. The modules beside this file are discovered, never
listed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from crosskv.errors import BadInput, MissingExtra

Array = Any
"""An array of any backend: numpy.ndarray, torch.Tensor or mlx.core.array."""

Layers = Mapping[int, tuple[Array, Array]]
"""A cache as plain arrays: {layer: (keys, values)}, each [B, H, T, D], keys post-RoPE as the host stores them."""

Attend = Callable[[Array, Array], Array]
"""The host's own attention of one layer's queries over keys and values [B, H, T, D], with that layer's mask and scale:
[B, Hq, T, D]."""

Visit = Callable[[int, Array, Array, Array, Attend], None]
"""visit(layer, queries [B, Hq, T, D], keys [B, H, T, D], values [B, H, T, D], attend); keys and queries post-RoPE."""


@dataclass(frozen=True)
class Rope:
    """How one layer rotates its keys: pair i turns by position * inv_freq[i]; both outputs are multiplied by scale.

    inv_freq has one entry per rotated pair (so 2 * len(inv_freq) of the D channels rotate); empty means no rotation
    (NoPE). lengths: None when the frequencies never change, else the shortest and longest sequence for which they are
    these ones (dynamic NTK and longrope change them with the length of the sequence).
    """

    inv_freq: tuple[float, ...] = ()
    scale: float = 1.0
    interleaved: bool = False
    lengths: tuple[int, int] | None = None


class Arrays(Protocol):
    """What a framework has to offer for arrays. `dtype` is a name: float16, bfloat16, float32, float64."""

    xp: Any

    def dtype_of(self, x: Array) -> str: ...

    def cast(self, x: Array, dtype: str) -> Array: ...

    def to_numpy(self, x: Array) -> np.ndarray:
        """The same values in host memory, without a copy where that is possible; bfloat16 becomes float32."""
        ...

    def from_numpy(self, a: np.ndarray, like: Array | None = None, dtype: str | None = None) -> Array:
        """`a` on the device of `like`; dtype: the array's own (uint16 holds bfloat16 bits) unless given."""
        ...

    def move(self, x: Array, like: Array) -> Array:
        """x on the device of `like`."""
        ...

    def local(self, x: Array) -> Array:
        """x where arithmetic on it is fastest: as a NumPy array when it lies in host memory, else x itself.

        One thread pool instead of two that wait for each other, and on Linux the BLAS of NumPy instead of MLX's, which
        is 20 to 50 times slower.
        """
        ...

    def amin(self, x: Array, axis: int) -> Array:
        """The smallest along an axis, which stays with length 1; NaN where there is one."""
        ...

    def amax(self, x: Array, axis: int) -> Array: ...

    def owned(self, x: Array) -> Array:
        """A copy of x in memory of its own: a slice may keep alive the whole array that it was cut from."""
        ...


class Held(Protocol):
    """The keys and values of one layer, however they are kept: every operation returns what is to be used from then
    on.

    Adapters know a compressed cache through this alone. Two kinds: `store.Store`, a value, and `latent.Member`, one
    layer's part in a group of layers, which changes in place.
    """

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        ...

    @property
    def batch(self) -> int:
        """Sequences held; 0 before the first token."""
        ...

    def append(self, keys: Array, values: Array, positions: Any = None) -> tuple[Held, tuple[Array, Array]]:
        """With [B, H, T, D] more tokens; and all keys and values for this step's attention.

        positions: integers [T] or [B, T] with which the keys were rotated; None: as many as the tokens before.
        """
        ...

    def read(self) -> tuple[Array, Array] | None:
        """All keys and values; None before the first token."""
        ...

    def trim(self, n: int) -> Held:
        """Without the last n tokens (at most all)."""
        ...

    def map(self, f: Callable[[Array], Array]) -> Held:
        """With f applied to every array: other rows of the batch (first axis), another device."""
        ...

    def clear(self) -> Held:
        """As before the first token."""
        ...

    def fork(self) -> Held:
        """A copy that goes its own way; the members of a group get the same one, each asking as often as the others."""
        ...

    def state(self) -> list[Any]:
        """Arrays, None and numbers, always as many; `restore` of the same kind has the same tokens again. With a
        NotSaved among them it is for evaluating only."""
        ...

    def restore(self, state: Sequence[Any]) -> Held: ...


class LayerBytes:
    """The seed page's byte counts of one layer's cache, for a cache that keeps its tokens in a group (`held`)."""

    held: Any

    @property
    def compressed_key_bytes(self) -> int:
        return self.held.compressed_key_bytes

    @property
    def compressed_value_bytes(self) -> int:
        return self.held.compressed_value_bytes

    @property
    def shared_basis_bytes(self) -> int:
        return self.held.shared_basis_bytes

    @property
    def fp16_key_bytes(self) -> int:
        return self.held.fp16_key_bytes

    @property
    def value_fp16_bytes(self) -> int:
        return self.held.value_fp16_bytes


class NotSaved:
    """Part of a state that is not the whole story. A host that writes states to files finds something that it cannot
    write, and the sentence in which it means to say so raises ours instead."""

    def __init__(self, why: str):
        self.why = why

    def __format__(self, spec: str) -> str:
        raise BadInput(self.why)


class Models(Protocol):
    """What a model host has to offer. Tokens are [B, T] integers (lists or NumPy); mask [B, T] is 0 for padding."""

    def describe(self, model: Any) -> dict[str, Any]:
        """Who the model is: name, kind (its class), dtype, vocab (rows of the embedding), config (hash of it)."""
        ...

    def check(self, model: Any) -> None:
        """Raise MatchedKVError if the host would build anything but plain or sliding-window K/V caches."""
        ...

    def ropes(self, model: Any, length: int) -> tuple[Rope, ...]:
        """Every rotary embedding found in the model, as it stands for `length` tokens, in a fixed order."""
        ...

    def probe(self, model: Any, tokens: Sequence[int], position: int) -> dict[int, tuple[Array, Array]]:
        """The cache entry [B, H, 1, D] that each token alone leaves at `position`: attention to itself only, so that
        everything but the rotation of the keys is independent of the position."""
        ...

    def capture(
        self, model: Any, tokens: Any, mask: Any = None, past: Layers | None = None, layers: int | None = None
    ) -> dict:
        """Prefill `tokens` after `past` (never changed) and return the whole cache, sliding-window layers in full.

        layers: only that many first layers (`past` may hold no others); nothing beyond the last one's keys and values
        is computed.
        """
        ...

    def install(self, model: Any, layers: Layers, mask: Any = None) -> Any:
        """A new cache of the host's own kind that holds `layers`, in the model's dtype and on its device."""
        ...

    def read(self, model: Any, cache: Any) -> dict[int, tuple[Array, Array]]:
        """The arrays of a host's cache; BadInput if a window has already dropped tokens."""
        ...

    def logits(self, model: Any, tokens: Any, cache: Any = None, mask: Any = None) -> Array:
        """[B, T, vocab] for `tokens` read on top of `cache`, which grows by them as the host does it."""
        ...

    def attention(self, model: Any, tokens: Any, visit: Visit) -> None:
        """Run the model once over `tokens`, and call `visit` at every layer's attention; the run itself goes on with
        the model's own keys and values. BadInput for a model whose attention does not pass where it can be seen once
        a layer."""
        ...

    def value_and_grad(
        self, f: Callable[[dict[str, Array]], Array], params: dict[str, Array]
    ) -> tuple[float, dict[str, Array]]:
        """f(params), a scalar, and its gradients; `logits` and `install` inside f pass them on."""
        ...

    def tokens(self, model: Any, ids: np.ndarray) -> Array:
        """Token ids [B, T] as the host's generate wants them."""
        ...

    def open_model(self, place: str, dtype: str = "float32") -> tuple[Any, Any]:
        """(model, tokenizer) from a directory or a hub name, ready to run, weights in `dtype`."""
        ...

    def generate(self, model: Any, tokenizer: Any, ids: Sequence[int], limit: int, cache: Any = None) -> list[int]:
        """The host's own greedy generation after the prompt `ids`, of which `cache` holds all but the last ones: at
        most `limit` new tokens, ended by the end-of-text token (not returned)."""
        ...

    def full_layers(self, model: Any) -> list[int]:
        """The layers that keep all their tokens (no sliding window)."""
        ...

    def weight(self, model: Any) -> Array:
        """Any weight of the model: what lies on its device."""
        ...

    def held_cache(
        self, model: Any, new: Callable[[int], Held], layers: Layers | None = None, about: Any = None,
        positions: Any = None,
    ) -> Any:  # fmt: skip
        """A cache of the host's own kind whose layer i keeps its tokens in new(i); sliding-window layers stay the
        host's own. It starts with the tokens of `layers`, at `positions` [B, T]; `about` goes along with it."""
        ...

    def held(self, cache: Any) -> tuple[list[Held | None], Any]:
        """What each layer of a `held_cache` is kept in (None: the host's own way), and its `about`. BadInput for
        another cache."""
        ...

    def put(self, cache: Any, layer: int, held: Held) -> None:
        """Let a layer of a `held_cache` keep its tokens in `held`."""
        ...

    def register(self, restore: Callable[[Sequence[Any]], Held]) -> None:
        """Let the host's own function that reads files of caches make ours, with what `restore` makes of a state."""
        ...

    def cache_bytes(self, cache: Any) -> int:
        """Bytes of the arrays that any cache of this host holds."""
        ...

    def memory(self, reset: bool = False) -> int | None:
        """The most bytes in use since the last reset, on the device or in the process (`host_peak`); with reset, those
        in use now."""
        ...

    def devices(self) -> list[str]:
        """The devices that this host can compute on."""
        ...


def host_peak(reset: bool = False) -> int | None:
    """The process's peak of resident memory since the last reset, in bytes; with reset, what is resident now. None
    where the system does not tell (it is Linux that does)."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(facts["VmRSS" if reset else "VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


class Backend(Arrays, Models, Protocol):
    """A framework that also hosts models."""


def names() -> list[str]:
    """The backends that this installation knows, installed or not."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(name: str) -> Backend:
    """The backend module `name`. Raises MissingExtra when its framework is not installed."""
    try:
        return cast(Backend, importlib.import_module(f"{__name__}.{name}"))
    except ImportError as e:
        raise MissingExtra(f"The {name} backend needs {e.name}: pip install 'crosskv[{name}]'.") from e


def host(name: str) -> Backend:
    """The backend `name`, which has to host models. Raises BadInput for another name, MissingExtra as load does."""
    hosts = [n for n in names() if n != "numpy"]
    if name not in hosts:
        raise BadInput(f"Expected one of the hosts {', '.join(hosts)}; got {name!r}.")
    return load(name)


@functools.cache
def _of_type(kind: type) -> Backend | None:
    roots = {c.__module__.removeprefix(f"{__name__}.").split(".")[0] for c in kind.__mro__}
    return next((load(n) for n in names() if n in roots), None)


def of(x: Any) -> Backend:
    """The backend that an array or a model belongs to. Raises BadInput for anything else."""
    backend = _of_type(type(x))  # type: ignore[arg-type]
    if backend is None:
        raise BadInput(
            f"Expected an array or a model of one of {names()}, got {type(x).__module__}.{type(x).__name__}."
        )
    return backend
