"""Shapes: rows of features <-> heads of a cache, and ModelKVSpec, which says what a model's cache looks like.

A row is one token; its features are the heads side by side, h * D + d; several layers stand side by side in the order
given.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from crosskv import backends, rope
from crosskv.backends import Array, Layers, Rope
from crosskv.errors import BadInput, MatchedKVError

PROBE_POSITIONS = (0, 1, 17, 113)
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def to_rows(x: Shaped[Any, "B H T D"]) -> Shaped[Any, "B T P"]:
    """Heads to rows: P = H * D."""
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)


def to_heads(x: Shaped[Any, "B T P"], heads: int) -> Shaped[Any, "B H T D"]:
    """Rows to heads, the inverse of to_rows."""
    b, t, p = x.shape
    return x.reshape(b, t, heads, p // heads).swapaxes(1, 2)


@dataclass(frozen=True)
class ModelKVSpec:
    """What a model's cache looks like: layers, KV heads, head dim, and how each layer's keys are rotated.

    Either measured, `ModelKVSpec.from_model(model)`, or written by hand for a model with one plain RoPE,
    `ModelKVSpec(n_layers, n_kv_heads, head_dim, rope_theta)`, or with `ropes`, one per layer.
    identity says which model was measured (see `identify`); empty when written by hand.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    rope_theta: InitVar[float | None] = None
    rope_interleaved: InitVar[bool] = False
    ropes: tuple[Rope, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self, rope_theta: float | None, rope_interleaved: bool) -> None:
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise BadInput(f"{name} must be a positive integer, got {getattr(self, name)!r}.")
        if self.ropes and rope_theta is not None:
            raise BadInput("Give rope_theta (one plain RoPE) or ropes (one per layer), not both.")
        if not self.ropes:
            one = plain_rope(self.head_dim, 10000.0 if rope_theta is None else rope_theta, rope_interleaved)
            object.__setattr__(self, "ropes", (one,) * self.n_layers)
        if len(self.ropes) != self.n_layers:
            raise BadInput(f"Expected one rope for each of {self.n_layers} layers, got {len(self.ropes)}.")
        widest = max(2 * len(r.inv_freq) for r in self.ropes)
        if widest > self.head_dim:
            raise BadInput(f"RoPE turns {widest} channels, but head_dim is {self.head_dim}.")

    @classmethod
    def from_model(cls, model: Any, length: int = 1) -> ModelKVSpec:
        """Measure a live model (either host). `length`: the sequence length in use, which matters to dynamic RoPE
        only.

        Raises MatchedKVError, naming what stands in the way, when the cache or its rotation cannot be reproduced
        exactly.
        """
        return _measure(model, length)

    @property
    def width(self) -> int:
        """P: features of one layer, KV heads * head dim."""
        return self.n_kv_heads * self.head_dim

    def at(self, model: Any, length: int) -> ModelKVSpec:
        """This spec with the frequencies that the live `model` uses for sequences of `length` tokens."""
        moving = any(r.lengths is not None for r in self.ropes)
        return ModelKVSpec.from_model(model, length) if moving else self

    def to_json(self) -> dict[str, Any]:
        distinct = list(dict.fromkeys(self.ropes))
        return {
            "n_layers": self.n_layers,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "ropes": [asdict(r) for r in distinct],
            "rope_of_layer": [distinct.index(r) for r in self.ropes],
            "identity": dict(self.identity),
        }

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> ModelKVSpec:
        ropes = [
            Rope(tuple(r["inv_freq"]), r["scale"], r["interleaved"], tuple(r["lengths"]) if r["lengths"] else None)
            for r in d["ropes"]
        ]
        return cls(
            d["n_layers"], d["n_kv_heads"], d["head_dim"],
            ropes=tuple(ropes[i] for i in d["rope_of_layer"]), identity=d["identity"],
        )  # fmt: skip


def plain_rope(head_dim: int, theta: float, interleaved: bool = False) -> Rope:
    """inv_freq[i] = theta^(-2i / head_dim), in float32 as the hosts compute it."""
    if not (isinstance(theta, (int, float)) and 0 < theta < float("inf")):
        raise BadInput(f"rope_theta must be a positive number, got {theta!r}.")
    exponent = np.arange(0, head_dim - 1, 2, dtype=np.float32) / np.float32(head_dim)
    return Rope(tuple((1.0 / np.float32(theta) ** exponent).tolist()), interleaved=interleaved)


# ---- measuring a live model ----


def _measure(model: Any, length: int) -> ModelKVSpec:
    """Which rotation does each layer use? Tokens are sent through the model one at a time at several positions: a
    token that attends to itself only has the same keys everywhere but for the rotation, so each candidate can be
    tried.
    """
    b = backends.of(model)
    b.check(model)
    about = b.describe(model)
    shots = _probe(model, about["vocab"])
    shape = _common_shape(shots[0], about["kind"])
    for kv in shots.values():
        check_finite(kv, about["kind"])
    ropes = {p: b.ropes(model, p + 1) for p in PROBE_POSITIONS}
    now = b.ropes(model, length)
    eps = EPS[about["dtype"]]
    tolerance = 3 * eps if eps > 1e-4 else max(64 * eps, 1e-4)
    candidates = [(None, False)] + [(i, inter) for inter in (False, True) for i in range(len(now))]
    chosen: list[Rope] = []
    for layer in sorted(shots[0]):
        _check_values(shots, layer, max(tolerance, 1e-3), about["kind"])
        errors = [_misfit(shots, layer, {p: _candidate(r, *c) for p, r in ropes.items()}) for c in candidates]
        best = int(np.argmin(errors))
        if not errors[best] <= tolerance:
            raise MatchedKVError(
                f"{about['kind']}: the keys of layer {layer} are not explained by any of the {len(now)} rotary "
                f"embeddings found in the model (relative error {errors[best]:.2g}); a norm after RoPE, or a rotation "
                "that crosskv does not know, stands in the way."
            )
        i, inter = candidates[best]
        chosen.append(Rope() if i is None else _with_range(b, model, i, replace(now[i], interleaved=inter), length))
    identity = {**about, "signature": _signature(shots[0])}
    return ModelKVSpec(len(shots[0]), *shape, ropes=tuple(chosen), identity=identity)


def _probe(model: Any, vocab: int) -> dict[int, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """{position: {layer: (K, V)}} in float64, for 8 tokens spread over the vocabulary."""
    b = backends.of(model)
    ids = [vocab * (i + 1) // 10 for i in range(8)]
    shots = {p: b.probe(model, ids, p) for p in PROBE_POSITIONS}
    return {p: {i: (_wide(k), _wide(v)) for i, (k, v) in kv.items()} for p, kv in shots.items()}


def _wide(x: Array) -> np.ndarray:
    return backends.of(x).to_numpy(x).astype(np.float64)


def _common_shape(layers: Layers, kind: str) -> tuple[int, int]:
    shapes = {i: (k.shape[1:], v.shape[1:]) for i, (k, v) in layers.items()}
    first = shapes[min(shapes)]
    for i, (k, v) in shapes.items():
        if k != v:
            raise MatchedKVError(
                f"{kind}: layer {i} has keys {k[0]} x {k[2]} and values {v[0]} x {v[2]} (latent attention?)."
            )
        if (k, v) != first:
            raise MatchedKVError(
                f"{kind}: layer {i} has {k[0]} heads x {k[2]}, layer 0 has {first[0][0]} x {first[0][2]}."
            )
    return first[0][0], first[0][2]


def _check_values(shots: Mapping[int, Layers], layer: int, tolerance: float, kind: str) -> None:
    want = shots[0][layer][1]
    for p in PROBE_POSITIONS[1:]:
        if np.abs(shots[p][layer][1] - want).max() > tolerance * np.abs(want).max():
            raise MatchedKVError(
                f"{kind}: the values of layer {layer} change with the position of a lone token, so positions enter "
                "outside RoPE (learned or absolute position embeddings); such caches cannot be moved between positions."
            )


def _candidate(found: Sequence[Rope], index: int | None, interleaved: bool) -> Rope:
    return Rope() if index is None else replace(found[index], interleaved=interleaved)


def _misfit(shots: Mapping[int, Layers], layer: int, ropes: Mapping[int, Rope]) -> float:
    """max over positions p of |K(p) - R(p) R(0)^-1 K(0)| / max|K(0)|, ropes being how one candidate stands at each."""
    zero, r = shots[0][layer][0], ropes[0]
    still = rope.unrotate(zero, rope.tables(r, np.array([0])), r.interleaved)
    errors = [
        np.abs(shots[p][layer][0] - rope.rotate(still, rope.tables(r, np.array([p])), r.interleaved)).max()
        for p, r in ropes.items()
    ]
    return float(max(errors) / np.abs(zero).max())


def _with_range(b: Any, model: Any, index: int, r: Rope, length: int) -> Rope:
    """For a rope that changes with the length: the lengths for which it is this one, by bisection on the module."""
    if r.lengths is None:
        return r
    same = functools.cache(lambda n: b.ropes(model, n)[index].inv_freq == r.inv_freq)
    low = 1 if same(1) else length
    reach, beyond = length, length + (1 << 24)
    while beyond - reach > 1:
        middle = (reach + beyond) // 2
        reach, beyond = (middle, beyond) if same(middle) else (reach, middle)
    b.ropes(model, 1)  # leave the module as it was found
    return replace(r, lengths=(low, reach))


def _signature(layers: Layers) -> list[list[float]]:
    """A few numbers per layer of what the model answers to the probe tokens: its fingerprint.

    The same for the same weights in either framework, to rounding; different for other weights, adapters or
    quantisation.
    """
    rng = np.random.RandomState(0)
    rows = []
    for i in sorted(layers):
        kv = np.concatenate([x.reshape(x.shape[0], -1) for x in layers[i]], -1)
        r = rng.standard_normal((4, kv.shape[1]))
        rows.append([float(f"{s:.7g}") for s in (kv @ r.T / np.linalg.norm(kv)).ravel()])
    return rows


def differs(a: ModelKVSpec, b: ModelKVSpec) -> str | None:
    """How the model measured as `b` is not the one measured as `a`, in words; None when it is, or when one was not
    measured.
    """
    if (a.n_layers, a.n_kv_heads, a.head_dim) != (b.n_layers, b.n_kv_heads, b.head_dim):
        return (
            f"{b.n_layers} layers, {b.n_kv_heads} KV heads x {b.head_dim} instead of "
            f"{a.n_layers} layers, {a.n_kv_heads} KV heads x {a.head_dim}"
        )
    if not (a.identity and b.identity):
        return None
    for i, (r, q) in enumerate(zip(a.ropes, b.ropes, strict=True)):
        if r.lengths is None and q.lengths is None and not _same_rope(r, q):
            return f"the keys of layer {i} are rotated differently"
    # rounding grows through the layers; half-precision models agree to a few per cent at most
    tolerance = 16 * max(EPS[s.identity["dtype"]] for s in (a, b)) + 1e-3
    for i, (x, y) in enumerate(zip(a.identity["signature"], b.identity["signature"], strict=True)):
        error = float(np.abs(np.subtract(x, y)).max())
        if not error <= tolerance:
            return f"layer {i} answers the probe tokens differently (by {error:.2g}, allowed {tolerance:.2g})"
    return None


def _same_rope(a: Rope, b: Rope) -> bool:
    same = (len(a.inv_freq), a.interleaved) == (len(b.inv_freq), b.interleaved)
    return same and np.allclose((a.scale, *a.inv_freq), (b.scale, *b.inv_freq), rtol=1e-5, atol=0)


# ---- checking caches given as arrays ----


def with_batch(layers: Layers) -> tuple[dict[int, tuple[Array, Array]], bool]:
    """The cache with a batch axis, and whether it had one (the seed's [H, N, D] has none)."""
    ranks = {len(x.shape) for kv in layers.values() for x in kv}
    if ranks == {3}:
        return {i: (k[None], v[None]) for i, (k, v) in layers.items()}, False
    if ranks == {4}:
        return dict(layers), True
    raise BadInput(
        f"Keys and values must all be [H, N, D] or all [B, H, T, D]; got {sorted(ranks)}-dimensional arrays."
    )


def check_layers(layers: Layers, spec: ModelKVSpec, who: str, need: Sequence[int] | None = None) -> tuple[int, int]:
    """That `layers` [B, H, T, D] are caches of `spec`, layers `need` present (default all). Returns (B, T).

    who: "source" or "target", for the message.
    """
    need = range(spec.n_layers) if need is None else need
    missing = [i for i in need if i not in layers]
    if missing:
        raise BadInput(f"The {who} cache lacks layers {missing}; it has {sorted(layers)}.")
    extra = [i for i in layers if i not in range(spec.n_layers)]
    if extra:
        raise BadInput(f"The {who} cache has layers {extra}, but the {who} model has layers 0 to {spec.n_layers - 1}.")
    b, _, t, _ = layers[next(iter(need))][0].shape
    for i in need:
        for word, x in zip(("keys", "values"), layers[i], strict=True):
            if tuple(x.shape) != (b, spec.n_kv_heads, t, spec.head_dim):
                raise BadInput(
                    f"The {who} {word} of layer {i} are {tuple(x.shape)}, expected "
                    f"{(b, spec.n_kv_heads, t, spec.head_dim)} = [B, H, T, D]."
                )
    return b, t


def check_finite(layers: Layers, who: str) -> None:
    """Raise BadInput that names the model, the layer and how many, if there is a NaN or Inf in a cache."""
    for i, kv in layers.items():
        for word, x in zip(("keys", "values"), kv, strict=True):
            a = backends.of(x).to_numpy(x)
            bad = int(a.size - np.isfinite(a).sum())
            if bad:
                raise BadInput(
                    f"The {who} {word} of layer {i} have {bad:,} NaN or Inf among {a.size:,} values. "
                    "A half-precision model that overflows is the usual cause: run it in bfloat16 or float32."
                )
