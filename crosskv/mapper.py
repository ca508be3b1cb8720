"""Mapper: the fitted maps of one pair of models, on disk and in memory.

On disk a mapper is a directory: mapper.safetensors, mapper.json, and a README.md for people. It is loaded layer by
layer, and what was loaded can be released; weights that were never saved are never dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from crosskv import backends
from crosskv.backends import Array
from crosskv.backends import numpy as host
from crosskv.errors import BadArtifact, BadInput, IncompatibleModels
from crosskv.files import Tensors, sha256, write_directory, write_tensors
from crosskv.layout import ModelKVSpec, differs
from crosskv.ridge import Affine

FORMAT = 2
READABLE = (1, 2)
"""Format 1 is format 2 without the options that came later; their defaults are what it means."""
KINDS = ("keys", "values")
PARTS = ("weight", "scale", "bias")
LATENT = "latent"
"""The encoder's name among the tensors."""
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8")


@dataclass(frozen=True)
class MapperConfig:
    """How a mapper is fitted. The first seven fields are the seed page's.

    k: source layers per target layer; "all", or "auto" (the fewest within .002 of the best held-out R2). ridge_lambda:
    ridge penalty, relative to the mean feature variance, or "auto" (the best held-out R2, per layer and kind; with a
    latent per layer and kind of its decoders). n_calib_sequences, calib_seq_len: how much text crosskv.fit reads.
    stride: every how many-th token becomes a row. content_space: map pre-RoPE keys. dtype: of the stored weights:
    float16, bfloat16, float32 (or float64), int8 (a step per feature). selection: "topk" (the paper's) or "greedy".
    skip: first tokens of a sequence that are no rows: attention sinks do not follow the rest, and a handoff lets the
    target compute them itself.

    features: "own", keys from keys and values from values (the paper's), or "both", each from both. exact_layers: the
    target's first layers, which it computes itself over the whole prompt (of the last one only the keys and values, so
    that 1 costs a projection of the embeddings); they are features for the other layers. latent: None, or the size of
    the one latent through which all target layers are read (docs/maths.md, section 3); needs features="both".
    """

    k: int | str = 8
    ridge_lambda: float | int | str = 0.01
    n_calib_sequences: int = 500
    calib_seq_len: int = 1024
    stride: int = 4
    content_space: bool = True
    dtype: str = "float16"
    selection: str = "topk"
    skip: int = 1
    features: str = "own"
    exact_layers: int = 0
    latent: int | None = None

    def __post_init__(self) -> None:
        if self.k not in ("all", "auto") and not (_is_int(self.k) and self.k >= 1):  # type: ignore[operator]
            raise BadInput(f"k must be a positive integer, 'all' or 'auto', got {self.k!r}.")
        penalty = self.ridge_lambda
        if penalty != "auto" and not (isinstance(penalty, (int, float)) and 0 <= penalty < float("inf")):
            raise BadInput(f"ridge_lambda must be a number >= 0 or 'auto', got {penalty!r}.")
        for name, least in (("n_calib_sequences", 2), ("calib_seq_len", 2), ("stride", 1), ("skip", 0),
                            ("exact_layers", 0)):  # fmt: skip
            if not (_is_int(getattr(self, name)) and getattr(self, name) >= least):
                raise BadInput(f"{name} must be an integer >= {least}, got {getattr(self, name)!r}.")
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        if self.selection not in ("topk", "greedy"):
            raise BadInput(f"selection must be 'topk' or 'greedy', got {self.selection!r}.")
        if self.features not in ("own", "both"):
            raise BadInput(f"features must be 'own' or 'both', got {self.features!r}.")
        if self.latent is not None:
            if not (_is_int(self.latent) and self.latent >= 1):
                raise BadInput(f"latent must be a positive integer or None, got {self.latent!r}.")
            if self.features != "both" or self.selection != "topk":
                raise BadInput("A latent is shared by keys, values and layers: it needs features='both' and "
                               "selection='topk'.")  # fmt: skip


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@dataclass(frozen=True)
class Packed:
    """An affine map as it is stored: y = (x * scale) weight + bias.

    scale brings each feature's row of weights near 1 (a power of two), so that no scale of the features overflows or
    underflows float16, or to at most 127 (int8). The bias was computed from the rounded weights: the map is exact at
    the mean.
    """

    weight: Shaped[np.ndarray, "P Q"]
    scale: Float[np.ndarray, " P"]
    bias: Float[np.ndarray, " Q"]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + self.bias.nbytes

    def unpacked(self) -> tuple[Float[np.ndarray, "P Q"], Float[np.ndarray, " Q"]]:
        """(weight, bias) in float64, as they are used."""
        weight = host.to_numpy(self.weight).astype(np.float64) * self.scale[:, None]
        return weight, self.bias.astype(np.float64)


def pack(a: Affine, mean_x: np.ndarray, dtype: str) -> Packed:
    """Round `a` to `dtype`, keeping its value at mean_x."""
    largest = np.abs(a.weight).max(1)
    largest = np.where(largest > 0, largest, 1.0)
    if dtype == "int8":
        scale = largest / 127
        weight = np.rint(a.weight / scale[:, None]).astype(np.int8)
    else:
        scale = np.exp2(np.round(np.log2(largest)))
        weight = host.cast(a.weight / scale[:, None], dtype)
    rounded = host.to_numpy(weight).astype(np.float64) * scale[:, None]
    bias = a.bias + mean_x @ (a.weight - rounded)
    wide = np.float64 if dtype == "float64" else np.float32
    return Packed(weight, scale.astype(wide), bias.astype(wide))


@dataclass(frozen=True)
class LayerMap:
    """What is known about the map of one target layer; its weights are `Mapper.weights(target)`.

    sources: the source layers side by side, ascending. ranked: the same, best first. r2: held-out R2, never in sample.
    """

    target: int
    sources: tuple[int, ...]
    ranked: tuple[int, ...]
    r2_keys: float
    r2_values: float
    penalty_keys: float
    penalty_values: float


Weights = tuple[Packed, Packed]
"""(keys, values) of one target layer."""


class Mapper:
    """Maps caches of one model to caches of another. Made by crosskv.fit or fit_mapper; save, load, apply.

    source, target: the two models' specs. config: how it was fitted. layers: {target layer: LayerMap}.
    provenance: calibration data, rows, scores. path: where it is saved, None if it never was. encoder: from the
    features to the latent, when there is one.
    """

    def __init__(
        self,
        source: ModelKVSpec,
        target: ModelKVSpec,
        config: MapperConfig,
        layers: Mapping[int, LayerMap],
        weights: Mapping[int, Weights],
        provenance: Mapping[str, Any] | None = None,
        path: Path | None = None,
        encoder: Packed | None = None,
    ):
        self.source, self.target, self.config = source, target, config
        self.layers = dict(layers)
        self.provenance = dict(provenance or {})
        self.path = path
        self._weights = dict(weights)
        self._encoder = encoder
        self._ready: dict[tuple, tuple[tuple[Array, Array], ...]] = {}

    def __repr__(self) -> str:
        return f"<Mapper {self.describe()}>"

    def describe(self) -> str:
        """One line: which models, which size, how good on held-out rows."""
        one = next(iter(self.layers.values()))
        names = (s.identity.get("name") or f"{s.n_layers} layers" for s in (self.source, self.target))
        r2 = [np.mean([getattr(m, f"r2_{k}") for m in self.layers.values()]) for k in KINDS]
        c = self.config
        more = f", exact layers {c.exact_layers}" if c.exact_layers else ""
        more += f", latent {c.latent}" if c.latent else f", {c.features} features" if c.features != "own" else ""
        return (
            f"{' -> '.join(names)}, k={len(one.sources)}{more}, {self.n_parameters:,} parameters in {c.dtype}, "
            f"held-out R2 keys {r2[0]:.3f} values {r2[1]:.3f}"
        )

    @property
    def n_parameters(self) -> int:
        q, r = self.target.width, self.config.latent
        wide = {t: self.n_features(m) for t, m in self.layers.items()}
        encoder = r * (max(wide.values()) + 1) if r else 0
        return encoder + sum(2 * ((r or p) * q + q) for p in wide.values())

    def n_features(self, m: LayerMap) -> int:
        """Features that the keys of this target layer are computed from: of its source layers and the exact ones."""
        one = len(m.sources) * self.source.width + self.config.exact_layers * self.target.width
        return one * (2 if self.config.features == "both" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of weights really held in memory now."""
        ready = (x.nbytes for maps in self._ready.values() for pair in maps for x in pair)
        encoder = 0 if self._encoder is None else self._encoder.nbytes
        return sum(p.nbytes for pair in self._weights.values() for p in pair) + encoder + sum(ready)

    def with_provenance(self, more: Mapping[str, Any]) -> Mapper:
        """The same maps, and something more said about where they come from."""
        about = {**self.provenance, **more}
        weights = {t: self.weights(t) for t in self.layers}
        return Mapper(self.source, self.target, self.config, self.layers, weights, about, encoder=self.encoder)

    # ---- weights in memory ----

    def weights(self, target: int) -> Weights:
        """The stored maps (keys, values) of one target layer, from memory or from disk."""
        if target not in self.layers:
            raise BadInput(f"This mapper has target layers {sorted(self.layers)}, not {target}.")
        if target not in self._weights:
            self._weights[target] = tuple(self._read(f"{target}.{kind}") for kind in KINDS)  # type: ignore[assignment]
        return self._weights[target]

    @property
    def encoder(self) -> Packed | None:
        """The stored map from the features to the latent, from memory or from disk; None when there is no latent."""
        if self.config.latent and self._encoder is None:
            self._encoder = self._read(LATENT)
        return self._encoder

    def _read(self, name: str) -> Packed:
        assert self.path is not None  # unload() drops saved weights only
        tensors = Tensors(self.path / "mapper.safetensors")
        return Packed(*(tensors[f"{name}.{part}"] for part in PARTS))

    def ready(self, target: int, like: Array, dtype: str) -> tuple[tuple[Array, Array], ...]:
        """((W, b) for keys, (W, b) for values) of one target layer, unpacked to `dtype` beside `like`. Kept until
        unload.
        """
        return self._unpacked(target, like, dtype)

    def encode(self, x: Array, dtype: str) -> Array:
        """Features [..., P] to the latent [..., r]."""
        ((w, b),) = self._unpacked(LATENT, x, dtype)
        return x @ w + b

    def _unpacked(self, which: int | str, like: Array, dtype: str) -> tuple[tuple[Array, Array], ...]:
        b = backends.of(like)
        key = (which, b.__name__, str(getattr(like, "device", "")), dtype)  # type: ignore[attr-defined]
        if key not in self._ready:
            packed = (self.encoder,) if isinstance(which, str) else self.weights(which)
            scaled = ((b.from_numpy(p.weight, like, dtype), p) for p in packed if p is not None)
            self._ready[key] = tuple(
                (w * b.from_numpy(p.scale, like, dtype)[:, None], b.from_numpy(p.bias, like, dtype)) for w, p in scaled
            )
        return self._ready[key]

    def unload(self, target: int | None = None) -> None:
        """Release the weights of one target layer, or of all. Weights that are not on disk yet stay."""
        self._ready = {k: v for k, v in self._ready.items() if target is not None and k[0] != target}
        if self.path is not None:
            self._weights = {k: v for k, v in self._weights.items() if target is not None and k != target}
            self._encoder = None if target is None else self._encoder

    # ---- identity ----

    def check_models(self, source: ModelKVSpec | None, target: ModelKVSpec | None) -> None:
        """That measured models are the ones that this mapper was fitted on. Raises IncompatibleModels."""
        for word, mine, yours in (("source", self.source, source), ("target", self.target, target)):
            why = None if yours is None else differs(mine, yours)
            if why:
                name = mine.identity.get("name") or mine.identity.get("kind") or "another model"
                raise IncompatibleModels(
                    f"This mapper was fitted with {name} as its {word}, and the {word} given is not that model: {why}. "
                    "Fit a mapper for this pair, or pass force=True to use this one all the same."
                )

    # ---- disk ----

    def save(self, path: str | Path) -> Path:
        """Write the mapper to directory `path`, whole or not at all, and return the absolute path."""
        path = Path(path).expanduser().absolute()
        tensors = {
            f"{t}.{kind}.{part}": getattr(packed, part)
            for t in sorted(self.layers)
            for kind, packed in zip(KINDS, self.weights(t), strict=True)
            for part in PARTS
        }
        if self.encoder is not None:
            tensors |= {f"{LATENT}.{part}": getattr(self.encoder, part) for part in PARTS}

        def write(directory: Path) -> None:
            file = directory / "mapper.safetensors"
            write_tensors(file, tensors)
            about = self.to_json() | {"files": {file.name: {"sha256": sha256(file), "bytes": file.stat().st_size}}}
            about["sha256"] = _digest(about)
            (directory / "mapper.json").write_text(json.dumps(about, indent=1) + "\n")
            (directory / "README.md").write_text(self.card())

        write_directory(path, "mapper.json", write)
        self.path = path
        return path

    @classmethod
    def load(cls, path: str | Path) -> Mapper:
        """Open a mapper. Weights are read when a layer is used; checksums are verified now.

        Raises BadArtifact when a file is missing, truncated, edited, or of a newer format.
        """
        path = Path(path).expanduser().absolute()
        try:
            about = json.loads((path / "mapper.json").read_text())
        except FileNotFoundError as e:
            raise BadArtifact(f"{path} is not a mapper: it has no mapper.json.") from e
        except ValueError as e:
            raise BadArtifact(
                f"{path / 'mapper.json'} is not readable JSON ({e}). Copy or fit the mapper again."
            ) from e
        if about.get("format") not in READABLE:
            raise BadArtifact(
                f"{path} has format {about.get('format')!r}; this crosskv reads up to {FORMAT}. Update crosskv."
            )
        if about.get("sha256") != _digest(about):
            raise BadArtifact(f"{path / 'mapper.json'} does not match its own checksum: edited. Copy or fit it again.")
        try:
            for name, want in about["files"].items():
                _verify(path / name, want)
            layers = {d["target"]: LayerMap(**{k: _tupled(v) for k, v in d.items()}) for d in about["layers"]}
            source, target = ModelKVSpec.from_json(about["source"]), ModelKVSpec.from_json(about["target"])
            mapper = cls(source, target, MapperConfig(**about["config"]), layers, {}, about["provenance"], path)
        except (KeyError, TypeError, ValueError) as e:
            raise BadArtifact(f"{path / 'mapper.json'} lacks or has a wrong {e}. Copy or fit the mapper again.") from e
        have = set(Tensors(path / "mapper.safetensors").names())
        lacking = [t for t in layers if f"{t}.values.bias" not in have]
        if lacking:
            raise BadArtifact(f"{path / 'mapper.safetensors'} lacks the target layers {lacking}.")
        if mapper.config.latent and f"{LATENT}.bias" not in have:
            raise BadArtifact(f"{path / 'mapper.safetensors'} lacks the encoder of the latent.")
        return mapper

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "config": asdict(self.config),
            "layers": [asdict(self.layers[t]) for t in sorted(self.layers)],
            "provenance": self.provenance,
        }

    def card(self) -> str:
        """A model card: what this is, how it was made, how good it is, how to use it."""
        rows = "\n".join(
            f"| {t} | {', '.join(map(str, m.sources))} | {m.r2_keys:.3f} | {m.r2_values:.3f} |"
            for t, m in sorted(self.layers.items())
        )
        facts = "\n".join(f"- {k}: {v}" for k, v in self.provenance.items() if not isinstance(v, (dict, list)))
        return (
            f"# KV cache mapper\n\n{self.describe()}\n\n"
            "Made by [crosskv](https://pypi.org/project/crosskv). It turns the key/value cache of the source model "
            "into one that the target model can continue from:\n\n"
            "```python\nimport crosskv\nmapper = crosskv.load('.')\n"
            "h = crosskv.handoff(mapper, source_model, target_model, prompt_ids)\n```\n\n"
            f"It is approximate, and belongs to exactly this pair of models.\n\n## Fit\n\n{facts}\n"
            f"- config: {self.config}\n\n"
            "## Held-out R2 per target layer\n\nR2 says how well the map fits; it does not predict how well the target "
            f"continues.\n\n| target layer | source layers | keys | values |\n|---|---|---|---|\n{rows}\n"
        )


def _tupled(v: Any) -> Any:
    return tuple(v) if isinstance(v, list) else v


def _digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of a mapper.json without the entry that holds it."""
    text = json.dumps({k: v for k, v in about.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _verify(file: Path, want: Mapping[str, Any]) -> None:
    if not file.exists():
        raise BadArtifact(f"{file} is missing. Copy or fit the mapper again.")
    if file.stat().st_size != want["bytes"]:
        raise BadArtifact(f"{file} has {file.stat().st_size} bytes, expected {want['bytes']}: truncated or edited.")
    if sha256(file) != want["sha256"]:
        raise BadArtifact(f"{file} does not match its checksum: edited or damaged. Copy or fit the mapper again.")
