"""The command line through its own door: exit codes, one-line errors, --json, and a whole fit-handoff round."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from crosskv import family


def crosskv(*args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "from crosskv.cli import main; main()", *map(str, args)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """(directory of a mapper S -> M fitted by the command, what the command printed)."""
    directory = tmp_path_factory.mktemp("cli")
    text = directory / "text.txt"
    text.write_text(family.text("calibration")[:120_000])
    done = crosskv(
        "fit", "family:S", "family:M", "--data", text, "-o", directory / "S-M", "--k", "all", "--penalty", "auto",
        "--sequences", 48, "--length", 256, "--stride", 1, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return directory / "S-M", json.loads(done.stdout)


def test_fit_writes_a_mapper_and_cleans_up(fitted):
    directory, said = fitted
    assert sorted(p.name for p in directory.iterdir()) == ["README.md", "mapper.json", "mapper.safetensors"]
    assert said["path"] == str(directory) and len(said["r2"]["keys"]) == 6
    assert not (directory.parent / "S-M.partial").exists()


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_handoff_continues_in_both_hosts(fitted, host, family_model):
    """The mapped cache is used: the text differs from what the target writes without the context, and hosts agree."""
    directory, _ = fitted
    done = crosskv(
        "handoff", directory, "family:S", "family:M", "--prompt", "Once upon a time there was", "--max-tokens", 8,
        "--host", host, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["new_tokens"] == 8 and said["prompt_tokens"] == len(family_model("M", "torch")[1].encode(
        "Once upon a time there was"))  # fmt: skip
    others = getattr(test_handoff_continues_in_both_hosts, "said", said["text"])
    assert others == said["text"]
    test_handoff_continues_in_both_hosts.said = said["text"]


def test_fit_with_a_latent_polish_and_use(tmp_path):
    """The whole way by commands: joint features, layer 0 exact, a latent, polished, screened, handed over."""
    text = tmp_path / "text.txt"
    text.write_text(family.text("calibration")[:120_000])
    fit = ("fit", "family:S", "family:M", "--data", text, "-o", tmp_path / "a", "--k", "all", "--penalty", "0.001",
           "--sequences", 32, "--length", 256, "--stride", 1)  # fmt: skip
    done = crosskv(*fit, "--latent", 96)
    assert done.returncode == 1 and "needs features='both'" in done.stderr
    done = crosskv(*fit, "--features", "both", "--exact-layers", 1, "--latent", 96)
    assert done.returncode == 0, done.stderr
    polish = ("polish", tmp_path / "a", "--data", text, "-o", tmp_path / "b", "--steps", 25, "--length", 128,
              "--window", 32, "--json")  # fmt: skip
    done = crosskv(*polish)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)["provenance"]["polish"]
    assert about["held_out_kl"] < about["held_out_kl_before"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "text.txt"]  # no checkpoint is left
    done = crosskv("inspect", tmp_path / "b")
    assert "exact layers 1, latent 96" in done.stdout
    done = crosskv("screen", tmp_path / "b", "--passages", 4, "--json")
    found = json.loads(done.stdout)
    assert done.returncode in (0, 1) and found["layers"][0]["relative_keys"] == 0  # layer 0 is the target's own
    assert found["layers"][1]["relative_keys"] > 0
    done = crosskv(
        "handoff", tmp_path / "b", "family:S", "family:M", "--prompt", "Once upon a time there was", "--json"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--hold-back", "--exact-layers"])
def test_nothing_mapped_is_the_target_itself(fitted, family_model, option):
    """With everything held back but one sink, or with all layers exact, the handoff is the target's own prefill."""
    directory, _ = fitted
    prompt = "The captain looked at the sea and said"
    model, tokenizer = family_model("M", "torch")
    ids = tokenizer.encode(prompt)
    done = crosskv(
        "handoff", directory, "family:S", "family:M", "--prompt", prompt, option,
        len(ids) - 1 if option == "--hold-back" else 6, "--max-tokens", 12, "--json",
    )  # fmt: skip
    import torch

    own = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert json.loads(done.stdout)["text"] == tokenizer.decode(own, skip_special_tokens=True)


def test_inspect_shows_table_and_plot(fitted, tmp_path):
    directory, said = fitted
    done = crosskv("inspect", directory, "--plot", tmp_path / "r2.png")
    assert done.returncode == 0 and f"{said['r2']['keys'][3]:.3f}" in done.stdout
    assert (tmp_path / "r2.png").read_bytes()[:4] == b"\x89PNG"
    about = json.loads(crosskv("inspect", directory, "--json").stdout)
    np.testing.assert_allclose(about["r2"]["values"], said["r2"]["values"])


def test_doctor_names_what_is_installed():
    done = crosskv("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["packages"]["torch"] and found["hosts"]["mlx"]
    assert "host torch" in crosskv("doctor").stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("inspect", "/nowhere"), "crosskv: /nowhere is not a mapper"),
        (("fit", "family:S", "family:XL", "--data", "pyproject.toml", "-o", "/tmp/x"), "S, M, L; got 'XL'"),
        (("fit", "family:S", "family:L", "--data", "/nowhere.txt", "-o", "/tmp/x"), "cannot be read as UTF-8 text"),
        (("fit", "family:S", "family:L", "--data", "pyproject.toml", "-o", "/tmp/x", "--k", "lots"), "k must be"),
        (
            ("fit", "family:S", "family:L", "--data", "pyproject.toml", "-o", "/tmp/x", "--host", "jax"),
            "torch; got 'jax'",
        ),
        (("fetch", "gpt-5"), "fetch knows smollm2 and smollm2-sibling"),
    ],
)
def test_errors_are_one_line_and_exit_1(args, sentence):
    done = crosskv(*args)
    assert done.returncode == 1
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_mapper_of_another_pair_is_refused(fitted):
    done = crosskv("handoff", fitted[0], "family:S", "family:L", "--prompt", "Once upon a time")
    assert done.returncode == 1 and "fitted with" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_wrong_usage_exits_2():
    assert crosskv("fit", "family:S").returncode == 2
    assert crosskv("handoff", "x", "family:S", "family:L").returncode == 2
    assert crosskv("--version").stdout.strip() == __import__("crosskv").__version__


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_compress_shows_both_caches(host, tmp_path):
    """Eight bits write what the host's own cache writes, and the bytes are those of the library."""
    (tmp_path / "p.txt").write_text(family.text("heldout")[20000:21000])
    done = crosskv(
        "compress", "family:S", "--prompt-file", tmp_path / "p.txt", "--bits", 8, "--bits-values", 4, "--group", 32,
        "--max-tokens", 4, "--score", 20, "--host", host, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["own"]["text"] == said["packed"]["text"] and abs(said["nll_increase"]) < 0.05
    assert said["method"].startswith("IntConfig(bits_keys=8, group=32")
    assert said["ratio"] == said["own"]["bytes"] / said["packed"]["bytes"] > 1.5
    assert said["own"]["bytes"] >= said["cached_tokens"] * 4 * 2 * 4 * 64 * 4


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--bits", 5), "bits_keys must be one of [2, 3, 4, 8], got 5"),
        (("--score", 5000), "scored tokens of a prompt of"),
        (("--host", "jax"), "torch; got 'jax'"),
    ],
)
def test_compress_says_what_is_wrong(args, sentence, tmp_path):
    (tmp_path / "p.txt").write_text("Once upon a time there was a captain")
    done = crosskv("compress", "family:S", "--prompt-file", tmp_path / "p.txt", *args)
    assert done.returncode == 1 and sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibrated")
    text = directory / "text.txt"
    text.write_text(family.text("calibration")[:150_000])
    done = crosskv(
        "calibrate", "family:S", "--data", text, "-o", directory / "basis", "--group", "all", "--sequences", 24,
        "--length", 256, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"] == [[0, 1, 2, 3]]
    return directory / "basis"


def test_plan_says_what_to_use(calibrated):
    done = crosskv("plan", "family:S", "--ratio", 8, "--context", "32k", "--basis", calibrated, "--json")
    first = json.loads(done.stdout)[0]
    assert (
        done.returncode == 0 and first["method"] == "XKVConfig" and 7.9 < first["ratio"] < 8.5 and first["static"] > 0
    )
    low = json.loads(crosskv("plan", "family:S", "--ratio", 3, "--context", "32k", "--json").stdout)[0]
    assert low["method"] == "IntConfig" and "4-bit" in low["why"]
    shown = crosskv("plan", "family:S", "--ratio", 8, "--context", 4096, "--basis", calibrated)
    assert shown.returncode == 0 and "calibrated basis" in " ".join(shown.stdout.split())
    for wrong, says in (
        (("--ratio", 8, "--context", "many"), "context must be a number of tokens"),
        (("--ratio", 40, "--context", 300, "--basis", calibrated), "No method reaches 40.0x"),
        ((), "either ratio or bytes_per_token"),
    ):
        done = crosskv("plan", "family:S", *wrong)
        assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1


def test_compress_within_a_ratio(calibrated, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(family.text("heldout")[:4000])
    options = ["--prompt", prompt, "--ratio", 6, "--basis", calibrated, "--max-tokens", 8, "--json"]
    done = crosskv("compress", "family:S", *options)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "basis=calibrated" in said["method"] and said["ratio"] > 6  # of a float32 model: 12 but for the exact tokens
    assert abs(said["nll_increase"]) < 0.1 and said["packed"]["new_tokens"] > 0 and "peak" in said["own"]
    done = crosskv("compress", "family:M", *options)
    assert done.returncode == 1 and "calibrated for" in done.stderr
    assert crosskv("compress", "family:S", *options, "--bits", 4).returncode == 2
