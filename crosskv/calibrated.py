"""Bases fitted once per model: every token is encoded on its own, so prompts of any length and generated tokens are
compressed alike, and no prompt pays for a basis. docs/maths.md, section 7.

    basis = crosskv.calibrate(model, texts, tokenizer, group=4)        once; basis.save(directory)
    cache = crosskv.make_cache(model, crosskv.XKVConfig(basis, ratio=8))
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
from tqdm import tqdm

import crosskv
from crosskv import backends, metrics, rope
from crosskv.errors import BadArtifact, BadInput, IncompatibleModels
from crosskv.files import Tensors, sha256, write_directory, write_tensors
from crosskv.latent import Coder, Side
from crosskv.layout import ModelKVSpec, check_finite, differs
from crosskv.live import check_vocab, measured, sequences, tokenizer_hash
from crosskv.moments import Moments, moments
from crosskv.quant import PLANES
from crosskv.subspace import BITS, Basis, allocate, fixed_steps, gathered, runs

VERSION = 1
HOLD_OUT = 8
"""One sequence in HOLD_OUT sets the quantisers' ranges instead of the basis."""
LEAST = 2.0**-9
"""A latent with less variance than this (1 is the mean of the features) is not kept: no bit of it would pay."""


@dataclass(frozen=True)
class SideBasis:
    """Keys or values of one group, float32 arrays on the host (vectors float16): mean, scale [F]; vectors [F, r];
    limits, errors [options, r], the clipping and the mean squared error for every number of bits of subspace.BITS;
    rest [1], the mean square of what lies outside the vectors. Errors are in units of the scale.
    """

    mean: np.ndarray
    scale: np.ndarray
    vectors: np.ndarray
    limits: np.ndarray
    errors: np.ndarray
    rest: np.ndarray

    @property
    def outside(self) -> float:
        return float(self.rest[0])

    def side(self, bits: np.ndarray, like: Any) -> Side:
        """With these bits per latent, on the device of `like`; latents without bits are left out, most bits first."""
        order = np.argsort(-bits, kind="stable")[: int((bits > 0).sum())]
        order = order if len(order) else np.array([0])
        chosen = np.maximum(bits[order], 1)
        b = backends.of(like)

        def put(a: np.ndarray) -> Any:
            return b.from_numpy(np.ascontiguousarray(a), like)

        limits = self.limits[np.searchsorted(BITS, chosen), order]
        shared = (self.vectors[None, :, order], self.mean[None, None], self.scale[None, None])
        return Side(Basis("joint", *map(put, shared)), Coder(runs(chosen), put(limits)))


@dataclass(frozen=True)
class Calibrated:
    """The bases of a model: groups[i] are layers that share latents, sides[i] their (keys, values)."""

    spec: ModelKVSpec
    groups: tuple[tuple[int, ...], ...]
    sides: tuple[tuple[SideBasis, SideBasis], ...]
    about: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all arrays: which basis this is."""
        digest = hashlib.sha256(repr(self.groups).encode())
        for pair in self.sides:
            for s in pair:
                for f in fields(SideBasis):
                    digest.update(np.ascontiguousarray(getattr(s, f.name)).tobytes())
        return digest.hexdigest()

    def check_model(self, spec: ModelKVSpec) -> None:
        how = differs(self.spec, spec)
        if how is not None:
            raise IncompatibleModels(
                f"This basis was calibrated for {self.spec.identity.get('name') or self.spec.identity.get('kind')}, "
                f"not for this model: {how}. Calibrate one with crosskv calibrate."
            )

    def bits(self, budget: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Bits of every latent, (keys, values) per group, so that a token takes at most `budget` bits in all, what
        fills whole bytes included.
        """
        tables = [s.errors for pair in self.sides for s in pair]
        left = budget
        for _ in range(4):
            flat = allocate(tables, left)
            found = list(zip(flat[::2], flat[1::2], strict=True))
            over = 8 * self.packed_bytes(found) - budget
            if over <= 0:
                break
            left -= over
        return found

    def packed_bytes(self, bits: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Bytes that a token's latents take: bits, filled up to whole bytes for every stretch of equal bits."""
        stretches = [r for pair in bits for b in pair for r in runs(np.sort(b)[::-1])]
        return sum(-(-(stop - start) * plane // 8) for start, stop, n in stretches for plane in PLANES[n])

    def static_bytes(self, bits: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Bytes of the bases in use with these bits, held once for all sequences."""
        total = 0
        for pair, both in zip(self.sides, bits, strict=True):
            for s, b in zip(pair, both, strict=True):
                kept = int((b > 0).sum())
                total += s.mean.nbytes + s.scale.nbytes + kept * (s.vectors.itemsize * s.vectors.shape[0] + 4)
        return total

    def error(self, bits: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """The KL divergence in nats per token to expect from these bits: the squared error on held-out text of every
        layer's keys and values as a share of their variance, times the layer's measured sensitivity.
        """
        total = 0.0
        for pair, both in zip(self.sides, bits, strict=True):
            for s, b in zip(pair, both, strict=True):
                lost = s.outside + float(s.errors[np.searchsorted(BITS, b), np.arange(len(b))].sum())
                total += lost / self.spec.head_dim
        return total

    def save(self, directory: str | Path) -> Path:
        """Write calibrated.safetensors and calibrated.json to a directory, which is replaced as a whole."""
        path = Path(directory).expanduser().absolute()
        names = [f.name for f in fields(SideBasis)]
        tensors = {
            f"{i}.{kind}.{n}": getattr(s, n)
            for i, pair in enumerate(self.sides)
            for kind, s in zip(("keys", "values"), pair, strict=True)
            for n in names
        }

        def write(where: Path) -> None:
            write_tensors(where / "calibrated.safetensors", tensors)
            text = {
                "version": VERSION,
                "spec": self.spec.to_json(),
                "groups": self.groups,
                "about": self.about,
                "sha256": sha256(where / "calibrated.safetensors"),
            }
            (where / "calibrated.json").write_text(json.dumps(text, indent=1))

        write_directory(path, "calibrated.json", write)
        return path

    @classmethod
    def load(cls, directory: str | Path) -> Calibrated:
        """Raises BadArtifact when the files are missing, damaged or of a later version."""
        path = Path(directory).expanduser().absolute()
        try:
            about = json.loads((path / "calibrated.json").read_text())
            if about["version"] != VERSION:
                raise BadArtifact(f"{path} has format version {about['version']}, this crosskv reads {VERSION}.")
            if sha256(path / "calibrated.safetensors") != about["sha256"]:
                raise BadArtifact(f"{path}: calibrated.safetensors is not the file that was written. Copy it again.")
            t = Tensors(path / "calibrated.safetensors")
            names = [f.name for f in fields(SideBasis)]
            groups = tuple(tuple(g) for g in about["groups"])
            sides = tuple(
                tuple(SideBasis(*(t[f"{i}.{kind}.{n}"] for n in names)) for kind in ("keys", "values"))
                for i in range(len(groups))
            )
            return cls(ModelKVSpec.from_json(about["spec"]), groups, sides, about["about"])  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadArtifact(f"{path} is not a readable calibrated basis ({e}). Copy or make it again.") from e


# ---- fitting ----


def calibrate(
    model: Any,
    texts: str | Iterable[str] | Iterable[Sequence[int]],
    tokenizer: Any = None,
    *,
    group: int | str = 4,
    grouping: str = "contiguous",
    count: int = 128,
    length: int = 1024,
    skip: int = 4,
    batch_size: int = 4,
    weights: Any = None,
    progress: bool = True,
) -> Calibrated:
    """Fit bases for a live model of either host on text, in constant memory.

    group: layers that share latents, or "all". grouping: "contiguous", or "cka": layers whose keys and values are
    alike (linear CKA on this text) together. texts, tokenizer: as for crosskv.fit; at most `count` sequences of
    `length` tokens, without the first `skip` of each (attention sinks are unlike all others and stay exact). One
    sequence in eight is kept to set the quantisers. weights: what `sensitivity` found, when another basis of the same
    model has it already (about["sensitivity"]). Raises MatchedKVError for the model, BadInput for the rest.
    """
    spec = measured(model)
    size = _group_size(group, spec.n_layers)
    if grouping not in ("contiguous", "cka"):
        raise BadInput(f"grouping must be 'contiguous' or 'cka', got {grouping!r}.")
    stream = [s for s in islice(sequences(texts, tokenizer, length), count) if len(s) >= skip + 8]
    fit_on = [s for i, s in enumerate(stream) if i % HOLD_OUT != HOLD_OUT // 2]
    held = [s for i, s in enumerate(stream) if i % HOLD_OUT == HOLD_OUT // 2]
    rows = sum(max(0, len(s) - skip) for s in fit_on)
    if rows < 2 * spec.width or not held:
        raise BadInput(
            f"Too little calibration text: {rows} tokens to fit on and {len(held)} sequences held out; at least "
            f"{2 * spec.width} tokens in {HOLD_OUT} sequences are needed, better 50,000 and more."
        )
    groups = contiguous(spec.n_layers, size)
    together = [tuple(range(spec.n_layers))] if grouping == "cka" else list(groups)
    total = _moments(model, spec, fit_on, together, skip, batch_size, progress)
    if grouping == "cka":
        groups = alike(total[0], spec, size)
        total = [tuple(m.sub(_columns(g, spec.width), slice(0, 1)) for m in total[0]) for g in groups]
    weights = sensitivity(model, held) if weights is None else np.asarray(weights)
    fitted = [
        tuple(_vectors(m, weights[side, list(g)].ravel(), spec.head_dim) for side, m in enumerate(pair))
        for g, pair in zip(groups, total, strict=True)
    ]
    del total
    sides = _ranged(model, spec, held, groups, fitted, skip, batch_size)
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "crosskv": crosskv.__version__,
        "tokens": rows,
        "held_out": sum(max(0, len(s) - skip) for s in held),
        "grouping": grouping,
        "sensitivity": weights.tolist(),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
    }
    return Calibrated(spec, tuple(groups), tuple(sides), about)


def _group_size(group: int | str, layers: int) -> int:
    if group == "all":
        return layers
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise BadInput(f"group must be a number of layers, at least 1, or 'all'; got {group!r}.")
    return min(group, layers)


def contiguous(layers: int, size: int) -> list[tuple[int, ...]]:
    """Layers in their order, `size` at a time; the last group may be smaller."""
    return [tuple(range(i, min(i + size, layers))) for i in range(0, layers, size)]


def alike(kinds: Sequence[Moments], spec: ModelKVSpec, size: int) -> list[tuple[int, ...]]:
    """Groups of at most `size` layers, built by joining the two groups with the highest mean linear CKA, over and over.

    CKA(i, j) = |C_ij|^2 / (|C_ii| |C_jj|), C the centred second moments between layers, Frobenius norms (Kornblith et
    al. 2019); the mean of that of keys and that of values.
    """
    n, p = spec.n_layers, spec.width
    similar = np.zeros((n, n))
    for m in kinds:
        norms = (m.xx.reshape(n, p, n, p) ** 2).sum((1, 3))
        d = np.sqrt(np.diagonal(norms))
        similar += norms / np.outer(d, d) / len(kinds)
    groups = [[i] for i in range(n)]
    while True:
        pairs = [
            (similar[np.ix_(a, b)].mean(), i, j)
            for i, a in enumerate(groups)
            for j, b in enumerate(groups[:i])
            if len(a) + len(b) <= size
        ]
        if not pairs:
            return sorted(tuple(sorted(g)) for g in groups)
        _, i, j = max(pairs)
        groups[j] += groups.pop(i)


def _rows(
    model: Any, spec: ModelKVSpec, batch: list[list[int]], groups: Sequence[Sequence[int]], skip: int
) -> Iterator[tuple[Any, Any]]:
    """(keys, values) [N, F] of each group for these sequences, keys un-rotated, the first tokens left out."""
    ids = np.asarray(batch)
    check_vocab(ids, spec, "model")
    b = backends.of(model)
    layers = b.capture(model, ids)
    check_finite(layers, "model")
    at = np.arange(skip, ids.shape[1])
    still = {}
    for i, (k, v) in layers.items():
        k, v = (b.local(b.cast(x[:, :, skip:], "float32")) for x in (k, v))
        r = spec.ropes[i]
        still[i] = (rope.unrotate(k, rope.tables(r, at, k, "float32"), r.interleaved), v)
    for g in groups:
        pair = [gathered([still[i][side] for i in g], "joint") for side in (0, 1)]
        yield tuple(x.reshape(-1, x.shape[-1]) for x in pair)


def _batches(stream: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    for s in stream:
        if batch and (len(batch) == size or len(s) != len(batch[0])):
            yield batch
            batch = []
        batch.append(s)
    if batch:
        yield batch


def _moments(
    model: Any, spec: ModelKVSpec, stream: list[list[int]], groups: Sequence[Sequence[int]], skip: int, size: int,
    progress: bool,
) -> list[tuple[Moments, ...]]:  # fmt: skip
    """Moments of (keys, values) per group. Only those of x are of use; y is one column, which costs nothing."""
    total: list[tuple[Moments, ...]] = []
    with tqdm(total=len(stream), desc="reading", unit="seq", disable=not progress) as bar:
        for batch in _batches([s for s in stream if len(s) > skip], size):
            new = [tuple(moments(x, x[:, :1]) for x in pair) for pair in _rows(model, spec, batch, groups, skip)]
            total = [tuple(map(Moments.__add__, a, b)) for a, b in zip(total, new, strict=True)] if total else new
            bar.update(len(batch))
    return total


def _columns(layers: Sequence[int], width: int) -> np.ndarray:
    return np.concatenate([np.arange(i * width, (i + 1) * width) for i in layers])


def _vectors(m: Moments, weights: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean, scale, vectors): each head (of `width` features) is brought to a mean variance of its weight, so that
    equal errors cost the model equally much, before the eigenvectors are taken.
    """
    variance = np.diagonal(m.xx).reshape(-1, width).mean(1) / m.count
    scale = np.repeat(np.sqrt(np.where(variance > 0, variance, 1) / weights), width)
    cov = m.xx / scale[:, None] / scale / m.count
    values, vectors = scipy.linalg.eigh(cov, check_finite=False, overwrite_a=True)
    keep = max(1, int((values > LEAST * values.mean()).sum()))
    return m.mean_x, scale, np.ascontiguousarray(vectors[:, ::-1][:, :keep])


def sensitivity(model: Any, stream: list[list[int]], noise: float = 0.1, seed: int = 0) -> np.ndarray:
    """[2, layers, heads]: the KL divergence that noise in the keys (0) or values (1) of one head causes, per unit of
    noise variance relative to the head's own (nats per token; proportional to it while it is small).

    Measured on up to 4 sequences of up to 512 tokens: the first ones cached and disturbed, the last
    sixteenth read on top. The heads that look things up stand out by a factor of 10.
    """
    b = backends.of(model)
    ids = np.asarray([s for s in stream if len(s) == len(stream[0])][:4])[:, :512]
    n = ids.shape[1] - max(2, ids.shape[1] // 16)
    first, last, rest = ids[:, : n - 1], ids[:, n - 1 : n], ids[:, n:]
    layers = b.capture(model, first)
    want = metrics.continuation_logits(model, last, rest, b.install(model, layers))
    rng, out = np.random.default_rng(seed), []
    for i, kv in layers.items():
        for side, x in enumerate(kv):
            exact = b.to_numpy(x).astype(np.float32)
            for h in range(exact.shape[1]):
                a = exact[:, h, 1:]
                off = exact.copy()
                off[:, h, 1:] += np.sqrt(noise * a.var((0, 1)).mean()) * rng.standard_normal(a.shape, dtype=np.float32)
                new = b.from_numpy(off, x, b.dtype_of(x))
                disturbed = {**layers, i: (new, kv[1]) if side == 0 else (kv[0], new)}
                got = metrics.continuation_logits(model, last, rest, b.install(model, disturbed))
                out.append(metrics.kl(want, got).mean() / noise)
    found = np.asarray(out).reshape(len(layers), 2, -1).swapaxes(0, 1)
    return np.maximum(found, 1e-3 * found.max())


def _ranged(
    model: Any, spec: ModelKVSpec, held: list[list[int]], groups: Sequence[Sequence[int]], fitted: Any, skip: int,
    size: int,
) -> list[tuple[SideBasis, SideBasis]]:  # fmt: skip
    """The bases with quantisers whose ranges suit the held-out sequences."""
    seen: list[list[list[np.ndarray]]] = [[[], []] for _ in groups]
    lost = np.zeros((len(groups), 2))
    for batch in _batches([s for s in held if len(s) > skip], size):
        for g, pair in enumerate(_rows(model, spec, batch, groups, skip)):
            for side, x in enumerate(pair):
                mean, scale, vectors = fitted[g][side]
                a = (backends.of(x).to_numpy(x) - mean.astype(np.float32)) / scale.astype(np.float32)
                latents = a @ vectors.astype(np.float32)
                seen[g][side].append(latents)
                lost[g][side] += float((a * a).sum() - (latents * latents).sum())
    out = []
    for g, pair in enumerate(fitted):
        both = []
        for side, (mean, scale, vectors) in enumerate(pair):
            latents = np.concatenate(seen[g][side])
            limits, errors = fixed_steps(latents)
            rest = np.array([max(0.0, lost[g, side]) / len(latents)])
            mean, scale, limits, errors, rest = (a.astype(np.float32) for a in (mean, scale, limits, errors, rest))
            both.append(SideBasis(mean, scale, vectors.astype(np.float16), limits, errors, rest))
        out.append((both[0], both[1]))
    return out
