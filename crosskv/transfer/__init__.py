"""Caches of one model to caches of another, arrays in and arrays out: fit_mapper and transfer_cache.

    K_t = rotate(unrotate(K_s) W_K + b_K)        V_t = V_s W_V + b_V        (paper sec. 3)

with K_s, V_s the k selected source layers side by side; and more than the paper when MapperConfig says so: both as
features for both, the target's own first layers as features, one latent for all. crosskv.fit and crosskv.handoff do the
same for live models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosskv import backends, rope, select
from crosskv.backends import Array, Layers
from crosskv.errors import BadInput, MatchedKVError
from crosskv.layout import ModelKVSpec, check_finite, check_layers, to_heads, to_rows, with_batch
from crosskv.mapper import LayerMap, Mapper, MapperConfig, Packed, Weights, pack
from crosskv.moments import BLOCK_ROWS, Moments, moments
from crosskv.ridge import Affine, r2_of_heads, reduced_rank, ridge

__all__ = ["Mapper", "MapperConfig", "MatchedKVError", "ModelKVSpec", "fit_mapper", "load_mapper", "transfer_cache"]

HOLD_OUT = 10
"""One piece of rows in HOLD_OUT is held out."""
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
KS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)

Rows = tuple[tuple[Array, Array], ...]
"""(features, outputs) of every regression, one row per token: one for keys and one for values, or one for both.

Features: of all source layers, then of the exact target layers; for both, those of keys before those of values.
Outputs: of the mapped target layers.
"""


# ---- rows ----


def working_dtype(x: Array) -> str:
    """Arithmetic is float32, and float64 for float64 arrays."""
    return "float64" if backends.of(x).dtype_of(x) == "float64" else "float32"


def local(kv: Layers) -> dict[int, tuple[Array, Array]]:
    """The same cache where arithmetic on it is fastest (see backends.Arrays.local)."""
    return {i: (backends.of(k).local(k), backends.of(v).local(v)) for i, (k, v) in kv.items()}


class _Unrotate:
    """Layers of one model to rows [B, T, P] of pre-RoPE keys and of values. One table per distinct rope."""

    def __init__(self, spec: ModelKVSpec, positions: np.ndarray, content_space: bool, like: Array):
        self.spec, self.positions, self.content_space, self.like = spec, positions, content_space, like
        self.dtype = working_dtype(like)
        self.tables: dict[backends.Rope, rope.Tables] = {}

    def table(self, layer: int) -> rope.Tables:
        r = self.spec.ropes[layer]
        if r not in self.tables:
            self.tables[r] = rope.tables(r, self.positions, self.like, self.dtype)
        return self.tables[r]

    def rows(self, layer: int, kv: tuple[Array, Array]) -> tuple[Array, Array]:
        b = backends.of(self.like)
        k, v = (b.cast(x, self.dtype) for x in kv)
        if self.content_space:
            k = rope.unrotate(k, self.table(layer), self.spec.ropes[layer].interleaved)
        return to_rows(k), to_rows(v)

    def heads(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """The inverse of rows."""
        k, v = to_heads(k, self.spec.n_kv_heads), to_heads(v, self.spec.n_kv_heads)
        if self.content_space:
            k = rope.rotate(k, self.table(layer), self.spec.ropes[layer].interleaved)
        return k, v


def rows_of(
    layers: Layers, spec: ModelKVSpec, positions: np.ndarray, config: MapperConfig
) -> list[tuple[Array, Array]]:
    """(pre-RoPE keys, values) [B, T, P] of every layer."""
    layers = local(layers)
    un = _Unrotate(spec, positions, config.content_space, layers[0][0])
    return [un.rows(i, layers[i]) for i in sorted(layers)]


def heads_of(
    rows: Mapping[int, tuple[Array, Array]], spec: ModelKVSpec, positions: np.ndarray, config: MapperConfig
) -> dict[int, tuple[Array, Array]]:
    """The inverse, layer by layer, where the arrays are."""
    re = _Unrotate(spec, positions, config.content_space, next(iter(rows.values()))[0])
    return {i: re.heads(i, k, v) for i, (k, v) in rows.items()}


def paired_rows(
    source_kv: Layers, target_kv: Layers, source: ModelKVSpec, target: ModelKVSpec, positions: np.ndarray,
    config: MapperConfig,
) -> Rows:  # fmt: skip
    """Rows of caches over the same tokens: [B, H, T, D] per layer to [B * T, all layers' features]."""
    theirs, own = rows_of(source_kv, source, positions, config), rows_of(target_kv, target, positions, config)
    x, y = theirs + own[: config.exact_layers], own[config.exact_layers :]
    if config.features == "both":
        return ((_flat([*_side(x, 0), *_side(x, 1)]), _flat([*_side(y, 0), *_side(y, 1)])),)
    return tuple((_flat(_side(x, kind)), _flat(_side(y, kind))) for kind in (0, 1))


def _side(pairs: Sequence[tuple[Array, Array]], kind: int) -> list[Array]:
    """The keys (0) or the values (1)."""
    return [pair[kind] for pair in pairs]


def _flat(parts: list[Array]) -> Array:
    """Side by side, one row per token."""
    x = backends.of(parts[0]).xp.concatenate(parts, -1)
    return x.reshape(-1, x.shape[-1])


# ---- moments of a pair ----


@dataclass
class Stats:
    """The moments of a pair of models so far, one per pair of `Rows`, of the training rows and of the held-out rows.

    Rows are gathered until they make a block worth multiplying; flush() takes in what is left.
    """

    train: tuple[Moments, ...] = ()
    held: tuple[Moments, ...] = ()
    pending: dict[bool, list[Rows]] = field(default_factory=lambda: {False: [], True: []})

    def add(self, rows: Rows, held: bool) -> None:
        self.pending[held].append(rows)
        if sum(r[0][0].shape[0] for r in self.pending[held]) >= BLOCK_ROWS:
            self._take(held)

    def copy(self) -> Stats:
        """The same moments and rows; adding to the copy leaves this one as it is."""
        return Stats(self.train, self.held, {held: list(rows) for held, rows in self.pending.items()})

    def flush(self) -> Stats:
        for held in (False, True):
            self._take(held)
        return self

    def _take(self, held: bool) -> None:
        parts, self.pending[held] = self.pending[held], []
        if not parts:
            return
        new = tuple(moments([x for x, _ in blocks], [y for _, y in blocks]) for blocks in zip(*parts, strict=True))
        old = self.held if held else self.train
        total = tuple(a + b for a, b in zip(old, new, strict=True)) if old else new
        if held:
            self.held = total
        else:
            self.train = total

    def pairs(self) -> list[tuple[Moments, Moments]]:
        return list(zip(self.train, self.held, strict=True))


def finite_rows(rows: Rows) -> bool:
    """Whether sums over all rows are finite: one cheap look that finds any NaN or Inf."""
    return all(bool(np.isfinite(backends.of(x).to_numpy(x.sum(0))).all()) for pair in rows for x in pair)


# ---- fit ----


def fit_mapper(
    source_kv: Layers,
    target_kv: Layers,
    source_spec: ModelKVSpec,
    target_spec: ModelKVSpec,
    positions: Any = None,
    config: MapperConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapper:
    """Fit a mapper on caches of the same tokens in both models.

    source_kv, target_kv: {layer: (keys, values)}, [H, N, D] or [B, H, T, D], any float dtype, arrays of any backend,
    keys post-RoPE as the models store them. positions: of the tokens, [T] or [B, T]; default 0 ... T - 1.
    progress(done, total) is called as blocks of rows are read. One block of rows in ten is held out for the scores.
    Raises MatchedKVError when heads or head dims differ, BadInput for anything wrong with the arrays or too few of
    them.
    """
    config = MapperConfig() if config is None else config
    check_pair(source_spec, target_spec, config)
    (source_kv, _), (target_kv, _) = with_batch(source_kv), with_batch(target_kv)
    sizes = check_layers(source_kv, source_spec, "source"), check_layers(target_kv, target_spec, "target")
    if sizes[0] != sizes[1]:
        raise BadInput(
            f"Source and target must have read the same tokens; they have {sizes[0]} and {sizes[1]} (batch, tokens)."
        )
    batch, length = sizes[0]
    places = as_positions(positions, batch, length)
    pieces = _pieces(places, batch, config)
    stats = Stats()
    for i, (row, cut) in enumerate(pieces):
        at = places[row, cut] if places.ndim == 2 else places[cut]
        part = [{n: tuple(x[row : row + 1, :, cut] for x in kv[n]) for n in kv} for kv in (source_kv, target_kv)]
        rows = paired_rows(part[0], part[1], source_spec, target_spec, at, config)
        if not finite_rows(rows):
            check_finite(source_kv, "source")
            check_finite(target_kv, "target")
        stats.add(rows, held=i % HOLD_OUT == HOLD_OUT // 2)
        if progress is not None:
            progress(i + 1, len(pieces))
    return solve(stats.flush(), source_spec, target_spec, config)


def as_positions(positions: Any, batch: int, length: int) -> np.ndarray:
    """Positions as integers [T] or [B, T]; default 0 ... T - 1."""
    if positions is None:
        return np.arange(length)
    try:
        p = np.asarray(backends.of(positions).to_numpy(positions))
    except BadInput:
        p = np.asarray(positions)
    if p.shape not in ((length,), (batch, length)) or not np.issubdtype(p.dtype, np.integer):
        raise BadInput(
            f"positions must be integers, one per token, of shape ({length},) or ({batch}, {length}); "
            f"got {p.dtype} {p.shape}."
        )
    if p.size and p.min() < 0:
        raise BadInput(f"positions must not be negative, got {p.min()}.")
    return p


def _pieces(places: np.ndarray, batch: int, config: MapperConfig) -> list[tuple[int, slice]]:
    """(batch row, slice of tokens) of every piece: contiguous but for the stride, at least twenty of them if rows
    allow.
    """
    each = [_kept(places if places.ndim == 1 else places[b], config.skip) for b in range(batch)]
    rows = sum(-(-(stop - start) // config.stride) for start, stop in each)
    step = min(1024, max(1, -(-rows // (2 * HOLD_OUT)))) * config.stride
    return [
        (b, slice(i, min(i + step, stop), config.stride))
        for b, (start, stop) in enumerate(each)
        for i in range(start, stop, step)
    ]


def _kept(positions: np.ndarray, skip: int) -> tuple[int, int]:
    """The range of tokens from position `skip` on."""
    if (np.diff(positions) < 0).any():
        raise BadInput("To fit, the positions of each sequence must not decrease.")
    return int(np.searchsorted(positions, skip)), len(positions)


def check_pair(source: ModelKVSpec, target: ModelKVSpec, config: MapperConfig) -> None:
    for name in ("n_kv_heads", "head_dim"):
        a, b = getattr(source, name), getattr(target, name)
        if a != b:
            raise MatchedKVError(f"Source and target must match in {name}: the source has {a}, the target has {b}.")
    if isinstance(config.k, int) and config.k > source.n_layers:
        raise BadInput(
            f"k is {config.k}, but the source has only {source.n_layers} layers. Use k='all' or a smaller k."
        )
    if config.exact_layers >= target.n_layers:
        raise BadInput(
            f"exact_layers is {config.exact_layers}, but the target has only {target.n_layers} layers: none is left to "
            "map."
        )


def solve(
    stats: Stats,
    source: ModelKVSpec,
    target: ModelKVSpec,
    config: MapperConfig,
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapper:
    """Select source layers and solve everything from the moments. Raises BadInput when there were too few rows.

    progress(done, total) is called as target layers are solved.
    """
    rows, held = (m[0].count if m else 0 for m in (stats.train, stats.held))
    sizes = _sizes(source, config)
    features = {k: _width(k, source, target, config) for k in sizes}
    usable = [k for k in sizes if features[k] < rows]
    if not usable or not held:
        need = features[sizes[0]] + 1
        raise BadInput(
            f"Too few rows: {rows} to fit on and {held} held out, for {need - 1} features (k={sizes[0]} layers of "
            f"{source.width}). At least {need} training rows are needed, that is about "
            f"{-(-need * config.stride * HOLD_OUT // (HOLD_OUT - 1))} tokens at stride {config.stride}; "
            "better ten times as many. Or lower k or stride."
        )
    pairs, mapped = stats.pairs(), target.n_layers - config.exact_layers
    order = _order(pairs, source, target, config, max(usable))
    best = None
    for i, k in enumerate(usable):
        fitted = []
        chosen = [o[:k] for o in order]
        code = _encoder(pairs, chosen[0], source, target, config) if config.latent else None
        for group in _fit_layers(pairs, chosen, source, target, config, code):
            fitted += group
            if progress is not None:
                progress(i * mapped + len(fitted), len(usable) * mapped)
        score = float(np.mean([(m.r2_keys + m.r2_values) / 2 for m, _ in fitted]))
        if best is None or score > best[0] + 0.002:
            best = (score, k, fitted, code)
    assert best is not None
    about = dict(provenance or {}) | {
        "training_rows": rows, "held_out_rows": held, "mean_held_out_r2": best[0], "k": best[1],
    }  # fmt: skip
    layers = {m.target: m for m, _ in sorted(best[2], key=lambda pair: pair[0].target)}
    return Mapper(source, target, config, layers, {m.target: w for m, w in best[2]}, about, encoder=best[3])


def _sizes(source: ModelKVSpec, config: MapperConfig) -> list[int]:
    if config.k == "auto":
        return [k for k in KS if k < source.n_layers] + [source.n_layers]
    return [source.n_layers if config.k == "all" else int(config.k)]


Pairs = Sequence[tuple[Moments, Moments]]
"""(training, held-out) moments of every regression."""


def _width(k: int, source: ModelKVSpec, target: ModelKVSpec, config: MapperConfig) -> int:
    """Features of one regression that reads k source layers."""
    return (k * source.width + config.exact_layers * target.width) * (2 if config.features == "both" else 1)


def _order(pairs: Pairs, source: ModelKVSpec, target: ModelKVSpec, config: MapperConfig, k: int) -> list[list[int]]:
    """The k source layers of each mapped target layer, best first; with a latent the same ones for all."""
    mapped = target.n_layers - config.exact_layers
    kinds = pairs
    if config.features == "both":
        ((train, held),) = pairs
        (x, y), width = (len(m) // 2 for m in (train.mean_x, train.mean_y)), source.n_layers * source.width
        cuts = [(slice(i * x, i * x + width), slice(i * y, (i + 1) * y)) for i in (0, 1)]
        kinds = [(train.sub(*cut), held.sub(*cut)) for cut in cuts]
    elif config.exact_layers:
        cut = slice(0, source.n_layers * source.width), slice(None)
        kinds = [(train.sub(*cut), held.sub(*cut)) for train, held in pairs]
    if config.latent:
        every = select.scores(kinds, source.n_layers, mapped, source.n_kv_heads).mean(0)
        return [np.argsort(-every, kind="stable")[:k].tolist()] * mapped
    return select.choose(kinds, source.n_layers, mapped, source.n_kv_heads, k, config.selection)


def _encoder(
    pairs: Pairs, sources: Sequence[int], source: ModelKVSpec, target: ModelKVSpec, config: MapperConfig
) -> Packed:
    """The map to the shared latent. Its penalty, if it is to be found, is the one with which a full map has the best
    R2 on the held-out rows.
    """
    ((train, held),) = pairs
    x = _features(sorted(sources), source, target, config)
    train, held = train.sub(x, slice(None)), held.sub(x, slice(None))
    auto = config.ridge_lambda == "auto"
    penalty = best_penalty(train, held, target.head_dim) if auto else float(config.ridge_lambda)
    return pack(reduced_rank(train, penalty, int(config.latent or 0)), train.mean_x, config.dtype)


def best_penalty(train: Moments, held: Moments, head_dim: int) -> float:
    """The one of PENALTIES with which a full map has the best mean R2 on the held-out rows."""
    heads = len(train.mean_y) // head_dim
    return max(PENALTIES, key=lambda p: float(r2_of_heads(held, ridge(train, p), heads).mean()))


def _fit_layers(
    pairs: Pairs,
    order: Sequence[Sequence[int]],
    source: ModelKVSpec,
    target: ModelKVSpec,
    config: MapperConfig,
    code: Packed | None,
) -> Iterator[list[tuple[LayerMap, Weights]]]:
    """Target layers that read the same source layers share one factorisation per regression and penalty."""
    first, mapped = config.exact_layers, target.n_layers - config.exact_layers
    groups: dict[tuple[int, ...], list[int]] = {}
    for t, ranked in enumerate(order):
        groups.setdefault(tuple(sorted(ranked)), []).append(t)
    for sources, targets in groups.items():
        x = _features(sources, source, target, config)
        sides = [[t + kind * mapped for t in targets] for kind in range(3 - len(pairs))]  # both: keys, then values
        y = _columns([i for side in sides for i in side], target.width, mapped * len(sides))
        fitted: list[tuple[Packed, float, float]] = []
        for train, held in pairs:
            part = train.sub(x, y), held.sub(x, y)
            if code is not None:
                weight, bias = code.unpacked()
                part = part[0].through(weight, bias), part[1].through(weight, bias)
            fitted += _best_affine(*part, len(targets) * len(sides), target, config)
        keys, values = fitted[: len(targets)], fitted[len(targets) :]
        yield [
            (LayerMap(t + first, sources, tuple(order[t]), kr, vr, kl, vl), (kp, vp))
            for t, (kp, kr, kl), (vp, vr, vl) in zip(targets, keys, values, strict=True)
        ]


def _features(
    sources: Sequence[int], source: ModelKVSpec, target: ModelKVSpec, config: MapperConfig
) -> np.ndarray | slice:
    """The columns of `Rows`' features that belong to these source layers, and to the exact target layers."""
    if len(sources) == source.n_layers:
        return slice(None)  # a view, not a copy
    own = source.n_layers * source.width + np.arange(config.exact_layers * target.width)
    one = np.concatenate([_columns(sources, source.width, source.n_layers), own])
    sides = 2 if config.features == "both" else 1
    return np.concatenate([one + i * _width(source.n_layers, source, target, config) // sides for i in range(sides)])


def _columns(layers: Sequence[int], width: int, total: int) -> np.ndarray | slice:
    if len(layers) == total:
        return slice(None)  # a view, not a copy
    return np.concatenate([np.arange(i * width, (i + 1) * width) for i in layers])


def _best_affine(
    train: Moments, held: Moments, layers: int, target: ModelKVSpec, config: MapperConfig
) -> list[tuple[Packed, float, float]]:
    """(map, held-out R2, penalty) for each of the layers (or layers and kinds) side by side in the outputs."""
    best: dict[int, tuple[Packed, float, float]] = {}
    for penalty in PENALTIES if config.ridge_lambda == "auto" else (float(config.ridge_lambda),):
        a = ridge(train, penalty)
        scores = r2_of_heads(held, a, layers * target.n_kv_heads).reshape(layers, -1).mean(1)
        for i, score in enumerate(scores.tolist()):
            if i not in best or score > best[i][1]:
                cut = slice(i * target.width, (i + 1) * target.width)
                one = Affine(a.weight[:, cut], a.bias[cut])
                best[i] = (pack(one, train.mean_x, config.dtype), score, penalty)
    return [best[i] for i in range(layers)]


# ---- apply ----


def load_mapper(path: str | Path) -> Mapper:
    """Open a saved mapper, lazily. Raises BadArtifact when it is damaged."""
    return Mapper.load(path)


def transfer_cache(
    source_kv: Layers, mapper: Mapper, positions: Any = None, unload_after: bool = True, exact: Layers | None = None
) -> dict[int, tuple[Array, Array]]:
    """The target's cache {layer: (keys, values)} from the source's, of the same rank, dtype, device and framework.

    source_kv: [H, N, D] or [B, H, T, D] per layer, post-RoPE; only the layers that the mapper reads are needed.
    positions: of the tokens, [T] or [B, T], default 0 ... T - 1 (say so when the cache does not start at 0).
    unload_after: release each layer's weights when it is done, if they are on disk. exact: for a mapper with
    exact_layers, the target's own first layers over the same tokens (crosskv.handoff computes them); they are returned
    with the others.
    """
    return map_cache(source_kv, mapper, positions, mapper.source, mapper.target, unload_after, exact)


def map_cache(
    source_kv: Layers, mapper: Mapper, positions: Any, source: ModelKVSpec, target: ModelKVSpec, unload_after: bool,
    exact: Layers | None = None,
) -> dict[int, tuple[Array, Array]]:  # fmt: skip
    """transfer_cache with the two specs given, for models whose RoPE depends on the length in use."""
    source_kv, batched = with_batch(source_kv)
    joined, places, first = _joined(source_kv, mapper, positions, source, target, exact)
    given, like = source_kv[joined.used[0]][0], joined.like
    re = _Unrotate(target, places, mapper.config.content_space, like)
    out = {i: _back(kv, given) for i, kv in first.items()}
    for t, m in sorted(mapper.layers.items()):
        (wk, bk), (wv, bv) = mapper.ready(t, like, re.dtype)
        k, v = joined.of(m.sources)
        out[t] = _back(re.heads(t, k @ wk + bk, v @ wv + bv), given)
        if unload_after:
            mapper.unload(t)
    if unload_after:
        mapper.unload()  # the encoder of a latent
    return out if batched else {t: (k[0], v[0]) for t, (k, v) in out.items()}


def latents_of(
    source_kv: Layers, mapper: Mapper, positions: Any, source: ModelKVSpec, target: ModelKVSpec, exact: Layers
) -> Array:
    """The shared latent [B, T, r] of source caches [B, H, T, D], where and in which framework these are."""
    joined, _, _ = _joined(source_kv, mapper, positions, source, target, exact)
    z, _ = joined.of(joined.used)
    return _back((z, z), source_kv[joined.used[0]][0])[0]


def _joined(
    source_kv: Layers, mapper: Mapper, positions: Any, source: ModelKVSpec, target: ModelKVSpec, exact: Layers | None
) -> tuple[_Joined, np.ndarray, dict[int, tuple[Array, Array]]]:
    """(what gives the features, the positions, the target's exact layers that the mapper reads)."""
    used = tuple(sorted({s for m in mapper.layers.values() for s in m.sources}))
    batch, length = check_layers(source_kv, source, "source", used)
    places = as_positions(positions, batch, length)
    first = _exact(exact, mapper, target, (batch, length))
    source_kv = local({s: source_kv[s] for s in used})
    like = source_kv[used[0]][0]
    un = _Unrotate(source, places, mapper.config.content_space, like)
    rows = {s: un.rows(s, source_kv[s]) for s in used}  # each source layer is unrotated once
    own = rows_of(first, target, places, mapper.config) if first else []
    return _Joined(rows, own, mapper, un.dtype, used, like), places, first


def _exact(
    exact: Layers | None, mapper: Mapper, target: ModelKVSpec, size: tuple[int, int]
) -> dict[int, tuple[Array, Array]]:
    """The target's first layers that the mapper reads, with a batch axis."""
    need = range(mapper.config.exact_layers)
    if not need:
        return {}
    if exact is None:
        raise BadInput(
            f"This mapper reads the target's own first {len(need)} layers: pass exact={{layer: (keys, values)}} of the "
            "same tokens, or use crosskv.handoff, which computes them."
        )
    given, _ = with_batch({i: exact[i] for i in need if i in exact})
    if check_layers(given, target, "exact target", need) != size:
        raise BadInput(f"exact must hold the same tokens as the source's cache, {size} (batch, tokens).")
    return given


def _back(kv: tuple[Array, Array], given: Array) -> tuple[Array, Array]:
    """In the framework, on the device and in the dtype of `given`."""
    b = backends.of(given)
    dtype = b.dtype_of(given)
    k, v = (b.cast(x, dtype) if backends.of(x) is b else b.from_numpy(x, given, dtype) for x in kv)
    return k, v


@dataclass
class _Joined:
    """The features of keys and of values for some source layers; kept while the next target layer asks for the same
    ones. rows: of the source layers `used`; own: of the exact target layers; like: an array where they are.
    """

    rows: Mapping[int, tuple[Array, Array]]
    own: Sequence[tuple[Array, Array]]
    mapper: Mapper
    dtype: str
    used: tuple[int, ...]
    like: Array
    last: tuple[int, ...] = ()
    value: tuple[Array, ...] = ()

    def of(self, sources: tuple[int, ...]) -> tuple[Array, Array]:
        if sources != self.last:
            xp = backends.of(self.rows[sources[0]][0]).xp
            pairs = [*(self.rows[s] for s in sources), *self.own]
            if self.mapper.config.features == "both":
                x = xp.concatenate([*_side(pairs, 0), *_side(pairs, 1)], -1)
                x = self.mapper.encode(x, self.dtype) if self.mapper.config.latent else x
                self.value = (x, x)
            else:
                self.value = tuple(xp.concatenate(_side(pairs, kind), -1) for kind in (0, 1))
            self.last = sources
        k, v = self.value
        return k, v
