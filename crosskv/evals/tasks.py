"""Generated tasks whose answers stand only in the context: what a badly mapped or badly compressed cache loses first.

A case is a document (`context`), a `question` and an `answer`. The question is kept apart from the document, so that
it never enters the part of a cache that is mapped or compressed. Facts are scattered over filler text in the order in
which they were stated. Generators are deterministic: the same (task, split, seed, filler, chars) gives the same case
on every machine, and the splits "train" and "test" draw from different random streams.

The tasks are RULER's (arXiv:2404.06654: needles, variable tracking, common words) and three of our own (copying,
dialogues, arithmetic chains), in plain English so that a model of a few million weights can learn them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from crosskv.errors import BadInput

Split = Literal["train", "test"]

ADJECTIVES = (
    "amber ancient bitter blue bold brave brief bright broken calm clever cold copper cruel dark deep distant dry "
    "dusty eager early empty faint famous fierce final flat gentle giant golden grand gray green happy heavy "
    "hidden hollow honest humble iron lazy little lonely lost loud lucky narrow noble pale plain proud quick "
    "quiet rare red rough round royal rusty secret sharp silent silver simple slow small soft solid steady "
    "strange sweet swift tall thin tiny warm weary white wild wise wooden yellow young"
).split()
NOUNS = (
    "anchor apple arrow barrel basket bell bird boat book bottle box bridge brush bucket button cabin camel "
    "candle captain carpet castle chain chair clock cloud coat corner crown cup desk diamond doctor dog door drum "
    "eagle engine feather fence field fire fish flag flower forest fountain fox garden gate ghost glass glove "
    "guitar hammer harbor hat helmet hill horse house island jacket jar judge kettle key king knife ladder lake "
    "lamp lantern letter lion map market mirror monkey moon mountain needle nest ocean orange painter palace "
    "parrot pencil piano picture pilot pipe pocket poet pond prince queen rabbit ring river road robe rope rose "
    "sailor shadow sheep ship shoe soldier spoon star station stone storm stove street sword table teacher temple "
    "tiger tower train tree trumpet valley village violin wagon wall watch wheel whistle window wolf"
).split()
NAMES = (
    "Adam Agnes Albert Alice Anna Arthur Ben Clara Daniel David Edith Edward Ellen Emma Frank George Grace Harry "
    "Helen Henry Ida Jack James Jane John Julia Kate Laura Lewis Lucy Mark Martha Mary Max Nora Oscar Paul Peter "
    "Rose Ruth Sam Sarah Simon Sophie Thomas Tom Walter William"
).split()
PLACES = (
    "Athens Berlin Boston Cairo Chicago Dublin Florence Geneva Hamburg Lisbon London Madrid Milan Moscow Naples "
    "Oxford Paris Prague Rome Seville Stockholm Tokyo Venice Vienna Warsaw York Zurich"
).split()
FOODS = (
    "apples beans bread butter cake cheese cherries eggs fish grapes honey lemons milk onions pears plums rice soup"
).split()
PEOPLE = "aunt brother cousin daughter father friend mother nephew sister son teacher uncle".split()
COLORS = "black blue brown gold gray green orange pink purple red silver white yellow".split()
TRADES = (
    "baker barber captain carpenter clerk cook doctor driver farmer fisherman gardener guard hunter judge lawyer "
    "miller miner nurse painter pilot poet printer sailor singer soldier tailor teacher writer"
).split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Case:
    """One question about one document. The prompt is `context + question`; the right continuation is `answer`."""

    task: str
    seed: int
    context: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return self.context + self.question


@dataclass(frozen=True)
class Facts:
    """What a generator states (`lines`, in order) and what may be asked about it (`questions`: question, answer).

    `practice` holds easier questions that only training documents ask: the steps of what is asked in a test.
    """

    lines: Sequence[str]
    questions: Sequence[tuple[str, str]]
    practice: Sequence[tuple[str, str]] = ()


class Filler:
    """Sentences of a text, from which a document of about `chars` characters is cut at a random place."""

    def __init__(self, text: str):
        text = re.sub(r"[ \t]*\n(?!\n)[ \t]*", " ", re.sub(r"[*_#>|`]+", "", text))
        parts = re.split(r"(?<=[.!?]['\"”’])\s+|(?<=[.!?])\s+|\n+", text)
        self.sentences = [s for s in (" ".join(p.split()) for p in parts) if 20 <= len(s) <= 400]
        if len(self.sentences) < 50:
            raise BadInput(
                f"the filler text has {len(self.sentences)} usable sentences, 50 are needed; give a longer plain text"
            )

    def cut(self, rng: random.Random, chars: int, overhead: int) -> list[str]:
        """Consecutive sentences, wrapping at the end; their lengths plus `overhead` each make at most `chars`."""
        at = rng.randrange(len(self.sentences))
        out: list[str] = []
        while True:
            sentence = self.sentences[at % len(self.sentences)]
            chars -= len(sentence) + overhead
            if chars < 0:
                return out
            out.append(sentence)
            at += 1


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], n: int) -> list[str]:
    out: dict[str, None] = {}
    while len(out) < n:
        out[draw(rng)] = None
    return list(out)


def _code(rng: random.Random) -> str:
    return str(rng.randrange(1000, 10000))


def _needles(rng: random.Random, n: int) -> Facts:
    keys = _distinct(rng, _thing, n)
    codes = [_code(rng) for _ in keys]
    return Facts(
        [f"The code of the {k} is {c}." for k, c in zip(keys, codes, strict=True)],
        [(f"What is the code of the {k}?", c) for k, c in zip(keys, codes, strict=True)],
    )


def needle(rng: random.Random) -> Facts:
    """One code stated once (RULER: single needle)."""
    return _needles(rng, 1)


def multikey(rng: random.Random) -> Facts:
    """Eight codes of eight things; one is asked for (RULER: multi-key needle)."""
    return _needles(rng, 8)


def variables(rng: random.Random) -> Facts:
    """Four values, each named once and then named again by the first name (RULER: variable tracking, two hops)."""
    names = rng.sample(LETTERS, 8)
    values = _distinct(rng, lambda r: str(r.randrange(10, 100)), 4)
    firsts, seconds = names[:4], names[4:]
    stated = [f"Let {a} be {v}." for a, v in zip(firsts, values, strict=True)]
    aliases = [f"Let {b} be {a}." for a, b in zip(firsts, seconds, strict=True)]
    order = rng.sample(range(4), 4)
    questions = [(f"What is {b}?", v) for b, v in zip(seconds, values, strict=True)]
    practice = [(f"What is {a}?", v) for a, v in zip(firsts, values, strict=True)]
    return Facts(stated + [aliases[i] for i in order], questions, practice)


def copying(rng: random.Random) -> Facts:
    """Eight words to be repeated in order."""
    words = ", ".join(rng.sample(NOUNS, 8))
    return Facts([f"The list is: {words}."], [("What is the list?", words)])


def common(rng: random.Random) -> Facts:
    """Thirty words, one of them nine times, the others at most four times (RULER: common words)."""
    top, *others = rng.sample(NOUNS, 10)
    words = [top] * 9
    while len(words) < 30:
        word = rng.choice(others)
        if words.count(word) < 4:
            words.append(word)
    rng.shuffle(words)
    return Facts([f"Count these words: {' '.join(words)}."], [("Which word is the most common?", top)])


def arithmetic(rng: random.Random) -> Facts:
    """Somebody's coins after a start and two changes of at most nine; never negative."""
    name, total = rng.choice(NAMES), rng.randrange(2, 20)
    lines = [f"{name} has {total} coins."]
    for _ in range(2):
        change = rng.randrange(1, 10)
        if change <= total and rng.random() < 0.5:
            total -= change
            lines.append(f"{name} loses {change} coins.")
        else:
            total += change
            lines.append(f"{name} finds {change} coins.")
    return Facts(lines, [(f"How many coins does {name} have?", str(total))])


def dialogue(rng: random.Random) -> Facts:
    """Six facts about four people, told in the turns of a conversation; a later question names person and kind."""
    return _people(rng, 4, 6)


def _people(rng: random.Random, people: int, facts: int) -> Facts:
    kinds = [
        ("lives in {}", "Where does my {} live?", PLACES),
        ("works as a {}", "What does my {} work as?", TRADES),
        ("likes the color {}", "Which color does my {} like?", COLORS),
        ("wants to eat {}", "What does my {} want to eat?", FOODS),
        ("has the ticket {}", "Which ticket does my {} have?", None),
    ]
    pairs = rng.sample([(person, kind) for person in rng.sample(PEOPLE, people) for kind in kinds], facts)
    values = [_code(rng) if pool is None else rng.choice(pool) for _, (_, _, pool) in pairs]
    return Facts(
        [f"My {person} {statement.format(v)}." for (person, (statement, _, _)), v in zip(pairs, values, strict=True)],
        [(question.format(person), v) for (person, (_, question, _)), v in zip(pairs, values, strict=True)],
    )


TASKS: dict[str, Callable[[random.Random], Facts]] = {
    f.__name__: f for f in (needle, multikey, variables, copying, common, arithmetic, dialogue)
}


def _scatter(rng: random.Random, lines: Sequence[str], filler: Sequence[str]) -> list[str]:
    """The filler with the lines put between its sentences at random places, in order."""
    places = sorted(rng.randrange(len(filler) + 1) for _ in lines)
    out: list[str] = []
    at = 0
    for place, line in zip(places, lines, strict=True):
        out += [*filler[at:place], line]
        at = place
    return out + list(filler[at:])


def _turn(sentence: str, fact: bool) -> str:
    return f"User: {sentence}\nAssistant: {'I will remember that.' if fact else 'Go on.'}"


def _ask(task: str, question: str) -> str:
    return f"\nUser: {question}\nAssistant:" if task == "dialogue" else f"\nQuestion: {question}\nAnswer:"


def document(
    task: str, seed: int, filler: Filler, *, split: Split = "test", chars: int = 4000
) -> tuple[str, list[tuple[str, str]]]:
    """The context and every (question, answer) that may follow it, in random order, as written in the prompt.

    `chars` bounds the context's length in characters (facts and filler); facts are never cut.
    Raises BadInput for an unknown task or split, or fewer characters than the facts need.
    """
    if task not in TASKS:
        raise BadInput(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    if split not in ("train", "test"):
        raise BadInput(f"split must be 'train' or 'test', got {split!r}")
    rng = random.Random(f"{split}/{task}/{seed}")
    facts = TASKS[task](rng)
    turns = task == "dialogue"
    lines = [_turn(x, True) for x in facts.lines] if turns else facts.lines
    left = chars - sum(len(x) + 1 for x in lines)
    if left < 0:
        raise BadInput(f"task {task!r} needs {chars - left} characters for its facts; got chars={chars}")
    filler_lines = filler.cut(rng, left, len(_turn("", False)) + 1 if turns else 1)
    if turns:
        filler_lines = [_turn(x, False) for x in filler_lines]
    context = ("\n" if turns else " ").join(_scatter(rng, lines, filler_lines))
    asked = [*facts.questions, *(facts.practice if split == "train" else ())]
    questions = [(_ask(task, q), f" {a}") for q, a in asked]
    rng.shuffle(questions)
    return context, questions


def make(task: str, seed: int, filler: Filler, *, split: Split = "test", chars: int = 4000) -> Case:
    """One case: the document of (task, split, seed) and one of its questions. See `document`."""
    context, questions = document(task, seed, filler, split=split, chars=chars)
    question, answer = questions[0]
    return Case(task, seed, context, question, answer)


def conversation(
    seed: int, filler: Filler, turns: int, *, opening: int = 6, chars: int = 1500, split: Split = "test"
) -> tuple[str, list[tuple[str, str]]]:
    """A dialogue of many turns: what was said before them, and per turn (what is said and asked, the answer).

    The opening states `opening` facts among filler, in about `chars` characters. Every turn states one new fact and
    asks for one that was stated before it and never asked for, so that no answer stands in an earlier answer.
    """
    if not 1 <= turns <= 40 or not 1 <= opening <= 20:
        raise BadInput(f"turns must be from 1 to 40 and opening from 1 to 20, got {turns} and {opening}")
    rng = random.Random(f"{split}/conversation/{seed}")
    facts = _people(rng, len(PEOPLE), opening + turns)
    lines = [_turn(x, True) for x in facts.lines]
    left = max(0, chars - sum(len(x) + 1 for x in lines[:opening]))
    said = [_turn(x, False) for x in filler.cut(rng, left, len(_turn("", False)) + 1)]
    context = "\n".join(_scatter(rng, lines[:opening], said))
    stated, out = list(range(opening)), []
    for line, fact in zip(lines[opening:], range(opening, opening + turns), strict=True):
        question, answer = facts.questions[stated.pop(rng.randrange(len(stated)))]
        stated.append(fact)
        out.append((f"\n{line}{_ask('dialogue', question)}", f" {answer}"))
    return context, out


def correct(case: Case, continuation: str) -> bool:
    """Whether the text that a model wrote after `case.prompt` starts with the answer and nothing runs on from it."""
    text, answer = continuation.lstrip(), case.answer.strip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()
