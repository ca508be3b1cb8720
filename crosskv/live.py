"""Live models: fit a mapper from two models and text, and hand a prompt over from one to the other.

(Not named handoff.py or fit.py: a module of that name would take the place of the function crosskv.handoff.)
"""

from __future__ import annotations

import datetime
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import crosskv
from crosskv import backends
from crosskv.backends import Array, Layers
from crosskv.errors import BadArtifact, BadInput, MatchedKVError
from crosskv.files import Tensors, write_directory, write_tensors
from crosskv.layout import ModelKVSpec, check_finite
from crosskv.mapper import Mapper, MapperConfig
from crosskv.moments import Moments
from crosskv.transfer import HOLD_OUT, Stats, check_pair, finite_rows, map_cache, paired_rows, solve

SAVE_EVERY = 16
"""Batches between checkpoints; an interrupt saves at once."""

_measured: dict[int, tuple[weakref.ref, ModelKVSpec]] = {}


def measured(model: Any) -> ModelKVSpec:
    """ModelKVSpec.from_model, remembered for as long as the model lives."""
    known = _measured.get(id(model))
    if known is None or known[0]() is not model:
        _measured[id(model)] = known = (weakref.ref(model), ModelKVSpec.from_model(model))
    return known[1]


# ---- handoff ----


@dataclass(frozen=True)
class Handoff:
    """What the target continues from: its own kind of cache, and the tokens [B, hold_back] that it still has to read.

    transformers:  target.generate(prompt_ids, cache=h.cache)          (past_key_values= before 5.24)
    mlx-lm:        mlx_lm.generate(target, tokenizer, prompt=h.tokens[0].tolist(), prompt_cache=h.cache)
    """

    cache: Any
    tokens: Array


def handoff(
    mapper: Mapper,
    source: Any,
    target: Any,
    prompt: Any,
    *,
    source_cache: Any = None,
    target_cache: Any = None,
    mask: Any = None,
    hold_back: int = 1,
    sinks: int = 1,
    exact_layers: int | None = None,
    force: bool = False,
) -> Handoff:
    """Prefill `prompt` in the source, map its cache, and return a cache that the target continues from.

    prompt: all token ids so far, [T] or [B, T]; mask [B, T]: 0 for left padding. source_cache: the source's own cache
    of the first tokens (any number); the source reads only what is missing. target_cache: the target's own cache of the
    first tokens, kept exactly; only what follows is mapped. Neither is changed. hold_back: the last tokens, which the
    target reads itself: at least 1, for its first logits. sinks: the first tokens, which the target computes itself:
    attention sinks do not map, and one token costs nothing. exact_layers: the target's first layers, which it computes
    itself over all tokens, at that share of its prefill's cost; at least (and by default) those that the mapper reads.
    force: use a mapper that was fitted on other models. Raises IncompatibleModels for a mapper of another pair,
    BadInput for anything wrong with the tokens or caches.
    """
    layers, ids, mask, n = _handed(
        mapper, source, target, prompt, source_cache, target_cache, mask, hold_back, sinks, exact_layers, force
    )
    b = backends.of(target)
    return Handoff(b.install(target, layers, _upto(mask, n)), b.tokens(target, ids[:, n:]))


def mapped_layers(
    mapper: Mapper, source: Any, target: Any, prompt: Any, *, source_cache: Any = None, target_cache: Any = None,
    hold_back: int = 1, sinks: int = 1, exact_layers: int | None = None, force: bool = False,
) -> dict[int, tuple[Array, Array]]:  # fmt: skip
    """The keys and values of `handoff`'s cache, before they are installed."""
    return _handed(
        mapper, source, target, prompt, source_cache, target_cache, None, hold_back, sinks, exact_layers, force
    )[0]


def _handed(
    mapper: Mapper, source: Any, target: Any, prompt: Any, source_cache: Any, target_cache: Any, mask: Any,
    hold_back: int, sinks: int, exact_layers: int | None, force: bool,
) -> tuple[dict[int, tuple[Array, Array]], np.ndarray, np.ndarray | None, int]:  # fmt: skip
    """(the target's keys and values of the first n tokens, all ids, mask, n)."""
    src, tgt = backends.of(source), backends.of(target)
    ids = as_ids(prompt)
    batch, total = ids.shape
    mask = None if mask is None else as_ids(mask)
    _check_handoff(ids, mask, hold_back, sinks)
    specs = measured(source), measured(target)
    if not force:
        mapper.check_models(*specs)
    for spec, word in zip(specs, ("source", "target"), strict=True):
        check_vocab(ids, spec, word)
    first = _first_layers(exact_layers, mapper)
    n = total - hold_back
    exact, m = _exact(target, ids[:, :n], mask, target_cache, sinks)
    past = _past(source, source_cache, batch, n, "source_cache")
    read = _length(past)
    specs = specs[0].at(source, n), specs[1].at(target, total)
    if past and any(r.lengths is not None and r.lengths[0] > 1 for r in specs[0].ropes):
        raise MatchedKVError(
            f"The source's RoPE changes with the length, and at {n} tokens it is not known with which frequencies the "
            "keys of source_cache were rotated. Pass the prompt without source_cache."
        )
    layers = exact
    if m < n:
        have = src.capture(source, ids[:, read:n], _upto(mask, n), past) if read < n else past
        part = {i: tuple(_moved(src, tgt, x[:, :, m:n]) for x in kv) for i, kv in have.items()}
        own: dict[int, tuple[Array, Array]] = {}
        if first:
            known = {i: kv for i, kv in exact.items() if i < first}
            own = tgt.capture(target, ids[:, m:n], _upto(mask, n), known, layers=first)
            own = {i: (k[:, :, m:], v[:, :, m:]) for i, (k, v) in own.items()}
        mapped = map_cache(part, mapper, _positions(mask, n)[..., m:], *specs, unload_after=False, exact=own) | own
        check_finite(mapped, "mapped")
        layers = {i: _joined(tgt, exact.get(i), kv) for i, kv in mapped.items()}
    return dict(layers), ids, mask, n


def _first_layers(given: int | None, mapper: Mapper) -> int:
    """How many of the target's first layers are computed by itself."""
    least, most = mapper.config.exact_layers, mapper.target.n_layers
    if given is None:
        return least
    if not least <= given <= most:
        raise BadInput(
            f"exact_layers must be from {least} (what this mapper reads) to {most} (all: a prefill), got {given}."
        )
    return given


def as_ids(tokens: Any) -> np.ndarray:
    """Token ids (or a mask) of any kind as integers [B, T]."""
    try:
        a = np.asarray(backends.of(tokens).to_numpy(tokens))
    except BadInput:
        a = np.asarray(tokens)
    if a.dtype == bool:
        a = a.astype(np.int64)
    if a.ndim not in (1, 2) or a.size == 0 or not np.issubdtype(a.dtype, np.integer):
        raise BadInput(f"Expected token ids, a non-empty [T] or [B, T] of integers; got {a.dtype} of shape {a.shape}.")
    return a[None] if a.ndim == 1 else a


def check_vocab(ids: np.ndarray, spec: ModelKVSpec, who: str) -> None:
    """Token ids that one model lacks are the sign of another tokenizer."""
    vocab = spec.identity["vocab"]
    if ids.min() < 0 or ids.max() >= vocab:
        raise BadInput(
            f"Token id {int(ids.max() if ids.max() >= vocab else ids.min())} is outside the {who}'s vocabulary of "
            f"{vocab}. "
            "Source and target must share one tokenizer, and the ids must come from it."
        )


def _check_handoff(ids: np.ndarray, mask: np.ndarray | None, hold_back: int, sinks: int) -> None:
    if mask is not None and mask.shape != ids.shape:
        raise BadInput(f"mask has shape {mask.shape}, the prompt {ids.shape}.")
    if not 1 <= hold_back < ids.shape[1]:
        raise BadInput(
            f"hold_back must be from 1 to {ids.shape[1] - 1} for a prompt of {ids.shape[1]} tokens, got {hold_back}."
        )
    if sinks < 0:
        raise BadInput(f"sinks must not be negative, got {sinks}.")


def _exact(target: Any, ids: np.ndarray, mask: np.ndarray | None, cache: Any, sinks: int) -> tuple[Layers, int]:
    """The first tokens in the target's own arithmetic, and how many they are."""
    b, n = backends.of(target), ids.shape[1]
    if cache is not None:
        layers = _past(target, cache, ids.shape[0], n, "target_cache")
        if _length(layers) > 0:
            return layers, _length(layers)
    padding = 0 if mask is None else int((mask == 0).sum(1).max())
    m = min(padding + sinks, n) if sinks else 0
    return (b.capture(target, ids[:, :m], _upto(mask, m)), m) if m else ({}, 0)


def _past(model: Any, cache: Any, batch: int, n: int, name: str) -> dict[int, tuple[Array, Array]]:
    if cache is None:
        return {}
    layers = backends.of(model).read(model, cache)
    if layers and layers[0][0].shape[0] != batch:
        raise BadInput(f"{name} holds {layers[0][0].shape[0]} sequences, the prompt {batch}.")
    return {i: (k[:, :, :n], v[:, :, :n]) for i, (k, v) in layers.items()}


def _length(layers: Layers) -> int:
    return layers[0][0].shape[2] if layers else 0


def _upto(mask: np.ndarray | None, n: int) -> np.ndarray | None:
    return None if mask is None else mask[:, :n]


def _positions(mask: np.ndarray | None, n: int) -> np.ndarray:
    return np.arange(n) if mask is None else (mask[:, :n].cumsum(1) - 1).clip(min=0)


def _moved(src: backends.Backend, tgt: backends.Backend, x: Array) -> Array:
    return x if src is tgt else tgt.from_numpy(src.to_numpy(x))


def _joined(b: backends.Backend, head: tuple[Array, Array] | None, tail: tuple[Array, Array]) -> tuple[Array, Array]:
    """exact tokens, then mapped ones, in the dtype and on the device of the exact ones."""
    if head is None:
        return tail
    k, v = (b.xp.concatenate([a, _like(b, x, a)], 2) for a, x in zip(head, tail, strict=True))
    return k, v


def _like(b: backends.Backend, x: Array, like: Array) -> Array:
    return b.move(b.cast(x, b.dtype_of(like)), like)


# ---- fit ----


def fit(
    source: Any,
    target: Any,
    texts: str | Iterable[str] | Iterable[Sequence[int]],
    tokenizer: Any = None,
    config: MapperConfig | None = None,
    *,
    batch_size: int = 8,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Mapper:
    """Fit a mapper for two live models (of either host) on calibration text, in one pass and in constant memory.

    texts: strings (then `tokenizer` is needed) or lists of token ids, any iterable; they are joined and cut into
    config.n_calib_sequences sequences of config.calib_seq_len tokens. One sequence in ten is held out. checkpoint: a
    directory for the moments so far; resume=True continues from it. An interrupt loses the batch it is in. Raises
    MatchedKVError or IncompatibleModels for the models, BadInput for the text.
    """
    config = MapperConfig() if config is None else config
    stats, about = read_moments(
        source, target, texts, tokenizer, config,
        batch_size=batch_size, checkpoint=checkpoint, resume=resume, progress=progress,
    )  # fmt: skip
    with tqdm(total=0, desc="solving", unit="layer", disable=not progress) as bar:
        return solve(stats, measured(source), measured(target), config, about, _teller(bar))


def read_moments(
    source: Any,
    target: Any,
    texts: str | Iterable[str] | Iterable[Sequence[int]],
    tokenizer: Any,
    config: MapperConfig,
    *,
    batch_size: int,
    checkpoint: str | Path | None,
    resume: bool,
    progress: bool,
) -> tuple[Stats, dict[str, Any]]:
    """What `fit` solves from: the moments of the pair, and what a mapper says of where it comes from."""
    length = config.calib_seq_len
    specs = measured(source).at(source, length), measured(target).at(target, length)
    check_pair(specs[0], specs[1], config)
    state = _State(Stats(), 0, hashlib.sha256())
    want = _fingerprint(specs, config)
    directory = None if checkpoint is None else Path(checkpoint).expanduser().absolute()
    saved = _open_checkpoint(directory, resume, want)
    stream = islice(sequences(texts, tokenizer, config.calib_seq_len), config.n_calib_sequences)
    if saved is not None:
        state = _skip(saved, stream)
    total = config.n_calib_sequences
    with tqdm(total=total, initial=state.done, desc="reading", unit="seq", disable=not progress) as bar:
        try:
            for i, batch in enumerate(_batches(stream, batch_size)):
                state = _read(state, batch, source, target, specs, config)
                bar.update(len(batch))
                if (i + 1) % SAVE_EVERY == 0:
                    _save_checkpoint(directory, state, want)
        except BaseException:  # an interrupt too: all whole batches are kept
            _save_checkpoint(directory, state, want)
            raise
    if state.done == 0:
        raise BadInput("The calibration text is empty: no sequence of at least 2 tokens in it.")
    _save_checkpoint(directory, state, want)
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "crosskv": crosskv.__version__,
        "sequences": state.done,
        "text_sha256": state.digest.hexdigest(),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
    }
    return state.stats.flush(), about


def _teller(bar: tqdm) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return tell


def sequences(texts: Any, tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Texts joined and cut into sequences of `length` tokens; a rest of at least 2 tokens is the last one."""
    held: list[int] = []
    for text in [texts] if isinstance(texts, str) else texts:
        held += _encode(text, tokenizer)
        while len(held) >= length:
            yield held[:length]
            held = held[length:]
    if len(held) >= 2:
        yield held


def _encode(text: Any, tokenizer: Any) -> list[int]:
    if not isinstance(text, str):
        return [int(t) for t in text]
    if tokenizer is None:
        raise BadInput("To fit on strings, pass tokenizer=; or pass lists of token ids.")
    out = tokenizer.encode(text)
    return list(getattr(out, "ids", out))


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the vocabulary, None when there is no tokenizer."""
    if tokenizer is None or not hasattr(tokenizer, "get_vocab"):
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _batches(stream: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Up to `size` sequences of one length at a time."""
    batch: list[list[int]] = []
    for s in stream:
        if batch and (len(batch) == size or len(s) != len(batch[0])):
            yield batch
            batch = []
        batch.append(s)
    if batch:
        yield batch


@dataclass(frozen=True)
class _State:
    stats: Stats
    done: int
    digest: Any


def _read(
    state: _State, batch: list[list[int]], source: Any, target: Any, specs: Sequence[ModelKVSpec], config: MapperConfig
) -> _State:
    """The state after one more batch; the old one stays as it was."""
    ids = np.asarray(batch)
    for spec, word in zip(specs, ("source", "target"), strict=True):
        check_vocab(ids, spec, word)
    src, tgt = backends.of(source), backends.of(target)
    a, b = src.capture(source, ids), tgt.capture(target, ids)
    stats, digest = state.stats.copy(), state.digest.copy()
    digest.update(ids.astype("<i4").tobytes())
    cut = slice(config.skip, None, config.stride)
    at = np.arange(ids.shape[1])[cut]
    if len(at):
        x = {i: (k[:, :, cut], v[:, :, cut]) for i, (k, v) in a.items()}
        y = {i: (_moved(tgt, src, k[:, :, cut]), _moved(tgt, src, v[:, :, cut])) for i, (k, v) in b.items()}
        rows = paired_rows(x, y, specs[0], specs[1], at, config)
        if not finite_rows(rows):
            check_finite(a, "source")
            check_finite(b, "target")
        for j in range(len(batch)):
            one = slice(j * len(at), (j + 1) * len(at))
            stats.add(tuple((x[one], y[one]) for x, y in rows), held=(state.done + j) % HOLD_OUT == 1)
    return _State(stats, state.done + len(batch), digest)


# ---- checkpoints ----


def _fingerprint(specs: Sequence[ModelKVSpec], config: MapperConfig) -> str:
    """What has to be equal for moments to be continued: the models and how rows are made. Not k, nor the penalty."""
    rows: tuple[Any, ...] = (config.calib_seq_len, config.stride, config.skip, config.content_space)
    rows += (config.features, config.exact_layers)
    text = json.dumps([*(s.to_json() for s in specs), rows], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _save_checkpoint(directory: Path | None, state: _State, fingerprint: str) -> None:
    if directory is None or state.done == 0:
        return
    stats = state.stats.copy().flush()
    tensors: dict[str, np.ndarray] = {}
    about = {}
    for split, pair in (("train", stats.train), ("held", stats.held)):
        for kind, m in zip(_parts(pair), pair, strict=True):
            fields = asdict(m)
            about[f"{split}.{kind}"] = {"count": fields.pop("count"), "eps": fields.pop("eps")}
            tensors |= {f"{split}.{kind}.{name}": a for name, a in fields.items()}

    def write(where: Path) -> None:
        write_tensors(where / "fit.safetensors", tensors)
        text = {"fingerprint": fingerprint, "done": state.done, "digest": state.digest.hexdigest(), "moments": about}
        (where / "fit.json").write_text(json.dumps(text))

    write_directory(directory, "fit.json", write)


def _parts(pair: tuple[Moments, ...]) -> tuple[str, ...]:
    return ("both",) if len(pair) == 1 else ("keys", "values")[: len(pair)]


def _open_checkpoint(directory: Path | None, resume: bool, fingerprint: str) -> tuple[Stats, int, str] | None:
    if directory is None or not (directory / "fit.json").exists():
        return None
    if not resume:
        raise BadInput(
            f"{directory} holds a checkpoint. Pass resume=True (--resume) to continue from it, or remove it."
        )
    try:
        about = json.loads((directory / "fit.json").read_text())
        if about["fingerprint"] != fingerprint:
            raise BadInput(
                f"The checkpoint in {directory} was made with other models, or another calib_seq_len, stride, skip or "
                "content_space. Choose another directory."
            )
        tensors = Tensors(directory / "fit.safetensors")
        names = ("mean_x", "mean_y", "xx", "xy", "yy")
        made = {
            key: Moments(**{**extra, **{n: tensors[f"{key}.{n}"] for n in names}})
            for key, extra in about["moments"].items()
        }
    except (KeyError, TypeError, json.JSONDecodeError) as e:
        raise BadArtifact(f"The checkpoint in {directory} cannot be read ({e}). Remove it and start again.") from e
    train, held = (
        tuple(made[f"{s}.{k}"] for k in ("keys", "values", "both") if f"{s}.{k}" in made) for s in ("train", "held")
    )
    return Stats(train, held), about["done"], about["digest"]


def _skip(saved: tuple[Stats, int, str], stream: Iterator[list[int]]) -> _State:
    """Pass over the sequences that a checkpoint has read, making sure that they are the same ones."""
    stats, done, want = saved
    digest = hashlib.sha256()
    for s in islice(stream, done):
        digest.update(np.asarray(s).astype("<i4").tobytes())
    if digest.hexdigest() != want:
        raise BadInput("The calibration text is not the one that this checkpoint was made from.")
    return _State(stats, done, digest)
