"""Many hand-offs in one conversation: two models take turns over one dialogue (paper 4.6).

Before a model's turn, what the other has read and written since comes to it as a mapped cache; the turn's own words
(a new fact and a question about an older one) it reads itself. The answers in the history are the right ones, so that
all arms see the same words and an error of one turn is not the next one's. Arms:

    own             the target alone, every turn
    source          the source alone
    alternating     the source takes the even turns, the target the odd ones; each keeps what it has read itself
    back and forth  the same turns, but all tokens but the first `sinks` are mapped anew every time: errors pile up
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv import backends, live
from crosskv.backends import Layers
from crosskv.errors import BadInput
from crosskv.evals import run, tasks
from crosskv.evals.suite import Cases
from crosskv.mapper import Mapper


class Speaker:
    """A model and what it has in its cache of the conversation."""

    def __init__(self, model: Any, ids: Sequence[int]):
        self.model, self.backend = model, backends.of(model)
        self.layers: Layers = self.backend.capture(model, [list(ids)]) if ids else {}

    def reads(self, ids: Sequence[int], answer: int, layers: Layers | None = None) -> bool:
        """Read `ids` on top of the cache (or of `layers`): whether greedy decoding would have written the last `answer`
        tokens of them."""
        cache = self.backend.install(self.model, self.layers if layers is None else layers)
        logits = self.backend.to_numpy(self.backend.logits(self.model, [list(ids)], cache))[0]
        self.layers = self.backend.read(self.model, cache)
        return bool((logits[-answer - 1 : -1].argmax(-1) == np.asarray(ids[-answer:])).all())


def dialogue_ids(encode: run.Encode, context: str, turns: Sequence[tuple[str, str]]) -> tuple[list[int], list[tuple]]:
    """Token ids of the opening, and per turn (ids of what is said and answered, how many of them are the answer)."""
    text, out = context, []
    history = encode(context)
    opening = history
    for asked, answer in turns:
        prompt, full = encode(text + asked), encode(text + asked + answer)
        if full[: len(prompt)] != prompt or prompt[: len(history)] != history:
            raise BadInput(f"The tokenizer merges across the turns at {asked[-30:]!r} and {answer!r}.")
        out.append((full[len(history) :], len(full) - len(prompt)))
        text, history = text + asked + answer, full
    return opening, out


def alone(model: Any, opening: Sequence[int], turns: Sequence[tuple]) -> list[bool]:
    """Which turns the model answers rightly on its own cache."""
    speaker = Speaker(model, opening)
    return [speaker.reads(ids, n) for ids, n in turns]


def together(
    there: Mapper, back: Mapper, source: Any, target: Any, opening: Sequence[int], turns: Sequence[tuple],
    keep: bool = True, sinks: int = 1,
) -> list[bool]:  # fmt: skip
    """Which turns are answered rightly when source and target take them in turn, the source first.

    there, back: mappers source -> target and target -> source. keep: a model keeps what it has read itself (only the
    other's tokens are mapped), else the whole cache is mapped anew at every hand-off.
    """
    one, other = Speaker(source, opening), Speaker(target, ())
    history, right = list(opening), []
    for i, (ids, n) in enumerate(turns):
        me, they, mapper = (one, other, back) if i % 2 == 0 else (other, one, there)
        layers = None if i == 0 else handed(mapper, they, me, history, keep, sinks)
        right.append(me.reads(ids, n, layers))
        history += ids
    return right


def handed(mapper: Mapper, they: Speaker, me: Speaker, history: Sequence[int], keep: bool, sinks: int) -> Layers:
    """The conversation so far in my own kind of keys and values."""
    options: dict[str, Any] = {"source_cache": they.backend.install(they.model, they.layers), "sinks": sinks}
    if keep and me.layers:
        options["target_cache"] = me.backend.install(me.model, me.layers)
    prompt = [*history, history[-1]]  # the last one is held back: any token will do
    return live.mapped_layers(mapper, they.model, me.model, [prompt], **options)


def measure(
    there: Mapper, back: Mapper, source: Any, target: Any, encode: run.Encode, text: str, cases: Cases, *,
    count: int = 20, turns: int = 15, chars: int = 1500, sinks: int = 1, progress: bool = True,
) -> None:  # fmt: skip
    """One case row per dialogue and turn, with the arms above; what `cases` has is not measured again."""
    filler = tasks.Filler(text)
    for seed in tqdm(range(count), desc="drift", unit="dialogue", disable=not progress):
        opening, asked = dialogue_ids(encode, *tasks.conversation(seed, filler, turns, chars=chars))
        inputs = hashlib.sha256(repr((opening, asked)).encode()).hexdigest()
        if all([cases.has("drift", seed, inputs, turn) for turn in range(turns)]):
            continue
        found = {
            "own": alone(target, opening, asked),
            "source": alone(source, opening, asked),
            "alternating": together(there, back, source, target, opening, asked, True, sinks),
            "back and forth": together(there, back, source, target, opening, asked, False, sinks),
        }
        for turn in range(turns):
            if not cases.has("drift", seed, inputs, turn):
                right = {name: float(x[turn]) for name, x in found.items()}
                who = "source" if turn % 2 == 0 else "target"
                cases.add("drift", seed, inputs, "accuracy", {"arms": right}, turn=turn, answers=who, floor=0.0)
