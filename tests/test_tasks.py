"""The generated tasks: deterministic, answerable from the context alone, split without overlap."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from crosskv import family
from crosskv.errors import BadInput
from crosskv.evals import run
from crosskv.evals.tasks import TASKS, Case, Filler, correct, document, make


@pytest.fixture(scope="module")
def filler() -> Filler:
    return Filler(family.text("heldout"))


def solve(case: Case) -> str:
    """The answer, found by a reader that is not the generator: regular expressions over the text of the prompt."""
    asked, text = case.question, case.context
    if case.task in ("needle", "multikey"):
        key = re.search(r"the code of the (.*)\?", asked)[1]
        return re.search(rf"The code of the {key} is (\d+)\.", text)[1]
    if case.task == "variables":
        bound = dict(re.findall(r"Let ([A-Z]) be ([A-Z]|\d+)\.", text))
        name = re.search(r"What is ([A-Z])\?", asked)[1]
        while name in bound:
            name = bound[name]
        return name
    if case.task == "copying":
        return re.search(r"The list is: ([a-z, ]+)\.", text)[1]
    if case.task == "common":
        words = re.search(r"Count these words: ([a-z ]+)\.", text)[1].split()
        return max(sorted(set(words)), key=words.count)
    if case.task == "arithmetic":
        name = re.search(r"does (\w+) have", asked)[1]
        start = int(re.search(rf"{name} has (\d+) coins\.", text)[1])
        changes = re.findall(rf"{name} (finds|loses) (\d+) coins\.", text)
        return str(start + sum(int(n) if verb == "finds" else -int(n) for verb, n in changes))
    person = re.search(r"does my (\w+) ", asked)[1]
    kinds = {"live?": "lives in", "work as?": "works as a", "color": "likes the color", "eat?": "wants to eat",
             "ticket": "has the ticket"}  # fmt: skip
    kind = next(k for word, k in kinds.items() if word in asked)
    return re.search(rf"My {person} {kind} (\w+)\.", text)[1]


@pytest.mark.parametrize("task", TASKS)
def test_an_independent_reader_finds_the_answer(task, filler):
    for seed in range(50):
        case = make(task, seed, filler, chars=1500)
        assert solve(case) == case.answer.strip()
        assert correct(case, case.answer + "\nQuestion") and not correct(case, case.answer + "7")


@pytest.mark.parametrize("task", TASKS)
def test_length_is_bounded_and_the_question_stands_apart(task, filler):
    for seed in range(20):
        case = make(task, seed, filler, chars=2000)
        assert 1500 < len(case.context) <= 2000
        assert case.prompt == case.context + case.question and case.question.strip() not in case.context


def test_the_same_seed_gives_the_same_case_and_splits_differ(filler):
    for task in TASKS:
        assert make(task, 3, filler) == make(task, 3, filler)
        one = {make(task, seed, filler, chars=600).context for seed in range(100)}
        other = {make(task, seed, filler, chars=600, split="train").context for seed in range(100)}
        assert len(one) == 100 and not one & other


def test_answers_are_spread(filler):
    """A model that always gives the most frequent answer must fail."""
    for task in TASKS:
        answers = [make(task, seed, filler, chars=600).answer for seed in range(200)]
        assert max(answers.count(a) for a in set(answers)) <= 20, task


def test_bad_input_is_one_sentence(filler):
    with pytest.raises(BadInput, match="unknown task 'nedle'; the tasks are needle"):
        make("nedle", 0, filler)
    with pytest.raises(BadInput, match="needs .* characters for its facts; got chars=10"):
        make("needle", 0, filler, chars=10)
    with pytest.raises(BadInput, match="split must be"):
        document("needle", 0, filler, split="dev")
    with pytest.raises(BadInput, match="50 are needed"):
        Filler("Too short.")


def test_token_nll_against_a_planted_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    nll = run.token_nll(lambda row: np.log(np.tile(p, (len(row), 1))) + 7.0, [0, 1, 3, 0])
    np.testing.assert_allclose(nll, -np.log([0.25, 0.125, 0.5]), rtol=1e-12)


def test_answers_agrees_with_greedy_decoding():
    """The one-pass score equals writing token by token, for a random 'model' that sometimes gets it right."""
    rng = random.Random(0)
    both = set()
    for _ in range(60):
        table = np.array([[rng.random() for _ in range(4)] for _ in range(4)])

        def logits(ids, table=table):
            return table[np.asarray(ids)]

        def encode(text):
            return [int(c) for c in text]

        case = Case("toy", 0, "01", "2", "13")
        written = encode(case.prompt)
        for _ in case.answer:
            written.append(int(logits(written)[-1].argmax()))
        want = written[len(case.prompt) :] == encode(case.answer)
        assert run.answers(logits, encode, case) == want
        both.add(want)
    assert both == {True, False}
