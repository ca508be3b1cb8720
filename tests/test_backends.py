"""The seam: every backend has what the Protocol asks for; arrays go there and back."""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import pytest
from conftest import FLOAT64, array_backends, model_hosts

from crosskv import backends
from crosskv.errors import BadInput, MissingExtra


def _members(protocol: type) -> dict[str, Any]:
    return {n: f for n, f in vars(protocol).items() if isinstance(f, types.FunctionType) and not n.startswith("_")}


def _check(module: Any, protocol: type) -> None:
    for name, want in _members(protocol).items():
        have = inspect.signature(getattr(module, name)).parameters
        asked = list(inspect.signature(want).parameters.values())[1:]
        assert list(have) == [p.name for p in asked], f"{module.__name__}.{name}"
        assert [p.default for p in have.values()] == [p.default for p in asked], f"{module.__name__}.{name}"


@pytest.mark.parametrize("name", array_backends())
def test_array_protocol(name: str) -> None:
    module = backends.load(name)
    assert hasattr(module, "xp")
    _check(module, backends.Arrays)


@pytest.mark.parametrize("name", model_hosts())
def test_model_protocol(name: str) -> None:
    _check(backends.load(name), backends.Models)


def test_both_hosts_are_here() -> None:
    assert set(model_hosts()) >= {"torch", "mlx"}
    assert set(array_backends()) >= {"numpy", "torch", "mlx"}


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for d in ("float16", "bfloat16", "float32") for n in array_backends()] + FLOAT64
)
def test_there_and_back(name: str, dtype: str) -> None:
    b, host = backends.load(name), backends.load("numpy")
    a = host.cast(np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32), dtype)
    x = b.from_numpy(a)
    assert b.dtype_of(x) == dtype
    assert backends.of(x) is b
    np.testing.assert_array_equal(b.to_numpy(x), host.to_numpy(a))
    assert b.dtype_of(b.cast(x, "float32")) == "float32"
    assert b.dtype_of(b.from_numpy(a, x, "float16")) == "float16"
    assert b.move(x, x).shape == (3, 5)


def test_bfloat16_bits_round_as_torch_does() -> None:
    import torch

    from crosskv.backends import numpy as host

    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 10.0 ** np.arange(-5, 5).repeat(1000)
    want = torch.from_numpy(x.astype(np.float32)).bfloat16()
    got = torch.from_numpy(host.bf16_bits(x).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", array_backends())
def test_local_arrays_share_the_memory_of_host_arrays(name: str) -> None:
    b = backends.load(name)
    x = b.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    y = b.local(x)
    np.testing.assert_array_equal(b.to_numpy(x), backends.of(y).to_numpy(y))
    if isinstance(y, np.ndarray):
        assert np.shares_memory(y, b.to_numpy(x))


def test_what_is_no_array_is_said_so() -> None:
    with pytest.raises(BadInput, match=r"array or a model of one of .*builtins\.list"):
        backends.of([1, 2])


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "crosskv.backends.mlx", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'crosskv\[mlx\]'"):
        backends.load("mlx")
