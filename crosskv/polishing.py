"""Polish a mapper: from the closed form on, train its decoders on what the target says next.

    minimise  mean KL( target with its own cache || target with the mapped cache )      (paper sec. 4.4 minimises MSE)

A mapper with a shared latent is read off z = x E + e, whose features are uncorrelated and of variance 1, so that Adam
on the decoders y = z D + b, in units of what each column of D predicts, needs no other preconditioning. The encoder
stays as it is. docs/maths.md, section 3.

(Not named polish.py: a module of that name would take the place of the function crosskv.polish.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv import backends
from crosskv.backends import Array, Layers
from crosskv.errors import BadArtifact, BadInput
from crosskv.files import Tensors, write_directory, write_tensors
from crosskv.judging import SINKS, WINDOWS, Example, Judge, split, starts
from crosskv.live import check_vocab, measured, sequences
from crosskv.mapper import Mapper, pack
from crosskv.moments import moments
from crosskv.ridge import Affine, r2_of_heads
from crosskv.transfer import heads_of, latents_of, rows_of

CHECK_EVERY = 25
"""Steps between looks at the held-out sequences."""
PATIENCE = 8
"""Looks without a better one after which it ends."""
WARM_UP = 20
DECAY = 0.9, 0.99

Arrays = dict[str, Array]


def polish(
    mapper: Mapper,
    source: Any,
    target: Any,
    texts: str | Iterable[str] | Iterable[Sequence[int]],
    tokenizer: Any = None,
    *,
    steps: int = 300,
    rate: float = 0.01,
    batch: int = 4,
    length: int = 512,
    window: int = 64,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Mapper:
    """A mapper whose held-out KL is no worse than that of `mapper`, and usually much better.

    mapper: one with a latent. texts, tokenizer: as in crosskv.fit; one sequence in ten is held out. steps: at most so
    many, of `batch` sequences of `length` tokens; every sequence is continued for `window` tokens after prefixes of
    four lengths. rate: of Adam, relative to the spread of what is predicted. It ends early when the held-out KL no
    longer falls, and the best state is returned; the same seed gives the same mapper. checkpoint: a directory for the
    state so far; resume=True continues from it. Raises BadInput for a mapper without a latent or too little text, and
    what crosskv.handoff raises for the models.
    """
    if not mapper.config.latent:
        raise BadInput("Only a mapper with a latent can be polished: fit it with latent=512 (--latent 512), say.")
    if length < 2 * WINDOWS or not 1 <= window <= length - WINDOWS:
        raise BadInput(f"window must be from 1 to length - {WINDOWS}; got window {window} and length {length}.")
    mapper.check_models(measured(source), measured(target))
    ids = np.array([s for s in sequences(texts, tokenizer, length) if len(s) == length])
    if len(ids) < 2:
        raise BadInput(f"Too little text: {len(ids)} sequences of {length} tokens, at least 2 are needed.")
    for spec, word in ((mapper.source, "source"), (mapper.target, "target")):
        check_vocab(ids, spec, word)
    work = _Work(mapper, Judge(source, target, length, window))
    held, train = split(len(ids))
    judged = work.judge.examples(ids[held], batch)
    directory = None if checkpoint is None else Path(checkpoint).expanduser().absolute()
    want = _fingerprint(mapper, ids, (steps, rate, batch, window, seed))
    first = work.held_kl(work.zero(), judged)
    state = _resumed(directory, resume, want, work) or work.start(first)
    with tqdm(total=steps, initial=state.step, desc="polishing", unit="step", disable=not progress) as bar:
        while state.step < steps and state.since < PATIENCE:
            rng = np.random.default_rng([seed, state.step])
            chosen = rng.choice(train, min(batch, len(train)), replace=False)
            example = work.judge.example(ids[np.sort(chosen)], starts(length, window, rng))
            state = work.stepped(state, example, rate * _schedule(state.step, steps))
            bar.update()
            if state.step % CHECK_EVERY == 0 or state.step == steps:
                state = _looked(state, work.held_kl(state.params, judged))
                bar.set_postfix_str(f"held-out KL {first:.4f} -> {state.best_kl:.4f}")
                _save(directory, state, want)
    about = {"steps": state.step, "rate": rate, "batch": batch, "length": length, "window": window, "seed": seed}
    return work.finished(state, judged, first, about)


# ---- one step ----


@dataclass(frozen=True)
class _State:
    """After `step` steps: parameters, Adam's two averages, the best parameters so far with their held-out KL, and how
    many looks ago that was."""

    step: int
    params: Arrays
    mean: Arrays
    square: Arrays
    best: Arrays
    best_kl: float
    since: int


class _Work:
    """The decoders of a mapper side by side, and the changes to them that are trained: weight [r, Q], bias [Q], in
    units of what each output column predicts."""

    def __init__(self, mapper: Mapper, judge: Judge):
        self.mapper, self.judge, self.b = mapper, judge, judge.backend
        self.layers = sorted(mapper.layers)
        like = self.b.weight(judge.target)
        maps = [mapper.weights(t)[kind].unpacked() for kind in (0, 1) for t in self.layers]
        weight, bias = np.concatenate([w for w, _ in maps], 1), np.concatenate([b for _, b in maps])
        spread = np.linalg.norm(weight, axis=0)  # the latents have variance 1
        put = [weight, bias, spread / len(weight) ** 0.5, spread]
        self.weight, self.bias, self.unit, self.spread = (self.b.from_numpy(x, like, "float32") for x in put)

    def zero(self) -> Arrays:
        return {"weight": self.weight * 0, "bias": self.bias * 0}

    def start(self, kl: float) -> _State:
        return _State(0, self.zero(), self.zero(), self.zero(), self.zero(), kl, 0)

    def latents(self, e: Example) -> Array:
        """[B, N, r] of the prefix."""
        return self.b.cast(latents_of(e.theirs, self.mapper, e.positions, *self.judge.specs, e.own), "float32")

    def stepped(self, s: _State, e: Example, rate: float) -> _State:
        """One step of Adam (Kingma and Ba 2015)."""
        z, want = self.latents(e), self.judge.said(e.own, e)
        _, grads = self.b.value_and_grad(lambda p: self.kl(p, e, z, want).mean(), s.params)
        a, b = DECAY
        mean = {k: a * s.mean[k] + (1 - a) * g for k, g in grads.items()}
        square = {k: b * s.square[k] + (1 - b) * g * g for k, g in grads.items()}
        t = s.step + 1
        params = {
            k: p - rate * (mean[k] / (1 - a**t)) / (self.b.xp.sqrt(square[k] / (1 - b**t)) + 1e-12)
            for k, p in s.params.items()
        }
        return replace(s, step=t, params=params, mean=mean, square=square)

    def kl(self, params: Arrays, e: Example, z: Array, want: Sequence[Array]) -> Array:
        """Mean KL [B] of every sequence, given its latents and what is said with the target's own cache."""
        return self.judge.drift(want, self.judge.said(self.judge.joined(self._mapped(params, z), e), e))

    def held_kl(self, params: Arrays, judged: Sequence[Example]) -> float:
        every = [self.kl(params, e, self.latents(e), self.judge.said(e.own, e)) for e in judged]
        return float(np.concatenate([self.b.to_numpy(x) for x in every]).mean())

    def _mapped(self, params: Arrays, z: Array) -> Layers:
        """The mapped layers from the latents."""
        y = z @ (self.weight + params["weight"] * self.unit) + (self.bias + params["bias"] * self.spread)
        spec, pairs = self.judge.specs[1], {}
        for i, t in enumerate(self.layers):
            k, v = (y[..., j * spec.width : (j + 1) * spec.width] for j in (i, i + len(self.layers)))
            pairs[t] = k, v
        return heads_of(pairs, spec, np.arange(y.shape[1]), self.mapper.config)

    # ---- the end ----

    def finished(self, s: _State, judged: Sequence[Example], first: float, about: dict[str, Any]) -> Mapper:
        """The mapper with the best decoders, rounded as they are stored; the old one when that is not better."""
        before = after = float(self.judge.kl(self.mapper, judged).mean())
        chosen = self.mapper
        if s.best_kl < first:
            made = self._stored(s.best, judged)
            after = min(before, kl := float(self.judge.kl(made, judged).mean()))
            chosen = made if kl < before else self.mapper
        return chosen.with_provenance({"polish": about | {"held_out_kl_before": before, "held_out_kl": after}})

    def _stored(self, params: Arrays, judged: Sequence[Example]) -> Mapper:
        raw = self.weight + params["weight"] * self.unit, self.bias + params["bias"] * self.spread
        weight, bias = (self.b.to_numpy(x).astype(np.float64) for x in raw)
        rows = reduce(add, (moments(*self._rows(e)) for e in judged))
        spec, config = self.judge.specs[1], self.mapper.config
        r2 = r2_of_heads(rows, Affine(weight, bias), weight.shape[1] // spec.head_dim).reshape(2, len(self.layers), -1)
        layers, weights = {}, {}
        for i, t in enumerate(self.layers):
            cuts = [slice(j * spec.width, (j + 1) * spec.width) for j in (i, i + len(self.layers))]
            keys, values = (pack(Affine(weight[:, c], bias[c]), np.zeros(len(weight)), config.dtype) for c in cuts)
            weights[t] = keys, values
            layers[t] = replace(self.mapper.layers[t], r2_keys=float(r2[0, i].mean()), r2_values=float(r2[1, i].mean()))
        old = self.mapper
        return Mapper(old.source, old.target, config, layers, weights, old.provenance, encoder=old.encoder)

    def _rows(self, e: Example) -> tuple[np.ndarray, np.ndarray]:
        """(latents, the target's own pre-RoPE keys and values) of an example, one row per token."""
        own = rows_of(e.own, self.judge.specs[1], e.positions, self.mapper.config)
        parts = [backends.of(own[t][kind]).to_numpy(own[t][kind]) for kind in (0, 1) for t in self.layers]
        x, y = (
            a[:, SINKS:].reshape(-1, a.shape[-1]) for a in (self.b.to_numpy(self.latents(e)), np.concatenate(parts, -1))
        )
        return x, y


def _schedule(step: int, steps: int) -> float:
    """Warm-up, then half a cosine down to 0."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + float(np.cos(np.pi * step / steps)))


def _looked(s: _State, kl: float) -> _State:
    if kl < s.best_kl:
        return replace(s, best=s.params, best_kl=kl, since=0)
    return replace(s, since=s.since + 1)


# ---- checkpoints ----

STATES = ("params", "mean", "square", "best")


def _fingerprint(mapper: Mapper, ids: np.ndarray, options: tuple[Any, ...]) -> str:
    digest = hashlib.sha256(json.dumps([mapper.to_json(), options], sort_keys=True).encode())
    digest.update(ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _save(directory: Path | None, s: _State, fingerprint: str) -> None:
    if directory is None:
        return
    tensors = {
        f"{which}.{name}": np.ascontiguousarray(backends.of(x).to_numpy(x))
        for which in STATES
        for name, x in getattr(s, which).items()
    }

    def write(where: Path) -> None:
        write_tensors(where / "polish.safetensors", tensors)
        about = {"fingerprint": fingerprint, "step": s.step, "best_kl": s.best_kl, "since": s.since}
        (where / "polish.json").write_text(json.dumps(about))

    write_directory(directory, "polish.json", write)


def _resumed(directory: Path | None, resume: bool, fingerprint: str, work: _Work) -> _State | None:
    if directory is None or not (directory / "polish.json").exists():
        return None
    if not resume:
        raise BadInput(
            f"{directory} holds a checkpoint. Pass resume=True (--resume) to continue from it, or remove it."
        )
    try:
        about = json.loads((directory / "polish.json").read_text())
        tensors = Tensors(directory / "polish.safetensors")
        found = [
            {name: work.b.from_numpy(tensors[f"{which}.{name}"], work.weight) for name in ("weight", "bias")}
            for which in STATES
        ]
        same, numbers = about["fingerprint"] == fingerprint, (about["step"], about["best_kl"], about["since"])
    except (KeyError, TypeError, json.JSONDecodeError) as e:
        raise BadArtifact(f"The checkpoint in {directory} cannot be read ({e}). Remove it and start again.") from e
    if not same:
        raise BadInput(
            f"The checkpoint in {directory} is of another mapper, text or setting. Choose another directory."
        )
    params, mean, square, best = found
    return _State(numbers[0], params, mean, square, best, *numbers[1:])
