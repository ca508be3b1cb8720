"""What a mapped cache does to the target's attention, against attention computed in float64, and the verdict on it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import hf, mlx, model_hosts

import crosskv
from crosskv import backends, cli, family, live, rope
from crosskv.errors import BadInput
from crosskv.evals import rows, run, screen
from crosskv.mapper import Mapper

PREFIX, CONTINUATION = 96, 24

# ---- the seam: attention as the host computes it ----


def oracle(q: Any, k: Any, v: Any, scale: float, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64: weights [B, Hq, T, T] and outputs [B, Hq, T, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    t = np.arange(q.shape[2])
    seen = t[:, None] >= t
    if window is not None:
        seen &= t[:, None] - t < window
    logits = np.where(seen, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, p @ v


def check_attention(model: Any, ids: np.ndarray, scale: float, windows: dict[int, int] | None = None) -> list[Any]:
    """Every layer's attention, with its own keys and values and with others, is that of the oracle; and its weights."""
    b, rng, found = backends.of(model), np.random.default_rng(0), []

    def visit(layer: int, q: Any, k: Any, v: Any, attend: Any) -> None:
        q_, k_, v_ = (b.to_numpy(x) for x in (q, k, v))
        assert q_.shape[0] == len(ids) and q_.shape[2] == ids.shape[1] and layer == len(found)
        others = [(rng.standard_normal(k_.shape) * k_.std()).astype(np.float32) for _ in range(2)]
        for keys, values in ((k_, v_), tuple(others)):
            got = attend(b.from_numpy(keys, k), b.from_numpy(values, v))
            weights, want = oracle(q_, keys, values, scale, (windows or {}).get(layer))
            np.testing.assert_allclose(b.to_numpy(got), want, atol=64 * 2**-24 * np.abs(want).max())
            if keys is k_:
                found.append((layer, k_, v_, weights))

    b.attention(model, ids, visit)
    return found


@pytest.mark.parametrize("host", model_hosts())
def test_attention_is_the_hosts_own(host, family_model):
    """On the family's S: the oracle's outputs; the keys and values are those of the cache; the run is undisturbed."""
    model = family_model("S", host)[0]
    b, ids = backends.of(model), np.random.default_rng(1).integers(5, 1000, (2, 40))
    before = b.to_numpy(b.logits(model, ids))
    seen = check_attention(model, ids, 64**-0.5)
    cache = b.capture(model, ids)
    assert [layer for layer, *_ in seen] == sorted(cache)
    for layer, k, v, _ in seen:
        for got, want in zip((k, v), cache[layer], strict=True):
            want = b.to_numpy(want)
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_array_equal(b.to_numpy(b.logits(model, ids)), before)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 8}, {0: 8, 1: 8, 2: 8, 3: 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, {2: 8, 3: 8}),
        ("Qwen3", {}, {}),
    ],
)
def test_attention_of_sliding_windows(kind, changes, windows, implementation):
    """A batch of 2 in torch: the weights are those that transformers itself reports with output_attentions."""
    import torch

    model, ids = hf(kind, **changes), np.random.default_rng(2).integers(1, 128, (2, 24))
    want = model(torch.as_tensor(ids), output_attentions=True).attentions
    model.config._attn_implementation = implementation
    seen = check_attention(model, ids, 16**-0.5, windows)
    assert model.config._attn_implementation == implementation
    for (*_, weights), w in zip(seen, want, strict=True):
        np.testing.assert_allclose(weights, w.detach().numpy(), atol=1e-5)


def test_attention_is_given_back_after_an_error():
    """A visitor that fails leaves the model and the host as they were."""
    import mlx.core as mx

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    one, other, ids = hf("Llama"), mlx("llama"), np.ones((1, 4), int)
    own = mx.fast.scaled_dot_product_attention
    for model in (one, other):
        with pytest.raises(ZeroDivisionError):
            backends.of(model).attention(model, ids, fails)
    assert one.config._attn_implementation == "eager" and mx.fast.scaled_dot_product_attention is own


def test_attention_elsewhere_is_refused(monkeypatch):
    """A model whose layers do not all pass through the host's attention function."""
    one, other = hf("Llama"), mlx("llama")
    calm = one.model.layers[1].self_attn
    monkeypatch.setattr(calm, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(BadInput, match=r"seen at the layers \[0, 2, 3\], not once at each of 4"):
        backends.of(one).attention(one, np.ones((1, 4), int), lambda *_: None)
    monkeypatch.setattr(type(other.model.layers[0].self_attn), "__call__", lambda _, x, *a, **k: x)
    with pytest.raises(BadInput, match="seen 0 times in 4 layers"):
        backends.of(other).attention(other, np.ones((1, 4), int), lambda *_: None)


# ---- the measures ----


def test_concentration_of_key_errors_is_the_papers():
    """By the singular vectors of the queries, per KV head, as the paper says it; sums over batches add up."""
    rng = np.random.default_rng(3)
    error, queries = rng.standard_normal((3, 2, 30, 8)), rng.standard_normal((3, 6, 10, 8)) * np.arange(1, 9)
    error[:, 1] *= np.arange(1, 9)
    parts = [screen.key_sums(error[i], queries[i]) for i in (slice(0, 1), slice(1, 3))]
    got = screen.concentration({k: parts[0][k] + parts[1][k] for k in parts[0]})
    for h in range(2):
        q, e = queries[:, 3 * h : 3 * h + 3].reshape(-1, 8), error[:, h].reshape(-1, 8)
        s, v = np.linalg.svd(q)[1:]
        along = ((e @ v.T) ** 2).mean(0)
        np.testing.assert_allclose(got[h], (s**2 @ along) / (s**2).sum() / along.mean(), rtol=1e-12)
    assert abs(got[0] - 1) < 0.1 and got[1] > 1.5


def test_concentration_of_value_errors_is_the_papers():
    rng = np.random.default_rng(4)
    error, attention = rng.standard_normal((2, 2, 12, 8)), rng.random((2, 4, 5, 12))
    error[:, 1, 3] *= 10
    attention[:, 2:, :, 3] = 5
    got = screen.concentration(screen.value_sums(error, attention))
    for h in range(2):
        e = (error[:, h] ** 2).sum(-1).ravel()
        a = (attention[:, 2 * h : 2 * h + 2] ** 2).sum((1, 2)).ravel()
        np.testing.assert_allclose(got[h], np.average(e, weights=a) / e.mean(), rtol=1e-12)
    assert abs(got[0] - 1) < 0.2 and got[1] > 5
    assert not screen.concentration(screen.value_sums(error * 0, attention)).any()


def test_weights_are_the_attention_paid_to_the_prefix():
    """More positions than channels, a window, groups of heads."""
    model, ids = hf("Mistral", sliding_window=8), np.random.default_rng(5).integers(1, 128, (2, 40))

    def visit(layer: int, q: Any, k: Any, v: Any, attend: Any) -> None:
        want, _ = oracle(q, k, v, 16**-0.5, 8)
        np.testing.assert_allclose(screen._weights(attend, k, v, 34), want[:, :, 34:, :34], atol=1e-6)

    backends.of(model).attention(model, ids, visit)


# ---- screening a mapper of the family ----


@pytest.fixture(scope="module")
def pair(family_model):
    return family_model("S", "torch")[0], family_model("M", "torch")[0]


@pytest.fixture(scope="module")
def passages(family_model):
    tokenizer = family_model("M", "torch")[1]
    return run.rows(tokenizer.encode, family.text("heldout"), 6, PREFIX + CONTINUATION)


@pytest.fixture(scope="module")
def mapper(pair, family_model, tmp_path_factory):
    """S -> M, fitted on a part of the shipped text, saved as `crosskv fit` does it."""
    config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=48, calib_seq_len=256, stride=1)
    tokenizer = family_model("S", "torch")[1]
    fitted = crosskv.fit(*pair, family.text("calibration")[:150_000], tokenizer, config, progress=False)
    fitted.provenance["models"] = ["family:S", "family:M"]
    return crosskv.load(fitted.save(tmp_path_factory.mktemp("mapper") / "S-M"))


@pytest.fixture(scope="module")
def found(mapper, pair, passages):
    return screen.screen(mapper, *pair, passages, PREFIX)


def test_own_keys_and_values_change_nothing(found):
    assert np.abs(found.cosine["own"] - 1).max() < 1e-9
    assert found.kl["own"].max() == 0 and found.agree["own"].all()


def test_a_fitted_mapper_is_above_every_control_at_every_layer(found):
    mapped = found.heads().mean(1)
    assert found.cosine["mapped"].shape[:2] == (6, 6) and found.kl["mapped"].shape == (6, CONTINUATION)
    for control in ("random", "raw copy", "wrong document"):
        assert (mapped > found.heads(control).mean(1)).all(), control
    kl = {arm: x.mean() for arm, x in found.kl.items()}
    assert kl["mapped"] < min(kl[a] for a in ("random", "raw copy", "wrong document", "none"))
    assert "none" not in found.cosine and found.passed, found.why


def test_cosines_and_errors_against_plain_arithmetic(found, mapper, pair, passages):
    """From the handoff's keys and values: attention in float64; errors over all passages at once; the keys before
    their rotation are what the model's own norm gives."""
    import torch

    source, target = pair
    b, before = backends.of(target), []
    hooks = [x.self_attn.k_norm.register_forward_hook(lambda *a: before.append(a[2])) for x in target.model.layers]
    seen: list[Any] = []
    b.attention(target, passages, lambda layer, q, k, v, _: seen.append((q, k, v)))
    for hook in hooks:
        hook.remove()
    theirs = live.mapped_layers(mapper, source, target, passages[:, : PREFIX + 1])
    for i, (q, k, v) in enumerate(seen):
        mixed = [torch.cat([x, own[:, :, PREFIX:]], 2) for x, own in zip(theirs[i], (k, v), strict=True)]
        out = [oracle(q, *kv, 64**-0.5)[1][:, :, PREFIX:] for kv in ((k, v), mixed)]
        cosine = (out[0] * out[1]).sum(-1) / np.linalg.norm(out[0], axis=-1) / np.linalg.norm(out[1], axis=-1)
        np.testing.assert_allclose(found.cosine["mapped"][:, i], cosine.mean(-1), atol=1e-5)
        plain = before[i].transpose(1, 2)
        for kind, own, mine, x in (("keys", k, theirs[i][0], plain), ("values", v, theirs[i][1], v)):
            own, mine, x = (y[:, :, 1:PREFIX].double() for y in (own, mine, x))
            error, e = float(((mine - own) ** 2).sum() / (own**2).sum()), found.errors[kind]
            np.testing.assert_allclose(e.relative[i], error, rtol=1e-4)  # rotating (and yarn's scale) changes no ratio
            centred = x - x.mean((0, 2), keepdim=True)
            np.testing.assert_allclose(e.unexplained[i], error * (x**2).sum() / (centred**2).sum(), rtol=1e-4)


def shifted(mapper: Mapper) -> Mapper:
    """Every target head gets what was meant for its neighbour."""
    d = mapper.target.head_dim

    def turned(p: Any) -> Any:
        return dataclasses.replace(p, weight=np.roll(p.weight, d, 1), bias=np.roll(p.bias, d))

    weights = {t: tuple(turned(p) for p in mapper.weights(t)) for t in mapper.layers}
    return Mapper(mapper.source, mapper.target, mapper.config, mapper.layers, weights)  # type: ignore[arg-type]


def displaced(map_cache: Any, by: int) -> Any:
    """map_cache with keys that are rotated for `by` positions further on."""

    def mapped(part: Any, mapper: Any, positions: Any, source: Any, target: Any, **more: Any) -> Any:
        def turned(k: Any, r: Any) -> Any:
            there, here = (rope.tables(r, positions + n, k, "float32") for n in (by, 0))
            return rope.rotate(rope.unrotate(k, here, r.interleaved), there, r.interleaved)

        out = map_cache(part, mapper, positions, source, target, **more)
        return {i: (turned(k, target.ropes[i]), v) for i, (k, v) in out.items()}

    return mapped


@pytest.mark.parametrize("how", ["heads shifted by one", "keys at wrong positions"])
def test_a_broken_mapper_is_caught(how, found, mapper, pair, passages, monkeypatch):
    broken = mapper
    if how == "heads shifted by one":
        broken = shifted(mapper)
    else:
        monkeypatch.setattr(live, "map_cache", displaced(live.map_cache, 8))
    again = screen.screen(broken, *pair, passages, PREFIX, arms=("own", "mapped"))
    good, bad = (float(x.cosine["mapped"].mean()) for x in (found, again))
    kl, worse = (float(x.kl["mapped"].mean()) for x in (found, again))
    assert bad < good - 0.02 and worse > kl + 0.02
    limits = {"min_cosine": (good + bad) / 2, "max_kl": (kl + worse) / 2}
    assert dataclasses.replace(found, **limits).passed
    failed = dataclasses.replace(again, **limits)
    assert not failed.passed and "cosine" in failed.why and f"the mean KL {worse:.3f} is over" in failed.why


def test_the_verdict_says_why(found):
    layer, head, cosine = found.worst(1)[0]
    assert cosine == found.heads().min() == found.heads()[layer, head]
    assert f"layer {layer} head {head} ({cosine:.3f})" in found.why
    tight = dataclasses.replace(found, min_cosine=0.99, max_kl=0.0)
    assert not tight.passed and "is under 0.99" in tight.why and "is over 0" in tight.why
    level = dataclasses.replace(found, kl=found.kl | {"random": found.kl["mapped"]})
    assert not level.passed and "not under that of the control 'random'" in level.why
    blank = dataclasses.replace(found, kl=found.kl | {"mapped": found.kl["mapped"] * np.nan})
    assert not blank.passed


def test_rows_say_what_was_measured(found, tmp_path):
    paths = screen.write(found, tmp_path / "out")
    got = rows.read(paths[0])
    assert {r["claim"] for r in got} == {"screen"} and all(r["n"] == 6 for r in got)
    mean = [r for r in got if r["metric"] == "kl" and r["setting"]["arm"] == "mapped"]
    assert len(mean) == 1 and mean[0]["low"] < mean[0]["value"] < mean[0]["high"]
    heads = [r["setting"]["heads"] for r in got if r["setting"].get("arm") == "mapped" and "heads" in r["setting"]]
    np.testing.assert_allclose(heads, found.heads(), atol=1e-5)
    assert got[-1]["metric"] == "passed" and got[-1]["value"] == 1 and got[-1]["setting"]["why"] == found.why
    assert paths[1].read_bytes()[:4] == b"\x89PNG" and found.why[:12] in paths[2].read_text()


@pytest.mark.parametrize("count", [2, 3, 5, 6, 8, 9])
def test_passages_are_read_in_batches_without_a_single_one(count):
    parts = list(screen._parts(np.arange(count * 3).reshape(count, 3), 4))
    assert min(map(len, parts)) >= 2 and max(map(len, parts)) <= 5
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(count * 3).reshape(count, 3))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prefix": PREFIX + CONTINUATION}, "more than 120"),
        ({"sinks": 0}, "sinks must be from 1"),
        ({"batch": 1}, "batch must be >= 2"),
        ({"arms": ("own", "random")}, "own and mapped among them"),
    ],
)
def test_bad_input_is_one_sentence(changes, sentence, mapper, pair, passages):
    with pytest.raises(BadInput, match=sentence):
        screen.screen(mapper, *pair, passages, **{"prefix": PREFIX, **changes})


# ---- the command ----


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*args) -> (exit code, stdout, stderr) of `crosskv screen`, in this process: starting one takes longer."""

    def run_it(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["crosskv", "screen", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return (stopped.value.code or 0, *capsys.readouterr())  # type: ignore[return-value]

    return run_it


SMALL = ("--passages", 4, "--prefix", 64, "--continuation", 16)


@pytest.mark.parametrize("host", ["torch", "mlx"])
def test_command_says_what_the_library_says(host, mapper, pair, family_model, command, tmp_path):
    """Exit code 0, the same figures in both hosts, files where they are wanted."""
    limits = ("--min-cosine", 0.5, "--max-kl", 5)
    code, printed, error = command(mapper.path, *SMALL, *limits, "--host", host, "-o", tmp_path, "--json")
    said = json.loads(printed)
    assert code == 0 and error == "", said["why"]
    assert said["passed"] and "shipped held-out text" in said["text"] and len(said["files"]) == 3
    ids = run.rows(family_model("S", "torch")[1].encode, family.text("heldout"), 4, 80)
    want = screen.screen(mapper, *pair, ids, 64)
    for a, b in zip(said["arms"], want.arm_table(), strict=True):
        assert a["arm"] == b["arm"] and abs(a["kl"]["value"] - b["kl"]["value"]) < 1e-2 * max(1, b["kl"]["value"])
    for a, b in zip(said["layers"], want.layer_table(), strict=True):
        assert a["cosine"] == pytest.approx(b["cosine"], abs=1e-3)
        assert a["relative_keys"] == pytest.approx(b["relative_keys"], rel=1e-2)


def test_a_failed_verdict_is_exit_1_and_no_error(mapper, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(family.text("heldout")[:60_000])
    args = ["screen", mapper.path, *SMALL, "--max-kl", 0, "--data", text]
    run_it = [sys.executable, "-c", "from crosskv.cli import main; main()"]
    done = subprocess.run([*run_it, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("FAILED: the mean KL") and str(text) in done.stdout


def test_errors_of_the_command_are_one_line(mapper, command, tmp_path):
    nameless = Mapper(mapper.source, mapper.target, mapper.config, mapper.layers,
                      {t: mapper.weights(t) for t in mapper.layers}).save(tmp_path / "x")  # fmt: skip
    for args, sentence in (
        ((nameless,), "name them with --source and --target"),
        ((mapper.path, "--passages", 0), "must be >= 1"),
        ((mapper.path, "--target", "family:L"), "fitted with"),
    ):
        code, _, error = command(*args)
        assert code == 1 and sentence in error and error.count("\n") == 1, error
