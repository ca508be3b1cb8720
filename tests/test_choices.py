"""Choice sets: readers on files of the same formats, planted likelihoods, and a model checked by its own loss."""

import json
import math
from dataclasses import replace

import pytest

from crosskv.errors import BadInput
from crosskv.evals import choices
from crosskv.evals.choices import Choice, Likelihood, Request


def chars(text: str) -> list[int]:
    """A tokenizer whose tokens are characters."""
    return [ord(c) for c in text]


def write_lines(file, *records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return file


# ---- readers --------------------------------------------------------------------------------------------------------


def test_hellaswag_follows_lm_evals_preprocessing(tmp_path):
    file = write_lines(
        tmp_path / "h.txt",
        "Roof: A man sits on a roof. he", "3", "uses a wrap.", "rips [substeps] tiles off.", "holds a cube.", "pulls.",
        "Health: How to rest. Lie down [title] Then sleep.", "0", "a", "b", "c", "d",
    )  # fmt: skip
    first, second = choices.read_hellaswag(file)
    assert first.context == "Roof: A man sits on a roof. He"
    assert first.endings == (" uses a wrap.", " rips tiles off.", " holds a cube.", " pulls.")
    assert (first.answer, second.answer) == (3, 0)
    assert second.context == "Health: How to rest. Lie down. Then sleep."


def test_hellaswag_leaves_whole_sentences_and_labels_alone():
    assert choices.capitalise_last("Surfing: two Men surf. the big Wave") == "Surfing: two Men surf. The big wave"
    assert choices.capitalise_last("Surfing: a man surfs") == "Surfing: a man surfs"
    assert choices.capitalise_last("Surfing: He surfs. He falls.") == "Surfing: He surfs. He falls."


def test_the_other_readers(tmp_path):
    arc = write_lines(tmp_path / "a.jsonl", {"query": "Why?", "choices": ["x", "y", "z"], "gold": 2})
    assert choices.read_arc(arc) == [Choice("Question: Why?\nAnswer:", (" x", " y", " z"), 2)]
    piqa = write_lines(tmp_path / "valid.jsonl", {"goal": "Open a jar", "sol1": "Turn.", "sol2": "Sing.\u2028"})
    write_lines(tmp_path / "valid-labels.lst", "1")
    assert choices.read_piqa(piqa) == [Choice("Question: Open a jar\nAnswer:", (" Turn.", " Sing.\u2028"), 1)]
    lambada = write_lines(tmp_path / "l.jsonl", {"text": "He saw\n\nthe old house"})
    assert choices.read_lambada(lambada) == [Choice("He saw\n\nthe old", (" house",), 0)]
    wino = write_lines(tmp_path / "w.jsonl", {"context_options": ["So A", "So B"], "continuation": "won.", "gold": 1})
    assert choices.read_winogrande(wino)[0].pairs == [("So A", " won."), ("So B", " won.")]
    book = write_lines(
        tmp_path / "b.tsv",
        "ID\tQuestion Stem\tChoices\tComplete Question\tAnswer Key",
        '1\tThe "sun" is\t(A) hot (B) a fish (C) cold (D) blue\tunused\tB',
    )
    assert choices.read_openbookqa(book) == [Choice('The "sun" is', (" hot", " a fish", " cold", " blue"), 1)]
    boolq = write_lines(
        tmp_path / "q.jsonl", {"question": "is it", "title": "It", "answer": "True", "passage": "It is."}
    )
    assert choices.read_boolq(boolq) == [Choice("It -- It is.\nQuestion: is it?\nAnswer:", (" no", " yes"), 1)]


def test_load_checks_the_item_count_and_spreads_a_limit(tmp_path, monkeypatch):
    records = [{"query": f"q{i}", "choices": ["x", "y"], "gold": 0} for i in range(10)]
    write_lines(tmp_path / choices.SETS["arc_easy"].file, *records)
    with pytest.raises(BadInput, match=r"10 items, expected 2376"):
        choices.load("arc_easy", tmp_path)
    monkeypatch.setitem(choices.SETS, "arc_easy", replace(choices.SETS["arc_easy"], items=10))
    assert len(choices.load("arc_easy", tmp_path)) == 10
    assert len(choices.load("arc_easy", tmp_path, limit=99)) == 10
    some = choices.load("arc_easy", tmp_path, limit=4)
    assert [c.context[10:12] for c in some] == ["q0", "q2", "q5", "q7"]
    with pytest.raises(BadInput, match="at least 1"):
        choices.load("arc_easy", tmp_path, limit=0)


def test_load_says_what_is_wrong(tmp_path):
    with pytest.raises(BadInput, match="the sets are hellaswag"):
        choices.load("helloswag", tmp_path)
    with pytest.raises(BadInput, match="is missing; give the folder"):
        choices.load("piqa", tmp_path)
    write_lines(tmp_path / choices.SETS["arc_easy"].file, {"question": "other format"})
    with pytest.raises(BadInput, match="not in the expected format"):
        choices.load("arc_easy", tmp_path)
    write_lines(tmp_path / choices.SETS["hellaswag"].file, "only", "four", "lines", "here")
    with pytest.raises(BadInput, match="six for each item"):
        choices.load("hellaswag", tmp_path)


# ---- requests and judging -------------------------------------------------------------------------------------------


def test_requests_cut_where_the_contexts_tokens_end():
    items = [Choice("ab ", ("c",), 0), Choice(("x", "yy"), (" z", " z"), 0)]
    assert choices.requests(items, chars) == [
        Request(tuple(map(ord, "ab c")), 2),  # the context's trailing space belongs to the ending
        Request(tuple(map(ord, "x z")), 2),
        Request(tuple(map(ord, "yy z")), 2),
    ]
    with pytest.raises(BadInput, match="need a token each"):
        choices.requests([Choice("", ("a",), 0)], chars)


def test_judge_on_planted_likelihoods():
    items = [Choice("q", (" aaaa", " b"), 0), Choice("q", (" é", " bb"), 1), Choice("q", (" w",), 0)]
    planted = [Likelihood(-4, False), Likelihood(-2, False), Likelihood(-3, False), Likelihood(-3.2, False)]
    scores = choices.judge(items, [*planted, Likelihood(-9, True)])
    # Plain: -2 beats -4 (wrong), -3 beats -3.2 (wrong). Per byte: -1 beats -2 (right); é has two bytes as bb has: -1.5.
    assert scores.right == (False, False, True)
    assert scores.right_norm == (True, False, True)
    assert scores.acc == pytest.approx(1 / 3)
    assert scores.acc_se == pytest.approx(math.sqrt((1 / 3) * (2 / 3) / 2))
    assert scores.row()["n"] == 3
    with pytest.raises(BadInput, match="expected 5 likelihoods for 3 items"):
        choices.judge(items, planted)


def test_batches_hold_the_budget_and_everything():
    sizes = [3, 50, 7, 7, 1, 120, 9]
    groups = choices.batches(sizes, budget=60)
    assert sorted(i for g in groups for i in g) == list(range(len(sizes)))
    assert groups[0] == [5]  # one that is larger than the budget goes alone; it is not cut
    assert all(len(g) == 1 or len(g) * max(sizes[i] for i in g) <= 60 for g in groups)


# ---- a model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=40,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.data.mul_(8)  # far from uniform
    return model


def test_model_logprobs_equal_the_losses_of_single_unpadded_rows(tiny):
    import torch

    asked = [Request(tuple(range(5, 5 + n)), k) for n, k in ((4, 2), (30, 5), (9, 1), (40, 39), (5, 3))]
    got = choices.model_logprobs(tiny, batch_tokens=80)(asked)
    for r, g in zip(asked, got, strict=True):
        ids = torch.tensor([r.tokens])
        labels = ids.clone()
        labels[:, : -r.n] = -100
        with torch.no_grad():
            want = -tiny(ids, labels=labels).loss.item() * r.n
            best = tiny(ids).logits[0, -r.n - 1 : -1].argmax(-1)
        assert g.logprob == pytest.approx(want, rel=1e-5)
        assert g.greedy == bool((best == ids[0, -r.n :]).all())


def test_greedy_is_found(tiny):
    import torch

    context = [5, 6, 7]
    with torch.no_grad():
        ids = tiny.generate(torch.tensor([context]), max_new_tokens=3, do_sample=False, eos_token_id=None)[0].tolist()
    wrong = [*ids[:-1], (ids[-1] + 1) % 128]
    right, miss = choices.model_logprobs(tiny)([Request(tuple(ids), 3), Request(tuple(wrong), 3)])
    assert right.greedy
    assert not miss.greedy
    assert miss.logprob < right.logprob


def test_nothing_is_cut_silently(tiny):
    with pytest.raises(BadInput, match="41 tokens, the model reads 40"):
        choices.model_logprobs(tiny)([Request(tuple(range(41)), 2)])


def test_logits_that_are_not_finite_are_refused(tiny):
    import copy

    broken = copy.deepcopy(tiny)
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BadInput, match="not finite"):
        choices.model_logprobs(broken)([Request((1, 2, 3), 1)])


def test_encoder_puts_the_start_token_first_and_nothing_last():
    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": ([1] if add_special_tokens else []) + chars(text)}

    assert choices.encoder(Tokenizer())("ab") == [1, 97, 98]
