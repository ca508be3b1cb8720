"""Caches that hold fewer bytes: one small frozen config per method, and the host's own kind of cache for a model.

    cache = crosskv.make_cache(model, crosskv.IntConfig(bits_keys=4, bits_values=4))     up to about 5 times smaller
    cache = crosskv.make_cache(model, crosskv.XKVConfig(basis, ratio=8))                 beyond: layers together
    transformers:  model.generate(ids, cache=cache)               (past_key_values= before 5.24)
    mlx-lm:        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

A method is a config and a kind of `backends.Held`; the hosts' caches know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crosskv import backends
from crosskv.backends import Array, Held
from crosskv.calibrated import Calibrated, contiguous
from crosskv.errors import BadInput, MatchedKVError, known_fields, nearest
from crosskv.latent import Codec, Coder, Group, Side, link
from crosskv.layout import ModelKVSpec
from crosskv.live import as_ids, measured
from crosskv.quant import PLANES
from crosskv.store import IntConfig, Store
from crosskv.subspace import BITS, Basis, allocate, check_rank, gathered, prompt_basis, runs

__all__ = ["IntConfig", "KVCacheBuilder", "KVCacheConfig", "XKVConfig", "make_cache", "nbytes"]

SCALE_BITS = 32
"""A scale and a lowest value in float16, for `block` tokens of one latent."""
KEYS = 4.0
"""What an error in the keys weighs against one in the values of the same share of their energy: measured on the family
with noise (docs/log.md, 2026-12-01), where single heads are between 2 and 10."""
MINMAX = (1.0, 1.0, 0.16, 0.029, 0.0062, 0.0015, 0.00035, 0.0000215)
"""Mean squared error with BITS bits between the least and the largest of 32 values of a normal variable of variance 1:
(range / (2^bits - 1))^2 / 12. One bit is never worth its scale."""


@known_fields
@dataclass(frozen=True)
class XKVConfig:
    """Layers of a group compressed together (xKV): sinks and tail exact, what lies between as packed latents.

    basis: a Calibrated (or its directory): fitted once per model, costs a prompt nothing and compresses every token
        as it comes: the one to use. "tokens": the paper's, fitted to each prompt, layers side by side. "features": the
        seed page's, fitted to each prompt, one basis of head dim for all heads and layers of a group.
    ratio: how many times fewer bytes than 2 per entry a compressed token takes. Sets ranks and bits; a basis that
        belongs to the prompt counts.
    group: layers per group, or "all" (a Calibrated has its own groups).
    rank_keys, rank_values, or energy (share of the sum of squares to keep): instead of ratio. None of all: full rank.
    bits: of a latent, 1 to 6 or 8; None keeps latents in the model's dtype; several numbers, (8, 4, 2, 0) say, are for
        equal shares of the latents, the strongest first. With ratio the bits are allocated, unless given.
    values: False compresses keys only.
    sinks, tail: first and last tokens that stay exact. block: tokens that are compressed at once; with "tokens" and
        "features" they share a scale per latent. first: the least tokens for a basis of their own.
    exact: the dtype of sinks and tail, None for the model's: "float16" halves them in a float32 model.
    max_tokens: refuse prompts beyond.
    """

    basis: Any = "tokens"
    ratio: float | None = None
    group: int | str = 4
    rank_keys: int | None = None
    rank_values: int | None = None
    energy: float | None = None
    bits: int | Sequence[int] | None = None
    values: bool = True
    sinks: int = 4
    tail: int = 16
    block: int = 32
    first: int = 256
    exact: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("sinks", 0), ("tail", 0), ("block", 1), ("first", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise BadInput(f"{name} must be an integer of at least {low}, got {value!r}.")
        if isinstance(self.basis, (str, Path)) and self.basis not in ("tokens", "features"):
            if not Path(self.basis).expanduser().is_dir():
                known = nearest(str(self.basis), ("tokens", "features"))
                raise BadInput(f"basis {str(self.basis)!r} is no directory of crosskv calibrate{known}")
            object.__setattr__(self, "basis", Calibrated.load(self.basis))
        if self.exact not in (None, "float16", "bfloat16", "float32"):
            raise BadInput(f"exact must be float16, bfloat16, float32 or None, got {self.exact!r}.")
        calibrated = isinstance(self.basis, Calibrated)
        if not calibrated and self.basis not in ("tokens", "features"):
            raise BadInput(f"basis must be a Calibrated, its directory, 'tokens' or 'features'; got {self.basis!r}.")
        if self.group != "all" and (not isinstance(self.group, int) or isinstance(self.group, bool) or self.group < 1):
            raise BadInput(f"group must be a number of layers, at least 1, or 'all'; got {self.group!r}.")
        if self.energy is not None and not (isinstance(self.energy, (int, float)) and 0 < self.energy <= 1):
            raise BadInput(f"energy must be above 0 and at most 1, got {self.energy!r}.")
        if self.ratio is not None and not (isinstance(self.ratio, (int, float)) and 1 < self.ratio < 1e4):
            raise BadInput(f"ratio must be above 1, got {self.ratio!r}.")
        for name in ("rank_keys", "rank_values"):
            if getattr(self, name) is not None:
                check_rank(getattr(self, name), None, name)
        if not self.values and self.rank_values is not None:
            raise BadInput("With values=False values are kept as they are; leave rank_values out.")
        sizes = [n for n in ("rank_keys", "rank_values", "energy") if getattr(self, n) is not None]
        if self.ratio is not None and sizes:
            raise BadInput(f"ratio sets ranks by itself; leave {', '.join(sizes)} out, or ratio.")
        if calibrated and (sizes or self.bits is not None or self.ratio is None or not self.values):
            raise BadInput("With a calibrated basis give ratio alone: it sets ranks and bits of keys and values.")
        _check_bits(self.bits, self.ratio is not None)


def _fitted(c: XKVConfig, keys: Sequence[Array], values: Sequence[Array]) -> tuple[Side, Side]:
    """Bases fitted to these tokens."""
    kind = "joint" if c.basis == "tokens" else "stacked"
    b = backends.of(keys[0])
    dtype = b.dtype_of(values[0]) if c.bits is None and c.ratio is None else "float16"
    rows = len(keys) * keys[0].shape[1] if kind == "stacked" else 1
    found = []
    for name in ("keys", "values") if c.values else ("keys",):
        layers, rank = (keys, c.rank_keys) if name == "keys" else (values, c.rank_values)
        x = gathered(layers, kind)
        most = _most(x.shape[-1], rows, x.shape[2], c) if c.ratio is not None else rank
        found.append(prompt_basis(x, kind, most, c.energy, dtype))
    if c.ratio is not None:
        sides = _within(found, rows, keys[0].shape[2], c)
    else:
        sides = [
            _shortened(Side(basis, Coder(_uniform(c.bits, basis.rank), None, c.block, dtype))) for basis, _ in found
        ]
    return sides[0], sides[1] if c.values else Side(None, Coder())


def _check_bits(bits: Any, ratio: bool) -> None:
    if bits is None:
        return
    shares = list(bits) if isinstance(bits, (tuple, list)) else [bits]
    for n in shares:
        if isinstance(n, bool) or n not in BITS or (n == 0 and isinstance(bits, int)):
            raise BadInput(f"bits must be of {[b for b in BITS if b]} (or 0 for a share to drop), got {n!r}.")
    if not shares or shares[0] == 0 or shares != sorted(shares, reverse=True):
        raise BadInput(f"bits of shares, the strongest latents first, must not rise nor all be 0; got {bits!r}.")
    if ratio and not isinstance(bits, int):
        raise BadInput("With ratio, bits must be one number, or left out to be allocated.")


def _uniform(bits: int | Sequence[int] | None, rank: int) -> tuple[tuple[int, int, int], ...]:
    if bits is None:
        return ()
    if isinstance(bits, int):
        return ((0, rank, bits),)
    shares = np.array_split(np.arange(rank), len(bits))
    return runs([b for share, b in zip(shares, bits, strict=True) for _ in share])


def _shortened(s: Side) -> Side:
    """Without the vectors of latents that get no bits."""
    if s.basis is None or not s.coder.runs:
        return s
    kept = s.coder.runs[-1][1]
    return replace(s, basis=replace(s.basis, vectors=backends.of(s.basis.vectors).owned(s.basis.vectors[..., :kept])))


def _most(features: int, rows: int, tokens: int, c: XKVConfig) -> int:
    """No more latents than this, with 2 bits each, could be paid for if all went to keys or all to values."""
    budget = (2 if c.values else 1) * 16 * features * rows * tokens / c.ratio  # type: ignore[operator]
    return max(1, int(budget / (16 * features + rows * tokens * (2 + SCALE_BITS / c.block))))


def _within(found: list[tuple[Basis, np.ndarray]], rows: int, tokens: int, c: XKVConfig) -> list[Side]:
    """Ranks and bits for bases of this prompt, so that bases, codes and scales stay within the ratio.

    rows: latent vectors per token. For every size of a ladder the strongest latents of keys and values are taken, and
    the bits that are left are allocated to them; the size with the least error wins.
    """
    features = found[0][0].vectors.shape[-2]
    budget = len(found) * 16 * features * rows * tokens / c.ratio
    found = [(basis, v * w / max(float(v.sum()), 1e-30)) for (basis, v), w in zip(found, (KEYS, 1.0), strict=False)]
    strongest = np.sort(np.concatenate([v for _, v in found]))[::-1]
    each = 16 * features + rows * tokens * SCALE_BITS / c.block
    means = 16 * features * sum(basis.mean is not None for basis, _ in found)
    best: tuple[float, list[np.ndarray]] | None = None
    for n in sorted({int(x) for x in np.geomspace(1, len(strongest), 16)}):
        kept = [max(1, int((v >= strongest[n - 1]).sum())) for _, v in found]
        left = (budget - sum(kept) * each - means) / (rows * tokens)
        if left < 8 * len(found):
            break
        if isinstance(c.bits, int):
            bits = [np.full(k, c.bits) for k in kept]
        else:
            tables = [np.outer(MINMAX, v[:k]) for (_, v), k in zip(found, kept, strict=True)]
            bits = _fitting(tables, left)
        if sum(map(_code_bits, bits)) > left:
            continue
        error = sum(
            float((np.asarray(MINMAX)[np.searchsorted(BITS, b)] * v[: len(b)]).sum() + v[len(b) :].sum())
            for b, (_, v) in zip(bits, found, strict=True)
        )
        if best is None or error < best[0]:
            best = (error, bits)
    if best is None:
        least = means + len(found) * (each + 8 * rows * tokens)
        raise BadInput(
            f"A ratio of {c.ratio:g} cannot be reached with a basis of its own for these {tokens} tokens; at most "
            f"{budget * c.ratio / least:.1f} can. Lower the ratio, or use a calibrated basis."
        )
    sides = []
    for (basis, _), b in zip(found, best[1], strict=True):
        sides.append(_shortened(Side(basis, Coder(runs(b), None, c.block))))
    return sides


def _fitting(tables: list[np.ndarray], budget: float) -> list[np.ndarray]:
    """Bits, most first, whose codes fit into the budget as they are packed: in whole bytes, one latent at least."""
    spare = 0.0
    for _ in range(8):
        bits = [np.sort(b)[::-1] for b in allocate(tables, max(0, budget - spare))]
        bits = [np.where(np.arange(len(b)) == 0, np.maximum(b, 2), b) for b in bits]
        over = sum(map(_code_bits, bits)) - budget
        if over <= 0:
            break
        spare += over
    return bits


def _code_bits(bits: np.ndarray) -> int:
    """Bits that the codes of a token take with these bits per latent: every plane is padded to a whole byte."""
    sizes = [(j - i) * w for i, j, n in runs(bits) for w in PLANES[n]]
    return sum(8 * -(-n // 8) for n in sizes)


def make_cache(model: Any, config: IntConfig | XKVConfig | None = None, cache: Any = None, mask: Any = None) -> Any:
    """A compressed cache for a live model of either host, for one prompt or batch: empty, or with the tokens of
    `cache`.

    transformers: a Cache for generate and forward, with left padding, beams, crop, reorder and deepcopy. mlx-lm: a list
    of caches for generate and generate_step, with trim. cache: the host's own one of this model (a prefilled one, or
    crosskv.handoff's), which is not changed; mask [B, T]: 0 where that is padding on the left. Layers with a sliding
    window keep the host's own cache. `cache.nbytes` (each cache's, in mlx-lm; `compress.nbytes` for the sum) is what is
    held; a calibrated basis, which all caches share, is not in it (`Calibrated.static_bytes`). Raises MatchedKVError
    for models with recurrent, shared or latent caches, IncompatibleModels for a basis of another model.
    """
    config = IntConfig() if config is None else config
    b = backends.of(model)
    if isinstance(config, IntConfig):
        new: Callable[[int], Held] = lambda _: Store(config)  # noqa: E731
    elif isinstance(config, XKVConfig):
        members = _members(model, config)
        new = members.__getitem__
    else:
        raise BadInput(f"Expected an IntConfig or XKVConfig, got {type(config).__name__}.")
    register(b)
    positions = None if mask is None else as_ids(mask).cumsum(1) - 1
    layers = None if cache is None else b.read(model, cache)
    if positions is not None and (layers is None or positions.shape[1] != layers[0][0].shape[-2]):
        raise BadInput("mask belongs to the tokens of cache: give both, of the same length.")
    return b.held_cache(model, new, layers, (measured(model), config), positions)


def _members(model: Any, config: XKVConfig) -> dict[int, Held]:
    """One member for every layer."""
    spec = measured(model)
    if any(r.lengths is not None for r in spec.ropes):
        raise MatchedKVError(
            "This model's RoPE changes with the length of the sequence (dynamic or longrope), so keys cannot be "
            "un-rotated once and for all. Use crosskv.IntConfig, which keeps them as they are."
        )
    own = set(backends.of(model).full_layers(model))
    out: dict[int, Held] = {}
    made: list[Group] = []
    for layers, codec in _codecs(model, spec, config):
        here = [i for i in layers if i in own]
        if isinstance(config.basis, Calibrated) and len(here) < len(layers):
            raise MatchedKVError(
                f"Layers {sorted(set(layers) - own)} have a sliding window, which keeps the host's own cache, and a "
                "calibrated basis has them in a group with others. Use basis='tokens'."
            )
        if here:
            group = Group(codec, here, [spec.ropes[i] for i in here], spec.n_kv_heads)
            out |= dict(zip(here, group.members(), strict=True))
            made.append(group)
    link(sorted(made, key=lambda g: g.layers[0]))
    return out


def _codecs(model: Any, spec: ModelKVSpec, c: XKVConfig) -> list[tuple[tuple[int, ...], Codec]]:
    """The groups of layers, and what becomes of their tokens."""
    sizes: dict[str, Any] = {n: getattr(c, n) for n in ("sinks", "tail", "block", "exact", "max_tokens")}
    if not isinstance(c.basis, Calibrated):
        own = backends.of(model).full_layers(model)
        size = len(own) if c.group == "all" else int(c.group)
        most = spec.head_dim if c.basis == "features" else spec.width * min(size, len(own))
        for name in ("rank_keys", "rank_values"):  # a last group that is smaller takes what it has
            if getattr(c, name) is not None:
                check_rank(getattr(c, name), most, name)
        # a basis cannot have more vectors than its first tokens; later ones have to make do with it
        ranks = [c.rank_keys, c.rank_values] if c.values else [c.rank_keys]
        wanted = 0 if c.ratio or c.energy or c.basis == "features" else max(r or most for r in ranks)
        codec = Codec(partial(_fitted, c), True, first=max(c.first, c.block, wanted), **sizes)
        return [(tuple(own[i] for i in g), codec) for g in contiguous(len(own), size)]
    c.basis.check_model(spec)
    assert c.ratio is not None
    like = backends.of(model).weight(model)
    bits = c.basis.bits(2 * 16 * spec.n_layers * spec.width / c.ratio)
    out = []
    for layers, pair, both in zip(c.basis.groups, c.basis.sides, bits, strict=True):
        sides = pair[0].side(both[0], like), pair[1].side(both[1], like)
        out.append((layers, Codec(lambda k, v, sides=sides: sides, False, **sizes)))  # type: ignore[misc]
    return out


def int_bytes(spec: ModelKVSpec, c: IntConfig, tokens: int) -> int:
    """What `tokens` tokens of one sequence take under plain integers in half precision, a full tail included."""
    exact = min(tokens, c.sinks + c.tail + c.group - 1)
    scale = 2 if c.scales != "float32" else 4
    channels = spec.n_kv_heads * -(-spec.head_dim // min(c.group, spec.head_dim))

    def codes(bits: int) -> int:
        return spec.n_kv_heads * sum(-(-spec.head_dim * plane // 8) for plane in PLANES[bits])

    token = codes(c.bits_keys) + codes(c.bits_values) + 2 * scale * (spec.width / c.group + channels)
    return round(spec.n_layers * ((tokens - exact) * token + exact * 2 * 2 * spec.width))


def register(host: Any = "mlx") -> None:
    """Let mlx_lm's load_prompt_cache read the files that save_prompt_cache made of IntConfig caches. make_cache does
    it as well: only a process that makes no cache before it reads a file has to call this.
    """
    (backends.host(host) if isinstance(host, str) else host).register(Store(IntConfig()).restore)


def nbytes(model: Any, cache: Any) -> int:
    """Bytes of the arrays that a cache of this model holds now, ours or the host's own."""
    return backends.of(model).cache_bytes(cache)


# ---- the seed page's names ----


@known_fields
@dataclass(frozen=True)
class KVCacheConfig:
    """The seed page's options of method "xkv": keys of the layers of a group in one basis, values as they are."""

    method: str = "xkv"
    head_dim: int | None = None
    xkv_group_size: int = 2
    xkv_rank: int | None = None
    xkv_energy_threshold: float = 0.95
    xkv_latent_bits: int = 4
    xkv_group_quant_size: int = 32
    xkv_max_ctx: int = 8192

    def __post_init__(self) -> None:
        if self.method != "xkv":
            raise BadInput(f"method must be 'xkv', got {self.method!r}{nearest(self.method, ['xkv'])} For plain "
                           "integers use crosskv.IntConfig, for all else crosskv.XKVConfig.")  # fmt: skip
        if self.head_dim is not None and self.xkv_rank is not None:
            check_rank(self.xkv_rank, self.head_dim, "xkv_rank")
        self.config()

    def config(self) -> XKVConfig:
        """The same as an XKVConfig."""
        return XKVConfig(
            "features",
            group=self.xkv_group_size,
            rank_keys=self.xkv_rank,
            energy=None if self.xkv_rank is not None else self.xkv_energy_threshold,
            bits=self.xkv_latent_bits,
            block=self.xkv_group_quant_size,
            values=False,
            max_tokens=self.xkv_max_ctx,
        )


class KVCacheBuilder:
    """The seed page's door to make_cache."""

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig) -> Any:
        """The host's own kind of cache, for one prompt: build another for the next one. Raises BadInput when head_dim
        is not the model's.
        """
        dim = measured(model).head_dim
        if config.head_dim not in (None, dim):
            raise BadInput(
                f"head_dim is {config.head_dim}, but this model has {dim}. Leave it out to take the model's."
            )
        return make_cache(model, config.config())
