"""lm-eval tasks from every arm's cache. The oracle is lm-eval's own HFLM, its YAML files, or a handoff done by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import conftest
import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template

import crosskv
from crosskv import backends, family, metrics
from crosskv.errors import BadInput, MissingExtra
from crosskv.evals import choices, harness
from crosskv.evals.answers import wrong_document
from crosskv.evals.arms import cache_arms, transfer_arms
from crosskv.evals.harness import Answers, ArmLM

SETS = Path(__file__).parents[2] / "shared" / "data" / "eval"
needs_sets = pytest.mark.skipif(not SETS.is_dir(), reason=f"{SETS} with the public sets is not here")
TASKS = {"hellaswag": 12, "lambada": 8, "arc_easy": 6}
TOLERANCE = 256 * np.finfo(np.float32).eps
"""Of a sum of log-probabilities, relative to it or to one nat. Reading in one piece or in two, batched or not, in
either host, differs by the rounding of some ten layers' sums: 8 eps were measured."""


@pytest.fixture(scope="module")
def hflm(family_model):
    model, tokenizer = family_model("S", "torch")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


@pytest.fixture(scope="module")
def mapper(family_model):
    """S -> M, fitted on little: what it is worth is not asked here."""
    (source, tokenizer), (target, _) = family_model("S", "torch"), family_model("M", "torch")
    config = crosskv.MapperConfig(k=2, n_calib_sequences=8, calib_seq_len=128, stride=1)
    return crosskv.fit(source, target, family.text("calibration")[:20_000], tokenizer, config, progress=False)


@pytest.fixture(scope="module")
def text(family_model):
    return family.text("heldout")[:6000]


def own(family_model, host="torch", max_length=None):
    """The model's own cache, taken out and installed again."""
    model, tokenizer = family_model("S", host)
    answers = Answers(cache_arms(model, {})[:1], tokenizer, max_length)
    return ArmLM(answers, answers.arms[0])


def transfer(mapper, family_model, host="torch", **options):
    source, target = family_model("S", host)[0], family_model("M", host)[0]
    return Answers(transfer_arms(mapper, source, target, **options), family_model("S", host)[1])


def asked(kind, *arguments):
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


def close(got, want):
    got, want = np.array(got), np.array(want)
    assert (abs(got - want) <= TOLERANCE * np.maximum(1, abs(want))).all(), (got, want)


# ---- against lm-eval's own model ------------------------------------------------------------------------------------


def samples(lm):
    tasks = [harness.local_task(name, SETS, n) for name, n in TASKS.items()]
    manager = TaskManager(include_defaults=False)  # else it reads thousands of files
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, bootstrap_iters=0, task_manager=manager)["samples"]


@pytest.fixture(scope="module")
def reference(hflm):
    """HFLM's samples of the local tasks."""
    return samples(hflm)


@needs_sets
@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_the_own_arm_agrees_with_hflm(host, family_model, reference):
    found = samples(own(family_model, host))
    for name, n in TASKS.items():
        got, want = found[name], reference[name]
        assert len(got) == len(want) == n
        for g, w in zip(got, want, strict=True):
            assert g["arguments"] == w["arguments"]
            pairs = [(a[0], b[0]) for a, b in zip(g["resps"], w["resps"], strict=True)]
            close([a for (a, _), _ in pairs], [b for _, (b, _) in pairs])
            assert [a for (_, a), _ in pairs] == [b for _, (_, b) in pairs]
            assert [g[m] for m in g["metrics"] if m != "perplexity"] == [
                w[m] for m in w["metrics"] if m != "perplexity"
            ]


@needs_sets
def test_evaluate_gives_every_items_metrics(family_model, reference):
    model, tokenizer = family_model("S", "torch")
    found = harness.evaluate(cache_arms(model, {}), tokenizer, ["hellaswag", "lambada"], 12, SETS)
    rows, want = found.items["hellaswag"]["own"], reference["hellaswag"]
    assert [r["doc_id"] for r in rows] == choices.spread(10_042, 12)
    assert [(r["doc_hash"], r["acc"], r["acc_norm"]) for r in rows] == [
        (w["doc_hash"], w["acc"], w["acc_norm"]) for w in want
    ]
    assert found.totals["hellaswag"]["own"]["acc"] == pytest.approx(np.mean([r["acc"] for r in rows]))
    nll = -np.mean([r["perplexity"] for r in found.items["lambada"]["own"]])
    assert found.totals["lambada"]["own"]["perplexity"] == pytest.approx(np.exp(nll))


def test_edges_agree_with_hflm(family_model, hflm):
    """No context, contexts of one and two tokens, spaces at the end, a text that begins with the first token."""
    bos = hflm.tokenizer.bos_token
    pairs = [("", " the old house"), ("a", " b"), (bos, "Once upon"), (bos + "The", " man"), ("The man ", "said so")]
    pairs += [("He went to the", " house"), ("He went to the", " house and sat down."), ("He went to the", " sea")]
    lm = own(family_model)
    got, want = (m.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True) for m in (lm, hflm))
    close([g for g, _ in got], [w for w, _ in want])
    assert [g for _, g in got] == [w for _, w in want]
    assert len(lm.tok_encode("a")) == 2 and lm.tok_encode(bos) == [0]


def test_what_is_too_long_is_cut_as_hflm_does(family_model, text):
    model, tokenizer = family_model("S", "torch")
    short = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
    lm = own(family_model, max_length=64)
    pairs = [(text[:400], text[400:420]), (text[:900], text[900:930])]
    with pytest.warns(UserWarning, match=r"A context of \d+ tokens is cut to its last \d+, which all models can read"):
        got, want = (m.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True) for m in (lm, short))
    close([g for g, _ in got], [w for w, _ in want])
    rolling = asked("loglikelihood_rolling", (text[:700],), (text[700:760],))
    close(lm.loglikelihood_rolling(rolling), short.loglikelihood_rolling(rolling, disable_tqdm=True))
    with pytest.raises(BadInput, match=r"an ending from 1 to 64; got \d+ and \d+\."):
        lm.loglikelihood(asked("loglikelihood", ("a", text)), disable_tqdm=True)
    with pytest.raises(BadInput, match="from 1 to 63 tokens to be written, got 64"):
        lm.generate_until(asked("generate_until", ("a", {"until": [], "max_gen_toks": 64})))


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_the_own_arm_writes_what_hflm_writes(host, family_model, hflm, text):
    prompts = [
        (text[:300], {"until": ["\n\n", "."], "max_gen_toks": 24}),
        (text[1000:1400], {"until": ["zzz"], "max_gen_toks": 12}),
        (hflm.tokenizer.bos_token, {"until": "the", "max_gen_toks": 12}),
        ("He", {"until": [], "max_gen_toks": 5}),
    ]
    lm = own(family_model, host)
    got, want = (m.generate_until(asked("generate_until", *prompts)) for m in (lm, hflm))
    assert got == want and all(got)
    with pytest.raises(BadInput, match="this task wants samples"):
        lm.generate_until(asked("generate_until", ("He", {"do_sample": True, "temperature": 1.0})))


def test_writing_ends_with_the_first_stop(family_model, monkeypatch):
    b, forwards = backends.load("torch"), []

    def counted(*arguments, plain=b.logits):
        forwards.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(b, "logits", counted)
    written = own(family_model).generate_until(asked("generate_until", ("He went home", {"until": " "})))[0]
    assert len(forwards) <= len(written) + 2 < harness.GENERATED / 4


# ---- arms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_the_mapped_arm_is_a_handoff(host, mapper, family_model, text):
    """As when the prompt is handed over by hand, ending by ending; with tokens held back too."""
    source, target = family_model("S", host)[0], family_model("M", host)[0]
    endings = [" and the old man went home", " house", ", which"]
    for hold_back in (0, 3):
        answers = transfer(mapper, family_model, host, hold_back=hold_back, names=("mapped",))
        lm = ArmLM(answers, answers.arms[0])
        got = lm.loglikelihood(asked("loglikelihood", *((text[:200], e) for e in endings)), disable_tqdm=True)
        for (logprob, greedy), ending in zip(got, endings, strict=True):
            ids, want = (np.array([x]) for x in lm._encode_pair(text[:200], ending))
            h = crosskv.handoff(mapper, source, target, ids, hold_back=1 + hold_back, force=True)
            logits = metrics.continuation_logits(target, h.tokens, want, h.cache)
            close(logprob, -metrics.nll(logits, want).sum())
            assert greedy == bool((np.asarray(backends.of(target).to_numpy(logits)).argmax(-1) == want).all())
        written = lm.generate_until(asked("generate_until", (text[:200], {"until": [], "max_gen_toks": 6})))
        h = crosskv.handoff(mapper, source, target, lm.tok_encode(text[:200]), hold_back=1 + hold_back, force=True)
        assert written == [lm.tokenizer.decode(conftest.greedy(target, h.tokens, h.cache, 6))]


def test_a_compressed_cache_is_an_arm(family_model, text):
    """As when the cache of all tokens but the last is packed by hand and continued from."""
    model, tokenizer = family_model("S", "torch")
    config, b = crosskv.IntConfig(bits_keys=2, bits_values=2, tail=0), backends.of(model)
    answers = Answers(cache_arms(model, {"2 bits": config})[:2], tokenizer)
    (plain, _), (packed, _) = (
        ArmLM(answers, a).loglikelihood(asked("loglikelihood", (text[:400], " the house")), disable_tqdm=True)[0]
        for a in answers.arms
    )
    ids, want = (np.array([x]) for x in ArmLM(answers, answers.arms[1])._encode_pair(text[:400], " the house"))
    cache = crosskv.make_cache(model, config, b.install(model, b.capture(model, ids[:, :-1])))
    by_hand = b.install(model, b.read(model, cache))
    logits = metrics.continuation_logits(model, ids[:, -1:], want, by_hand)
    close(packed, -metrics.nll(logits, want).sum())
    assert abs(packed - plain) > 0.01


def test_each_model_reads_a_context_once(mapper, family_model, text, monkeypatch):
    answers = transfer(mapper, family_model)
    model = {id(family_model("S", "torch")[0]): "source", id(family_model("M", "torch")[0]): "target"}
    b, read = backends.load("torch"), []

    def counted(model_, tokens, *more, plain=b.capture, **options):
        if tokens.shape[1] > 1:  # a handoff's exact first token is not a context
            read.append(model[id(model_)])
        return plain(model_, tokens, *more, **options)

    monkeypatch.setattr(b, "capture", counted)
    contexts = [text[:100], text[300:420]]
    pairs = [(c, e) for c in contexts for e in (" a", " the house", " b c", ".")]
    found = [
        ArmLM(answers, arm).loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True) for arm in answers.arms
    ]
    assert sorted(read) == ["source"] * 4 + ["target"] * 2  # the source reads each one's wrong document as well
    assert len({f[1] for f in found}) == len(answers.arms)  # arms differ, and no arm was given another's answers
    writing = asked("generate_until", *((c, {"until": [], "max_gen_toks": 2}) for c in contexts))
    for arm in answers.arms:
        ArmLM(answers, arm).generate_until(writing)
    assert len(read) == 12


def test_short_contexts_are_read_by_the_model(mapper, family_model):
    names = ("own", "mapped", "raw copy", "zero", "none")
    answers = transfer(mapper, family_model, sinks=4, hold_back=1, names=names)
    pairs = [(c, " the") for c in ("", "a", "It is", "He was", "He was late and we went home again")]
    found = {
        a.name: ArmLM(answers, a).loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True) for a in answers.arms
    }
    target = found.pop("own")
    for name, got in found.items():
        close([x for x, _ in got[:4]], [x for x, _ in target[:4]])
        assert abs(got[4][0] - target[4][0]) > TOLERANCE, name


def test_without_lm_eval_the_module_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "crosskv.evals.harness")
    with pytest.raises(MissingExtra, match=r"pip install 'crosskv\[eval\]'"):
        importlib.import_module("crosskv.evals.harness")


def test_wrong_documents_are_the_others_from_half_a_round_on():
    contexts = [(0, 1, 2, 3), (0, 4), (0,), (5, 6, 7, 8, 9)]
    assert wrong_document(contexts, 0) == (0, 5, 6, 7)
    assert wrong_document(contexts, 1) == (0, 5)
    assert wrong_document(contexts, 3) == (5, 0, 4, 0, 0)
    assert wrong_document(contexts[:2], 0) == (0, 4, 4, 4)
    assert wrong_document(contexts[:1], 0) is None


def test_arms_that_cannot_be_answered_say_so(mapper, family_model):
    answers = transfer(mapper, family_model, names=("own", "wrong document"))
    lm = ArmLM(answers, answers.arms[0])
    with pytest.raises(BadInput, match="'wrong document' needs"):
        lm.loglikelihood(asked("loglikelihood", ("He was late and", " we")), disable_tqdm=True)
    with pytest.raises(BadInput, match="labels that differ"):
        Answers([*answers.arms, answers.arms[0]], answers.tokenizer)
    with pytest.raises(BadInput, match="'own' is not among those of the answers"):
        ArmLM(answers, cache_arms(family_model("S", "torch")[0], {})[0])


# ---- tasks ----------------------------------------------------------------------------------------------------------


def lm_evals(place):
    return load_yaml(Path(lm_eval.__file__).parent / "tasks" / place, resolve_func=False)


@needs_sets
def test_mmlu_and_gsm8k_are_whole_and_asked_as_lm_eval_asks():
    mmlu, gsm8k = choices.load("mmlu", SETS), choices.load_problems("gsm8k", SETS)
    assert (len(mmlu), len(gsm8k)) == (14_042, 1_319)
    config = lm_evals("mmlu/default/mmlu_abstract_algebra.yaml")
    question = "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q."
    want = apply_template(config["doc_to_text"], {"question": question, "choices": ["0", "4", "2", "6"]})
    assert mmlu[0].context == config["description"] + want
    assert mmlu[0].endings == tuple(" " + c for c in config["doc_to_choice"]) and mmlu[0].answer == 1
    subjects = {m.context.split(" about ")[1].split(".\n\n")[0] for m in mmlu}
    assert len(subjects) == 57 and "high school us history" in subjects

    config, task = lm_evals("gsm8k/gsm8k.yaml"), harness.local_task("gsm8k", SETS, 2).config
    first = json.loads((SETS / "gsm8k/test.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert gsm8k[0].prompt == apply_template(config["doc_to_text"], first)
    assert gsm8k[0].answer == apply_template(config["doc_to_target"], first)
    for key in ("generation_kwargs", "metric_list", "filter_list", "output_type", "repeats"):
        assert task[key] == config[key], key


@needs_sets
def test_the_other_local_tasks_ask_as_lm_eval_asks():
    """Winogrande has two contexts and one ending; metrics are those of lm-eval's files."""
    task = harness.local_task("winogrande", SETS, 3)
    task.build_all_requests()
    one, other = task.instances[:2]
    assert one.args[1] == other.args[1] and one.args[1].startswith(" ") and one.args[0] != other.args[0]
    places = {
        "hellaswag": "hellaswag/hellaswag.yaml", "arc_easy": "arc/arc_easy.yaml", "piqa": "piqa/piqa.yaml",
        "winogrande": "winogrande/default.yaml", "openbookqa": "openbookqa/openbookqa.yaml",
        "boolq": "super_glue/boolq/default.yaml", "lambada": "lambada/lambada_openai.yaml",
        "mmlu": "mmlu/default/_default_template_yaml",
    }  # fmt: skip
    for name, place in places.items():
        task = harness.local_task(name, SETS, 2)
        assert [m["metric"] for m in task.config["metric_list"]] == [
            m["metric"] for m in lm_evals(place)["metric_list"]
        ]
        assert task.get_config("output_type") == lm_evals(place)["output_type"]


def test_a_file_that_was_cut_off_gives_one_sentence(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q", "ans')
    with pytest.raises(BadInput, match=r"gsm8k: .*test.jsonl is not in the expected format"):
        harness.local_task("gsm8k", tmp_path)
    (tmp_path / "mmlu/test").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"mmlu: .*mmlu/test is missing; give the folder"):
        harness.local_task("mmlu", tmp_path)
    file = tmp_path / "mmlu/test/some_subject_test.csv"
    file.write_text("question,choice0,choice1,choice2,choice3,answer\nq,a,b,c,d,0\n")
    with pytest.raises(BadInput, match="has 1 items, expected 14042; fetch it again"):
        harness.local_task("mmlu", tmp_path)
    file.write_text("question,choice0,choice1,choice2,choice3,answer\nq,a,b,c,d,0\nq,a")
    with pytest.raises(BadInput, match="mmlu: .* is not in the expected format"):
        harness.local_task("mmlu", tmp_path)
    with pytest.raises(BadInput, match="no local set 'mmmlu'; did you mean 'mmlu'?"):
        harness.local_task("mmmlu", tmp_path)


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    """A group of two tasks that lm-eval itself reads, with an example before each question."""
    place = tmp_path_factory.mktemp("tasks")
    for name in ("one", "two"):
        rows = [
            {"q": f"{name} {i}, what is it?", "c": ["a house", "a dog", "an old man"], "a": i % 3} for i in range(5)
        ]
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (place / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {place / name}.jsonl\n"
            f"  cache_dir: {place / 'cache'}\noutput_type: multiple_choice\ntest_split: train\nnum_fewshot: 1\n"
            'doc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\ndoc_to_target: "{{a}}"\nmetric_list:\n'
            "  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        )
    (place / "both.yaml").write_text(
        "group: both\ntask: [one, two]\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    )
    return TaskManager(include_path=str(place), include_defaults=False)


def test_lm_evals_own_tasks_and_groups(mapper, family_model, own_tasks):
    answers = transfer(mapper, family_model, names=("own", "mapped", "wrong document"), hold_back=2)
    found = harness.evaluate(answers.arms, answers.tokenizer, ["both"], limit=4, task_manager=own_tasks)
    assert set(found.items) == {"one", "two"} and set(found.totals) == {"one", "two", "both"}
    assert list(found.items["one"]) == ["own, hold_back=2", "mapped, hold_back=2", "wrong document, hold_back=2"]
    for arm in found.items["one"]:
        rows = [r for name in ("one", "two") for r in found.items[name][arm]]
        assert [r["doc_id"] for r in rows] == [0, 1, 2, 3] * 2
        assert found.totals["both"][arm]["acc"] == pytest.approx(np.mean([r["acc"] for r in rows]))
    with pytest.raises(BadInput, match="no task 'bath'; did you mean 'both'?"):
        harness.evaluate(answers.arms, answers.tokenizer, ["bath"], task_manager=own_tasks)
    with pytest.raises(BadInput, match="limit must be at least 1, got 0"):
        harness.evaluate(answers.arms, answers.tokenizer, ["both"], limit=0, task_manager=own_tasks)
