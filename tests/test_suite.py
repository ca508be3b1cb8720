"""The suite on trained models: identity arms are exact, broken ones are caught, an interrupted run loses nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_cli import crosskv as command

import crosskv
from crosskv import backends, family, live, metrics, rope
from crosskv.errors import BadInput
from crosskv.evals import arms, drift, run, suite, tasks
from crosskv.evals.arms import Arm, Start

TEXT = family.text("heldout")
CHARS = 700


@pytest.fixture(scope="module")
def mapper(family_model, tmp_path_factory):
    """S -> M, and the models' names with it, as `crosskv fit` leaves it."""
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=48, calib_seq_len=256, stride=1)
    fitted = crosskv.fit(source, target, family.text("calibration")[:150_000], tokenizer, config, progress=False)
    fitted.provenance["models"] = ["family:S", "family:M"]
    return fitted.save(tmp_path_factory.mktemp("suite") / "S-M")


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_own_arm_is_the_model_itself(host, family_model):
    """NLL and answers of the arm "own" are those of one plain reading of the whole text."""
    model, tokenizer = family_model("M", host)
    b = backends.of(model)
    passages = suite.passages(tokenizer.encode, TEXT, 3, 96, 24)
    asked = suite.generated(tokenizer.encode, "needle", TEXT, 3, CHARS)
    own = arms.cache_arms(model, {})[:1]
    for items in (passages, asked):
        for item in items:
            got = suite.scores(own, [item], [item.context])[0]["arms"]["own"]
            whole = [*item.context, *item.asked]
            logits = b.to_numpy(b.logits(model, [whole]))[0]
            n = len(item.asked) - item.first
            if item.metric == "nll":
                want = run.token_nll(lambda _, x=logits: x, whole)[-n:].mean()
                assert got == pytest.approx(want, abs=1e-4)
            else:
                assert got == float((logits[-n - 1 : -1].argmax(-1) == np.asarray(whole[-n:])).all())
    filler = tasks.Filler(TEXT)
    case = tasks.make("needle", 1, filler, chars=CHARS)
    assert list(asked[1].context + asked[1].asked) == tokenizer.encode(case.prompt + case.answer)


def _broken(model, name, change):
    def start(c):
        return Start({i: change(i, k, v) for i, (k, v) in c.by(model).items()}, c.ids[:, :0])

    return Arm(name, model, start, (model,), {})


def test_broken_arms_are_caught(family_model, tmp_path):
    """Heads shifted, keys at wrong positions, layers swapped: the interval of the NLL's rise excludes zero, and lookups
    are lost."""
    model, tokenizer = family_model("M", "torch")
    b, ropes = backends.of(model), live.measured(model).ropes

    def elsewhere(i, k, v):
        at = np.arange(k.shape[2])
        bare = rope.unrotate(k, rope.tables(ropes[i], at, k, "float32"))
        return rope.rotate(bare, rope.tables(ropes[i], at + 40, k, "float32")), v

    def swapped(c):
        layers = c.by(model)
        return Start({i: layers[i ^ 1] for i in layers}, c.ids[:, :0])

    made = [
        *(a for a in arms.cache_arms(model, {}) if a.name == "own"),
        _broken(model, "heads shifted", lambda i, k, v: (b.xp.roll(k, 1, 1), b.xp.roll(v, 1, 1))),
        _broken(model, "wrong positions", elsewhere),
        Arm("layers swapped", model, swapped, (model,), {}),
    ]
    cases = suite.Cases(tmp_path / "cases.jsonl", {"model": "M"})
    options = {"text": TEXT, "count": 12, "prefix": 96, "continuation": 24, "chars": CHARS, "progress": False}
    suite.evaluate(made, tokenizer, ["nll", "needle"], cases, **options)
    score = {a.name: {t: np.array([r["arms"][a.name] for r in cases.rows if r["task"] == t]) for t in ("nll", "needle")}
             for a in made}  # fmt: skip
    assert score["own"]["needle"].mean() > 0.9
    for name in ("heads shifted", "wrong positions", "layers swapped"):
        rise = score[name]["nll"] - score["own"]["nll"]
        assert metrics.paired_bootstrap(np.mean, rise)[0] > 0, name
        assert score[name]["needle"].mean() < 0.5, name


def test_contexts_are_read_once_and_rows_say_what_it_cost(mapper, family_model, tmp_path, monkeypatch):
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    read = []
    b = backends.of(target)
    capture = b.capture
    monkeypatch.setattr(b, "capture", lambda m, t, *a: read.append((id(m), np.shape(t))) or capture(m, t, *a))
    made = suite.transfer(crosskv.load(mapper), source, target, hold_back=8)
    cases = suite.Cases(tmp_path / "c.jsonl", {})
    suite.evaluate(made, tokenizer, ["nll"], cases, text=TEXT, count=4, prefix=64, continuation=16, progress=False)
    whole = [m for m, shape in read if shape == (4, 63)]
    assert sorted(whole) == sorted([id(source), id(source), id(target)])  # the source reads the wrong documents as well
    row = cases.rows[0]
    assert set(row["arms"]) == {a.label for a in made} and "mapped, hold_back=8" in row["arms"]
    assert row["seconds"]["mapped"]["cold"] > row["seconds"]["mapped"]["warm"] > 0
    assert row["commit"] and row["inputs"] and row["arms"]["own"] < row["arms"]["mapped"] < row["arms"]["random"]


def test_an_interrupted_run_goes_on(family_model, tmp_path):
    """Cut short in the middle of a line: only what is missing is measured, and all is as in one go."""
    model, tokenizer = family_model("S", "torch")
    made = arms.cache_arms(model, {})
    options = {"text": TEXT, "count": 6, "prefix": 48, "continuation": 8, "batch": 2, "progress": False}
    file = tmp_path / "cases.jsonl"
    suite.evaluate(made, tokenizer, ["nll"], suite.Cases(file, {"a": 1}), **options)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:50])
    suite.evaluate(made, tokenizer, ["nll"], suite.Cases(file, {"a": 2}), **options)  # another setting: its own cases
    again = suite.Cases(file, {"a": 1})
    assert len(again.rows) == 3
    suite.evaluate(made, tokenizer, ["nll"], again, **options)
    mine = [r for r in map(json.loads, file.read_text().splitlines()) if r["setting"] == {"a": 1}]
    assert [r["case"] for r in mine] == list(range(6))
    for new, line in zip(mine, lines, strict=True):
        assert new["inputs"] == json.loads(line)["inputs"]
        assert new["arms"] == pytest.approx(json.loads(line)["arms"], abs=1e-5)
    assert [r["date"] for r in mine[:3]] == [json.loads(x)["date"] for x in lines[:3]]
    with pytest.raises(BadInput, match="another case 0 of nll"):
        suite.evaluate(made, tokenizer, ["nll"], suite.Cases(file, {"a": 1}), **options | {"text": TEXT[5000:]})


def test_eight_bit_floats_are_the_frameworks_own(family_model):
    import torch

    model = family_model("S", "torch")[0]
    x = torch.randn(4, 3, 50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 2, 64)
    got = arms._fp8(backends.of(model), x)
    assert torch.equal(got, x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32))


def test_compressed_arms_hold_what_they_say(family_model, tmp_path):
    model, tokenizer = family_model("M", "torch")
    made = suite.caches(model, ["fp8", "int8", "int2", "xkv"], [4])
    cases = suite.Cases(tmp_path / "cases.jsonl", {})
    options = {"text": TEXT, "count": 3, "prefix": 400, "continuation": 16, "progress": False}
    suite.evaluate(made, tokenizer, ["nll"], cases, **options)
    row = cases.rows[0]
    assert list(row["arms"]) == ["own", "fp8", "int8", "int2", "xkv 4x", "none"]
    kv = 6 * 2 * 4 * 64  # entries of a token
    assert row["bytes"]["own"] == 4 * kv and row["bytes"]["fp8"] == kv
    assert row["bytes"]["int2"] < row["bytes"]["int8"] < 2 * kv and row["bytes"]["xkv 4x"] < row["bytes"]["own"] / 4
    mean = {a: np.mean([r["arms"][a] for r in cases.rows]) for a in row["arms"]}
    assert abs(mean["int8"] - mean["own"]) < 0.01 and mean["none"] > mean["own"] + 0.05


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_taking_turns_with_an_exact_mapper_is_the_model_alone(host, family_model):
    """Planted truth: between a model and itself the map is the identity, so every turn is answered as without it, and
    with a mapper of noise it is not."""
    model, tokenizer = family_model("M", host)
    config = crosskv.MapperConfig(k=1, ridge_lambda=1e-4, n_calib_sequences=12, calib_seq_len=256, stride=1,
                                  dtype="float32")  # fmt: skip
    same = crosskv.fit(model, model, family.text("calibration")[:50_000], tokenizer, config, progress=False)
    told = tasks.conversation(3, tasks.Filler(TEXT), 5, chars=900)
    opening, turns = drift.dialogue_ids(tokenizer.encode, *told)
    assert opening + [t for ids, _ in turns for t in ids] == tokenizer.encode(told[0] + "".join(map("".join, told[1])))
    alone = drift.alone(model, opening, turns)
    assert sum(alone) >= 4
    for keep in (True, False):
        assert drift.together(same, same, model, model, opening, turns, keep) == alone
    noise = arms._scrambled(same)
    assert sum(drift.together(noise, noise, model, model, opening, turns, False)) <= 1  # the first is on its own cache


def test_a_conversation_never_gives_an_answer_away():
    filler = tasks.Filler(TEXT)
    context, turns = tasks.conversation(1, filler, 15)
    assert (context, turns) == tasks.conversation(1, filler, 15) != tasks.conversation(2, filler, 15)
    asked = [q.rsplit("User: ", 1)[1] for q, _ in turns]
    assert len(set(asked)) == 15
    text = context
    for question, answer in turns:
        assert answer.strip() in text and answer.strip() not in question.rsplit("User: ", 1)[1]
        text += question + answer
    with pytest.raises(BadInput, match="turns must be from 1 to 40"):
        tasks.conversation(1, filler, 0)


def test_eval_command(mapper, tmp_path):
    """Through the public door: rows, table, verdict; a second run measures nothing; lm-eval's sets beside ours."""
    options = ["eval", mapper, "--tasks", "nll,dialogue", "--items", 3, "--prefix", 64, "--chars", CHARS, "--hold-back",
               8, "-o", tmp_path]  # fmt: skip
    done = command(*options)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "nll, 3 cases" in shown and "dialogue, 3 cases" in shown and "family:S->family:M" in shown
    first = (tmp_path / "cases.jsonl").read_text()
    found = json.loads(command(*options, "--json").stdout)
    assert (tmp_path / "cases.jsonl").read_text() == first and len(first.splitlines()) == 6
    by = {(r["task"], r["arm"]): r for r in found}
    assert by["nll", "own"]["retention"] == 1
    assert by["nll", "random"]["score"] > by["nll", "mapped"]["score"]
    assert command("report", tmp_path).returncode == 0 and (tmp_path / "report.html").stat().st_size > 10_000


def test_eval_command_for_caches_and_turns(mapper, tmp_path, family_model):
    options = ["--items", 2, "--prefix", 300, "--chars", CHARS, "--json"]
    done = command("eval", "family:S", "--cache", "int2,xkv", "--ratio", "4,6", "--tasks", "nll", "-o", tmp_path / "a",
                   *options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {r["arm"]: r for r in json.loads(done.stdout)}
    assert list(found) == ["own", "int2", "xkv 4x", "xkv 6x", "none"]
    assert found["xkv 6x"]["bytes"] < found["xkv 4x"]["bytes"] < found["own"]["bytes"]
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    config = crosskv.MapperConfig(k=4, n_calib_sequences=16, calib_seq_len=128, stride=1)
    back = crosskv.fit(target, source, family.text("calibration")[:40_000], tokenizer, config, progress=False)
    back.save(tmp_path / "M-S")
    done = command("eval", mapper, "--drift", "--back", tmp_path / "M-S", "--turns", 3, "-o", tmp_path / "b", *options)
    assert done.returncode == 0, done.stderr
    found = {r["arm"]: r for r in json.loads(done.stdout)}
    assert list(found) == ["own", "source", "alternating", "back and forth"]
    rows = [json.loads(x) for x in (tmp_path / "b" / "cases.jsonl").read_text().splitlines()]
    assert [r["turn"] for r in rows] == [0, 1, 2] * 2 and rows[1]["answers"] == "target"
    assert all(r["arms"]["alternating"] == r["arms"]["source"] for r in rows if r["turn"] == 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--drift",), "--drift needs --back"),
        (("--source", "family:M"), "fitted with S as its source"),
        (("--tasks", "piqa", "--sets", "/nowhere"), "give the folder that holds piqa/valid.jsonl"),
        (("--tasks", "needle", "--items", "1"), "at least 2 cases"),
    ],
)
def test_eval_says_what_is_wrong(mapper, tmp_path, options, sentence):
    done = command("eval", mapper, "-o", tmp_path, *options)
    assert done.returncode == 1 and sentence in done.stderr.splitlines()[-1], done.stderr
