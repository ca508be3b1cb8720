"""Parked caches: what one process or framework wrote, another goes on from. The oracle is the cache that went on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import model_hosts, small, twin
from test_compress import ids, new, run

from crosskv import IntConfig, XKVConfig, backends, calibrate, compress, make_cache, park, resume
from crosskv.errors import BadArtifact, BadInput, IncompatibleModels
from crosskv.files import Tensors

HOSTS = pytest.mark.parametrize("host", model_hosts())
SMALL = {"sinks": 2, "tail": 4, "block": 8, "first": 16}
CONFIGS = {
    "integers": IntConfig(3, 4, group=8, sinks=2, tail=4),
    "tokens": XKVConfig(rank_keys=12, rank_values=16, bits=4, group=3, **SMALL),
    "mixed bits": XKVConfig(rank_keys=16, rank_values=16, bits=(8, 4, 2, 0), group=2, **SMALL),
    "features": XKVConfig("features", rank_keys=10, bits=4, values=False, group=2, **SMALL),
    "not quantised": XKVConfig(rank_keys=16, rank_values=16, group="all", **SMALL),
    "calibrated": "calibrated",
}


def calibrated(model, seed=0):
    return calibrate(model, ids(40, seed, 32).tolist(), group=2, length=40, progress=False)


@pytest.fixture(scope="module")
def bases():
    return {host: calibrated(small(host)) for host in model_hosts()}


def config(name, basis):
    return XKVConfig(basis, ratio=4, sinks=2, tail=0, block=1) if name == "calibrated" else CONFIGS[name]


@HOSTS
@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_cache_goes_on_as_the_one_that_stayed(host, name, bases, tmp_path):
    model, basis = small(host), bases[host]
    mine = make_cache(model, config(name, basis))
    run(model, ids(90), mine)
    size = compress.nbytes(model, mine)
    file = park(mine, tmp_path / "chat.kv")
    assert file == tmp_path / "chat.kv" and [p.name for p in tmp_path.iterdir()] == ["chat.kv"]
    assert size <= file.stat().st_size <= size + 20_000  # the header
    packed = resume(model, file, basis if name == "calibrated" else None, packed=True)
    assert compress.nbytes(model, packed) == size
    plain = resume(model, park(mine), basis if name == "calibrated" else None)
    step = ids(3, 1)
    want = run(model, step, mine)
    np.testing.assert_array_equal(run(model, step, packed), want)
    np.testing.assert_allclose(run(model, step, plain), want, atol=2e-5 * abs(want).max(), rtol=0)
    more = ids(20, 2)  # what is folded later is folded alike
    np.testing.assert_array_equal(run(model, more, packed), run(model, more, mine))


@pytest.mark.parametrize("name", ["integers", "tokens", "calibrated"])
def test_parked_in_one_framework_resumed_in_the_other(name):
    ours = small("torch")
    theirs = twin("qwen3", ours, num_hidden_layers=4)
    for one, other in ((ours, theirs), (theirs, ours)):
        base = calibrated(one) if name == "calibrated" else None
        mine = make_cache(one, config(name, base))
        run(one, ids(90), mine)
        packed = resume(other, park(mine), base, packed=True)
        want = run(one, ids(3, 1), mine)
        np.testing.assert_allclose(run(other, ids(3, 1), packed), want, atol=1e-3 * abs(want).max(), rtol=0)


def test_a_padded_batch_keeps_its_places(bases):
    model, basis = small("torch"), bases["torch"]
    mask = np.ones((2, 60), int)
    mask[1, :11] = 0
    mine = make_cache(model, config("calibrated", basis))
    backends.of(model).logits(model, ids(60, batch=2), mine, mask)
    packed = resume(model, park(mine), basis, packed=True)
    longer = np.concatenate([mask, np.ones((2, 1), int)], 1)
    one, other = (backends.of(model).logits(model, ids(1, 1, 2), c, longer) for c in (mine, packed))
    np.testing.assert_array_equal(one.numpy(), other.numpy())


@HOSTS
def test_what_cannot_be_parked_or_resumed_says_so(host, bases, tmp_path):
    model, basis = small(host), bases[host]
    own = new(model)
    run(model, ids(20), own)
    with pytest.raises(BadInput, match="Only caches made by crosskv.make_cache"):
        park(own)
    mine = make_cache(model, config("calibrated", basis))
    run(model, ids(60), mine)
    data = park(mine)
    with pytest.raises(IncompatibleModels, match="pass it: resume"):
        resume(model, data)
    other = calibrated(model, 5)
    with pytest.raises(IncompatibleModels, match="needs the calibrated basis"):
        resume(model, data, other)
    with pytest.raises(IncompatibleModels, match="parked by another model"):
        resume(small(host, seed=1), data, basis)
    for cut in (5, len(data) // 2, len(data) - 1):
        with pytest.raises(BadArtifact, match="safetensors|truncated"):
            resume(model, data[:cut], basis)
    file = park(mine, tmp_path / "a.kv")
    about = json.loads(Tensors(file).metadata["crosskv"])
    assert about["version"] == 1
    raw = file.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 9')
    with pytest.raises(BadArtifact, match="format version 9"):
        resume(model, raw, basis)
    with pytest.raises(BadArtifact, match="not a readable safetensors"):
        resume(model, tmp_path / "nowhere.kv", basis)
