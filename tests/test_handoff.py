"""Fit from live models, and hand prompts over, in each host and across hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import LLAMA3, greedy, hf, mlx, model_hosts, small, twin

import crosskv
from crosskv import backends, live
from crosskv.errors import BadInput, IncompatibleModels, MatchedKVError
from crosskv.mapper import MapperConfig

RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 128, 14_000).tolist()
CONFIG = MapperConfig(k=2, ridge_lambda=0, n_calib_sequences=40, calib_seq_len=100, stride=1, dtype="float32")


def _fit(source: Any, target: Any, config: MapperConfig = CONFIG, **kwargs: Any) -> Any:
    return crosskv.fit(source, target, [TEXT], config=config, progress=False, **kwargs)


def _twins(host: str) -> tuple[Any, Any]:
    """A pair with an exact linear relation between their caches: the target is the source with other RoPE-free weights.

    Rotating a head's pre-RoPE keys and queries by one orthogonal matrix that commutes with nothing would change the
    function; scaling keys up and queries down, and values up and the output down, does not.
    """
    source = small(host)
    target = small(host)
    if host == "torch":
        import torch

        with torch.no_grad():
            for layer in target.model.layers:
                layer.self_attn.k_norm.weight *= 2
                layer.self_attn.q_norm.weight /= 2
                layer.self_attn.v_proj.weight *= 4
                layer.self_attn.o_proj.weight /= 4
    else:
        for layer in target.layers:
            a = layer.self_attn
            a.k_norm.weight, a.q_norm.weight = a.k_norm.weight * 2, a.q_norm.weight / 2
            a.v_proj.weight, a.o_proj.weight = a.v_proj.weight * 4, a.o_proj.weight / 4
    return source, target


@pytest.mark.parametrize("host", model_hosts())
def test_a_planted_pair_continues_as_the_target_alone_does(host: str, tmp_path: Any) -> None:
    source, target = _twins(host)
    mapper = _fit(source, target)
    assert [m.sources[0] <= t <= m.sources[1] for t, m in mapper.layers.items()] == [True] * 4
    assert all(m.ranked[0] == t and m.r2_keys > 1 - 1e-6 and m.r2_values > 1 - 1e-6 for t, m in mapper.layers.items())
    ids = np.random.default_rng(3).integers(0, 128, (1, 60))
    want = greedy(target, ids, None, 20)
    mapper.save(tmp_path / "m")
    for m in (mapper, crosskv.load(tmp_path / "m")):
        for held, sinks in ((1, 0), (1, 1), (7, 4), (59, 1)):
            h = crosskv.handoff(m, source, target, ids, hold_back=held, sinks=sinks)
            assert h.tokens.shape == (1, held)
            assert greedy(target, h.tokens, h.cache, 20) == want
    raw = backends.of(target).install(target, backends.of(source).capture(source, ids[:, :-1]))
    assert greedy(target, ids[:, -1:], raw, 20) != want  # copying without the map fails


@pytest.mark.parametrize("host", model_hosts())
def test_in_the_middle_of_a_conversation_and_back(host: str) -> None:
    a, b = _twins(host)
    there, back = _fit(a, b), _fit(b, a)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 128, (1, 20))
    first = crosskv.handoff(there, a, b, ids)
    ids = np.concatenate([ids, [greedy(b, first.tokens, first.cache, 5)], rng.integers(0, 128, (1, 6))], 1)
    want = greedy(a, ids, None, 12)
    # a keeps its own cache of the first 20 tokens; b's cache already holds 24
    mine = backends.of(a).install(a, backends.of(a).capture(a, ids[:, :20]))
    second = crosskv.handoff(back, b, a, ids, source_cache=first.cache, target_cache=mine)
    assert greedy(a, second.tokens, second.cache, 12) == want
    exact = backends.of(a).capture(a, ids[:, :20])[2][0]
    kept = backends.of(a).read(a, mine)[2][0]
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(exact))  # neither cache was changed
    # longer than the prompt needs: trimmed
    long = backends.of(b).install(b, backends.of(b).capture(b, np.concatenate([ids, ids], 1)))
    third = crosskv.handoff(back, b, a, ids, source_cache=long)
    assert greedy(a, third.tokens, third.cache, 12) == want
    whole = backends.of(a).install(a, backends.of(a).capture(a, ids))
    fourth = crosskv.handoff(back, b, a, ids, target_cache=whole)
    assert greedy(a, fourth.tokens, fourth.cache, 12) == want


@pytest.mark.parametrize("host", model_hosts())
def test_all_tokens_exact_is_the_target_itself(host: str) -> None:
    source, target = small(host, layers=3), small(host, layers=5, seed=7)
    mapper = _fit(source, target, MapperConfig(k=2, n_calib_sequences=10, calib_seq_len=60))
    ids = np.random.default_rng(5).integers(0, 128, (1, 30))
    h = crosskv.handoff(mapper, source, target, ids, sinks=100)
    assert greedy(target, h.tokens, h.cache, 20) == greedy(target, ids, None, 20)


@pytest.mark.parametrize("host", model_hosts())
def test_capture_of_the_first_layers_computes_no_more(host: str) -> None:
    model, ids = small(host, layers=5, seed=7), np.random.default_rng(5).integers(0, 128, (2, 30))
    b = backends.of(model)
    want = b.capture(model, ids)
    past = {i: tuple(x[:, :, :11] for x in want[i]) for i in range(2)}

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer too far")

    if host == "torch":
        model.model.layers[2].forward = broken
    else:
        model.layers[2] = broken
    for got in (b.capture(model, ids, layers=2), b.capture(model, ids[:, 11:], None, past, layers=2)):
        assert sorted(got) == [0, 1]
        for i, kv in got.items():
            for x, y in zip(kv, want[i], strict=True):
                x, y = b.to_numpy(x), b.to_numpy(y)
                np.testing.assert_allclose(x, y, atol=8 * 2**-23 * np.abs(y).max())
    with pytest.raises(AssertionError, match="too far"):
        b.capture(model, ids, layers=3)


@pytest.mark.parametrize("host", model_hosts())
def test_exact_layers_are_the_targets_own(host: str) -> None:
    source, target = small(host, layers=3), small(host, layers=5, seed=7)
    b, ids = backends.of(target), np.random.default_rng(5).integers(0, 128, (1, 30))
    config = MapperConfig(k="all", n_calib_sequences=40, calib_seq_len=60, stride=1, features="both", exact_layers=2)
    mapper = _fit(source, target, config)
    assert sorted(mapper.layers) == [2, 3, 4]
    own = b.capture(target, ids[:, :-1])
    known = b.install(target, b.capture(target, ids[:, :7]))
    for more in ({}, {"target_cache": known}, {"exact_layers": 4}, {"exact_layers": 5}):
        got = b.read(target, crosskv.handoff(mapper, source, target, ids, **more).cache)
        same = [
            float(np.abs(b.to_numpy(x) - b.to_numpy(y)).max()) < 1e-4 * float(np.abs(b.to_numpy(y)).max())
            for i in range(5) for x, y in [(got[i][1], own[i][1])]
        ]  # fmt: skip
        exact = more.get("exact_layers", 2)
        assert same == [True] * exact + [False] * (5 - exact)
    h = crosskv.handoff(mapper, source, target, ids, exact_layers=5)
    assert greedy(target, h.tokens, h.cache, 20) == greedy(target, ids, None, 20)
    for wrong in (1, 6):
        with pytest.raises(BadInput, match="exact_layers must be from 2"):
            crosskv.handoff(mapper, source, target, ids, exact_layers=wrong)


@pytest.mark.parametrize("host", model_hosts())
def test_left_padded_batch_equals_single_prompts(host: str) -> None:
    source, target = small(host, layers=3), small(host, layers=5, seed=7)
    mapper = _fit(source, target, MapperConfig(k=2, n_calib_sequences=10, calib_seq_len=60, exact_layers=1))
    rng = np.random.default_rng(6)
    long, short = rng.integers(0, 128, (1, 20)), rng.integers(0, 128, (1, 13))
    ids = np.concatenate([long, np.pad(short, ((0, 0), (7, 0)))])
    mask = np.stack([np.ones(20, int), np.repeat([0, 1], [7, 13])])
    both = crosskv.handoff(mapper, source, target, ids, mask=mask)
    b = backends.of(target)
    got = b.to_numpy(b.logits(target, ids[:, -1:], both.cache, mask))[:, -1]
    for i, one in enumerate((long, short)):
        # the batch computes 8 exact tokens in each row: padding of the shortest + 1 sink
        alone = crosskv.handoff(mapper, source, target, one, sinks=8 if i == 0 else 1)
        want = b.to_numpy(b.logits(target, one[:, -1:], alone.cache))[0, -1]
        np.testing.assert_allclose(got[i], want, atol=2e-4 * np.abs(want).max())


def _sliding(host: str, layers: int, seed: int) -> Any:
    if host == "torch":
        types = (["sliding_attention", "full_attention"] * 3)[:layers]
        return hf("Gemma3Text", seed, num_hidden_layers=layers, layer_types=types, sliding_window=8)
    more = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    return mlx("gemma3_text", seed, num_hidden_layers=layers, **more)


@pytest.mark.parametrize("host", model_hosts())
def test_sliding_windows_and_two_ropes(host: str) -> None:
    """Source and target are one model: the map is the identity, beyond the window too, with two kinds of RoPE."""
    model = _sliding(host, 4, 0)
    mapper = _fit(model, model)
    ids = np.random.default_rng(3).integers(0, 128, (1, 40))
    h = crosskv.handoff(mapper, model, model, ids)
    assert greedy(model, h.tokens, h.cache, 16) == greedy(model, ids, None, 16)


@pytest.mark.parametrize("host", model_hosts())
def test_half_precision_pair(host: str) -> None:
    source, target = _twins(host)
    if host == "torch":
        for m in (source, target):
            for p in m.parameters():
                p.data = p.data.bfloat16()
    else:
        import mlx.core as mx

        source.set_dtype(mx.bfloat16)
        target.set_dtype(mx.bfloat16)
    mapper = _fit(
        source, target, MapperConfig(k=2, ridge_lambda=1e-4, n_calib_sequences=40, calib_seq_len=100, stride=1)
    )
    assert min(m.r2_keys for m in mapper.layers.values()) > 0.999
    ids = np.random.default_rng(3).integers(0, 128, (1, 40))
    h = crosskv.handoff(mapper, source, target, ids)
    b = backends.of(target)
    assert b.dtype_of(b.read(target, h.cache)[0][0]) == "bfloat16"
    got, want = b.to_numpy(b.logits(target, ids[:, -1:], h.cache)), b.to_numpy(b.logits(target, ids))[:, -1:]
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.99


def test_a_rope_that_changes_with_the_length() -> None:
    """Dynamic NTK: 60 tokens are beyond the 32 where it starts to change, in source and target."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = hf("Llama", rope_parameters=parameters, max_position_embeddings=32)
    config = MapperConfig(k=2, ridge_lambda=0, n_calib_sequences=100, calib_seq_len=30, stride=1, dtype="float32")
    mapper = _fit(model, model, config)
    ids = np.random.default_rng(3).integers(0, 128, (1, 60))
    h = crosskv.handoff(mapper, model, model, ids)
    b = backends.of(model)
    got = b.read(model, h.cache)
    # A cold run reads all 60 tokens, the source 59: each has its own frequencies. Layer 0 sees no attention.
    want = b.capture(model, ids)[0][0].numpy()[:, :, :59]
    np.testing.assert_allclose(got[0][0].numpy(), want, atol=1e-4 * np.abs(want).max())
    short = b.capture(model, ids[:, :30])[0][0].numpy()
    assert np.abs(short - want[:, :, :30]).max() > 0.1 * np.abs(want).max()
    cache = b.install(model, b.capture(model, ids[:, :40]))
    with pytest.raises(MatchedKVError, match="without source_cache"):
        crosskv.handoff(mapper, model, model, ids, source_cache=cache)


def test_across_hosts() -> None:
    source = hf("Llama", rope_parameters=LLAMA3)
    target = twin("llama", source, rope_theta=5e5, rope_scaling=LLAMA3)
    ids = np.random.default_rng(8).integers(0, 128, (1, 40))
    for a, b in ((source, target), (target, source)):
        for config in (CONFIG, replace(CONFIG, features="both", exact_layers=1, stride=1)):
            mapper = _fit(a, b, config)
            h = crosskv.handoff(mapper, a, b, ids)
            assert greedy(b, h.tokens, h.cache, 16) == greedy(b, ids, None, 16)


@pytest.mark.parametrize("host", model_hosts())
def test_fit_in_batches_equals_fit_at_once_and_resumes(host: str, tmp_path: Any) -> None:
    source, target = small(host, layers=3), small(host, layers=4, seed=7)
    config = MapperConfig(k=2, n_calib_sequences=30, calib_seq_len=50, stride=2, dtype="float32")
    want = _fit(source, target, config, batch_size=30)

    reads = 0

    class StopError(Exception):
        pass

    def texts() -> Any:
        nonlocal reads
        for i in range(0, 1500, 50):
            if i == 1000 and not reads:
                reads = 1
                raise StopError
            yield TEXT[i : i + 50]

    where = tmp_path / "state"
    with pytest.raises(StopError):
        crosskv.fit(source, target, texts(), config=config, checkpoint=where, batch_size=4, progress=False)
    with pytest.raises(BadInput, match="resume=True"):
        crosskv.fit(source, target, texts(), config=config, checkpoint=where, progress=False)
    with pytest.raises(BadInput, match="not the one that this checkpoint"):
        crosskv.fit(source, target, [TEXT[1:]], config=config, checkpoint=where, resume=True, progress=False)
    with pytest.raises(BadInput, match="other models"):
        crosskv.fit(source, source, texts(), config=config, checkpoint=where, resume=True, progress=False)
    got = crosskv.fit(
        source, target, texts(), config=config, checkpoint=where, resume=True, batch_size=7, progress=False
    )
    assert got.provenance["text_sha256"] == want.provenance["text_sha256"]
    assert got.provenance["training_rows"] == want.provenance["training_rows"]
    for t in want.layers:
        assert got.layers[t].sources == want.layers[t].sources
        for a, b in zip(got.weights(t), want.weights(t), strict=True):
            x, y = a.weight * a.scale[:, None], b.weight * b.scale[:, None]
            np.testing.assert_allclose(x, y, atol=2e-4 * np.abs(y).max())


def test_an_interrupt_loses_one_batch_at_most(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = small("torch", layers=3), small("torch", layers=4, seed=7)
    config = MapperConfig(k=2, n_calib_sequences=20, calib_seq_len=50, stride=2)
    add, calls = live.Stats.add, 0

    def stop_inside_a_batch(self: Any, rows: Any, held: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        add(self, rows, held)

    monkeypatch.setattr(live.Stats, "add", stop_inside_a_batch)
    with pytest.raises(KeyboardInterrupt):
        _fit(source, target, config, checkpoint=tmp_path / "c", batch_size=4)
    import json

    assert json.loads((tmp_path / "c" / "fit.json").read_text())["done"] == 8
    resumed = _fit(source, target, config, checkpoint=tmp_path / "c", batch_size=4, resume=True)
    assert resumed.provenance["training_rows"] == _fit(source, target, config).provenance["training_rows"]


class _Words:
    """A tokenizer: one id per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 128 for c in text]

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(128)}


def test_texts_as_strings_and_what_is_wrong_with_them() -> None:
    source, target = small("torch", layers=2), small("torch", layers=2, seed=7)
    config = MapperConfig(k=1, n_calib_sequences=20, calib_seq_len=30, stride=1)
    text = "".join(map(chr, TEXT[:700]))
    mapper = crosskv.fit(source, target, text, _Words(), config, progress=False)
    assert mapper.provenance["sequences"] == 20
    assert len(mapper.provenance["tokenizer_sha256"]) == 64
    with pytest.raises(BadInput, match="empty"):
        crosskv.fit(source, target, [], config=config, progress=False)
    with pytest.raises(BadInput, match="empty"):
        crosskv.fit(source, target, ["", "x"], _Words(), config, progress=False)
    with pytest.raises(BadInput, match="pass tokenizer="):
        crosskv.fit(source, target, ["words"], config=config, progress=False)
    with pytest.raises(BadInput, match="Token id 200 is outside the source's vocabulary of 128"):
        crosskv.fit(source, target, [[1, 2, 200] * 100], config=config, progress=False)
    with pytest.raises(BadInput, match=r"Too few rows: .* At least 33 training rows"):
        crosskv.fit(source, target, [TEXT[:60]], config=config, progress=False)


def test_bad_handoffs_are_refused() -> None:
    source, target, other = small("torch", layers=3), small("torch", seed=7), small("torch", seed=8)
    mapper = _fit(source, target, MapperConfig(k=2, n_calib_sequences=10, calib_seq_len=60))
    ids = list(range(20))
    with pytest.raises(IncompatibleModels, match="as its target, and the target given is not that model: layer 0"):
        crosskv.handoff(mapper, source, other, ids)
    assert crosskv.handoff(mapper, source, other, ids, force=True).cache.get_seq_length() == 19
    with pytest.raises(IncompatibleModels, match="3 layers"):
        crosskv.handoff(mapper, target, target, ids)
    for bad in (0, 20):
        with pytest.raises(BadInput, match="hold_back must be from 1 to 19"):
            crosskv.handoff(mapper, source, target, ids, hold_back=bad)
    with pytest.raises(BadInput, match="sinks"):
        crosskv.handoff(mapper, source, target, ids, sinks=-1)
    with pytest.raises(BadInput, match="vocabulary"):
        crosskv.handoff(mapper, source, target, [1, 128, 3])
    with pytest.raises(BadInput, match="token ids"):
        crosskv.handoff(mapper, source, target, [0.5, 1.0])
    with pytest.raises(BadInput, match="token ids"):
        crosskv.handoff(mapper, source, target, [])
    cache = backends.of(source).install(source, backends.of(source).capture(source, np.arange(10).reshape(2, 5)))
    with pytest.raises(BadInput, match="source_cache holds 2 sequences, the prompt 1"):
        crosskv.handoff(mapper, source, target, ids, source_cache=cache)


def test_nan_from_a_model_is_named() -> None:
    import torch

    source, target = small("torch", layers=3), small("torch", seed=7)
    with torch.no_grad():
        target.model.layers[2].self_attn.v_proj.weight[3, 0] = float("nan")
    spec = live.measured(small("torch", seed=7))
    live._measured[id(target)] = (live.weakref.ref(target), spec)  # the probe itself would refuse
    with pytest.raises(BadInput, match=r"The target values of layer 2 have [\d,]+ NaN or Inf among [\d,]+"):
        _fit(source, target)
