"""Mappers on disk: whole or absent, checked, lazy, released, the same in every framework."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import array_backends
from test_transfer import Planted, error, to

import crosskv
from crosskv import backends
from crosskv.errors import BadArtifact, BadInput
from crosskv.mapper import Mapper, MapperConfig, pack
from crosskv.ridge import Affine
from crosskv.transfer import fit_mapper, transfer_cache


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted(500)


def _fit(p: Planted, name: str = "numpy", dtype: str = "float16") -> Mapper:
    config = MapperConfig(k=2, ridge_lambda=1e-6, stride=1, dtype=dtype)
    return fit_mapper(to(p.source, name, "float32"), to(p.target, name, "float32"), p.s, p.t, config=config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("wrote", array_backends())
def test_every_framework_reads_what_another_wrote(planted: Planted, wrote: str, dtype: str, tmp_path: Path) -> None:
    mapper = _fit(planted, wrote, dtype)
    want = {
        i: tuple(backends.of(x).to_numpy(x) for x in kv)
        for i, kv in transfer_cache(to(planted.source, wrote, "float32"), mapper).items()
    }
    mapper.save(tmp_path / "m")
    for reads in array_backends():
        got = transfer_cache(to(planted.source, reads, "float32"), crosskv.load(tmp_path / "m"))
        assert error(got, want) <= 32 * 2**-24


def test_the_file_is_plain_safetensors(planted: Planted, tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file as np_load
    from safetensors.torch import load_file

    for dtype, kind in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        mapper = _fit(planted, dtype=dtype)
        mapper.save(tmp_path / dtype)
        tensors = load_file(tmp_path / dtype / "mapper.safetensors")
        assert len(tensors) == 4 * 2 * 3
        assert tensors["2.keys.weight"].dtype == kind
        want = backends.load("numpy").to_numpy(mapper.weights(2)[0].weight)
        np.testing.assert_array_equal(tensors["2.keys.weight"].float().numpy(), want)
    assert np_load(tmp_path / "float16" / "mapper.safetensors")["0.values.bias"].dtype == np.float32


def test_what_is_known_survives(planted: Planted, tmp_path: Path) -> None:
    mapper = _fit(planted)
    mapper.provenance["note"] = "abc"
    assert mapper.save(tmp_path / "m") == tmp_path / "m"
    again = crosskv.load(tmp_path / "m")
    assert (again.source, again.target, again.config) == (mapper.source, mapper.target, mapper.config)
    assert again.layers == mapper.layers
    assert again.provenance == mapper.provenance
    card = (tmp_path / "m" / "README.md").read_text()
    assert mapper.describe() in card
    assert "abc" in card
    assert sorted(x.name for x in (tmp_path / "m").iterdir()) == ["README.md", "mapper.json", "mapper.safetensors"]


def test_layers_are_loaded_and_released_one_at_a_time(planted: Planted, tmp_path: Path) -> None:
    _fit(planted).save(tmp_path / "m")
    mapper = crosskv.load(tmp_path / "m")
    assert mapper.nbytes == 0
    peak = 0
    ready = mapper.ready

    def watched(*a: Any) -> Any:
        nonlocal peak
        out = ready(*a)
        peak = max(peak, mapper.nbytes)
        return out

    mapper.ready = watched  # type: ignore[method-assign]
    transfer_cache(to(planted.source, "numpy", "float32"), mapper)
    assert mapper.nbytes == 0
    one = peak
    transfer_cache(to(planted.source, "numpy", "float32"), mapper, unload_after=False)
    assert mapper.nbytes == 4 * one
    mapper.unload(1)
    assert mapper.nbytes == 3 * one
    mapper.unload()
    assert mapper.nbytes == 0


def test_unload_never_destroys_what_is_not_saved(planted: Planted, tmp_path: Path) -> None:
    mapper = _fit(planted)
    source = to(planted.source, "numpy", "float32")
    want = transfer_cache(source, mapper, unload_after=True)
    mapper.unload()
    assert mapper.nbytes > 0
    assert error(transfer_cache(source, mapper), want) == 0
    mapper.save(tmp_path / "m")
    mapper.unload()
    assert mapper.nbytes == 0
    assert error(transfer_cache(source, mapper), want) == 0


def test_load_then_save_elsewhere_and_over_itself(planted: Planted, tmp_path: Path) -> None:
    source = to(planted.source, "numpy", "float32")
    want = transfer_cache(source, _fit(planted))
    _fit(planted).save(tmp_path / "a")
    mapper = crosskv.load(tmp_path / "a")
    mapper.save(tmp_path / "b")
    mapper.save(tmp_path / "b")
    crosskv.load(tmp_path / "a").save(tmp_path / "a")
    for x in "ab":
        assert error(transfer_cache(source, crosskv.load(tmp_path / x)), want) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_relative_path_survives_chdir(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fitted = _fit(planted)
    want = transfer_cache(to(planted.source, "numpy", "float32"), fitted)
    fitted.save("m")
    mapper = crosskv.load("m")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert error(transfer_cache(to(planted.source, "numpy", "float32"), mapper), want) == 0


def test_a_failed_save_leaves_the_old_one(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = _fit(planted)
    mapper.save(tmp_path / "m")

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("crosskv.mapper.write_tensors", full)
    with pytest.raises(OSError, match="no space"):
        mapper.save(tmp_path / "m")
    with pytest.raises(OSError, match="no space"):
        mapper.save(tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    crosskv.load(tmp_path / "m")


def test_other_peoples_directories_are_not_overwritten(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="was not written by crosskv"):
        _fit(planted).save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def _damage(path: Path, how: str) -> None:
    file, about = path / "mapper.safetensors", path / "mapper.json"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 10)
    elif how == "edited":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif how == "no tensors":
        file.unlink()
    elif how == "no json":
        about.unlink()
    elif how == "half a json":
        about.write_text(about.read_text()[:100])
    else:
        d = json.loads(about.read_text())
        if how == "newer":
            d["format"] = 99
        else:
            d["layers"][0]["r2_keys"] = 1.0
        about.write_text(json.dumps(d))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("truncated", r"has \d+ bytes, expected \d+"),
        ("edited", "does not match its checksum"),
        ("no tensors", "is missing"),
        ("no json", "it has no mapper.json"),
        ("half a json", "not readable JSON"),
        ("newer", "has format 99; this crosskv reads up to 2"),
        ("json edited", "does not match its own checksum"),
    ],
)
def test_damaged_mappers_are_refused(planted: Planted, tmp_path: Path, how: str, match: str) -> None:
    _fit(planted).save(tmp_path / "m")
    _damage(tmp_path / "m", how)
    with pytest.raises(BadArtifact, match=match):
        crosskv.load(tmp_path / "m")


def test_a_mapper_that_vanishes_after_loading_is_said_so(planted: Planted, tmp_path: Path) -> None:
    _fit(planted).save(tmp_path / "m")
    mapper = crosskv.load(tmp_path / "m")
    (tmp_path / "m" / "mapper.safetensors").unlink()
    with pytest.raises(BadArtifact, match="not a readable safetensors file"):
        transfer_cache(to(planted.source, "numpy", "float32"), mapper)


def test_packing_keeps_the_map_exact_at_the_mean_and_survives_any_scale() -> None:
    rng = np.random.default_rng(0)
    a = Affine(rng.standard_normal((6, 4)) * 10.0 ** np.array([-12, -6, 0, 3, 6, 12])[:, None], rng.standard_normal(4))
    a.weight[2] = 0
    mean = 1000 / np.abs(a.weight).max(1).clip(1e-3)
    packed = pack(a, mean, "float16")
    assert np.isfinite(packed.weight.astype(np.float64)).all()
    w = packed.weight.astype(np.float64) * packed.scale[:, None]
    np.testing.assert_allclose(w, a.weight, rtol=2.0**-10)
    want = mean @ a.weight + a.bias
    np.testing.assert_allclose(mean @ w + packed.bias, want, atol=2.0**-22 * np.abs(mean @ np.abs(a.weight)).max())
