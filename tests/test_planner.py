"""Budgets: what the planner says is what caches hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_compress import run

import crosskv
from crosskv import IntConfig, XKVConfig, calibrate, compress, family, make_cache, plan
from crosskv.errors import BadInput
from crosskv.live import measured
from crosskv.planner import inner_ratio


@pytest.fixture(scope="module")
def model_and_basis():
    model, tokenizer = family.load("S")
    basis = calibrate(model, family.text("calibration"), tokenizer, group=4, count=24, length=256, progress=False)
    ids = np.asarray([tokenizer.encode(family.text("heldout"))[:700]])
    return model, basis, ids


@pytest.mark.parametrize("ratio", [2.5, 6, 9])
def test_a_cache_holds_what_its_plan_says(model_and_basis, ratio):
    model, basis, ids = model_and_basis
    for p in plan(model, ratio, ids.shape[1], basis):
        assert p.ratio >= ratio * 0.99
        c = p.config
        cache = make_cache(model, c)
        run(model, ids, cache)
        full = 2 * 2 * measured(model).n_layers * measured(model).width
        exact = c.sinks + c.tail + (c.group if isinstance(c, IntConfig) else c.block) - 1
        held = compress.nbytes(model, cache)
        packed = sum(h.packed_tokens for h in {m.held.group for m in cache.layers}) if isinstance(c, XKVConfig) else 0
        if packed:
            really = ids.shape[1] - packed
            held -= full * really  # float32: exact tokens weigh twice what the plan says
            assert abs(held - full * (really - exact) - p.bytes) < 0.05 * p.bytes + full * c.block
        else:
            assert held < 2 * p.bytes and full * ids.shape[1] / p.bytes == pytest.approx(p.ratio)


def test_integers_are_proposed_for_low_ratios_and_the_basis_beyond(model_and_basis):
    model, basis, _ = model_and_basis
    low, high = (plan(model, r, 8192, basis)[0] for r in (4, 8))
    assert isinstance(low.config, IntConfig) and low.config.bits_keys == 3 and low.static == 0
    assert high.config.basis is basis and high.kl > 0 and high.static > 0
    assert isinstance(plan(model, 8, 100_000)[0].config, XKVConfig)  # without a basis: one per prompt


def test_the_basis_pays_from_the_break_even_on(model_and_basis):
    model, basis, _ = model_and_basis
    p = plan(model, 8, 4096, basis)[0]
    plain = compress.int_bytes(measured(model), IntConfig(3, 3), 1 << 20) / (1 << 20)

    def better(tokens):
        return p.static + tokens * p.bytes / 4096 < tokens * plain

    assert better(p.breakeven + 2) and not better(p.breakeven - 2)


def test_bytes_per_token_are_a_ratio(model_and_basis):
    model, basis, _ = model_and_basis
    full = 2 * 2 * measured(model).n_layers * measured(model).width
    one, other = plan(model, 8, 4096, basis)[0], plan(model, None, 4096, basis, bytes_per_token=full / 8)[0]
    assert (one.bytes, one.ratio) == (other.bytes, other.ratio) and one.bytes <= 4096 * full / 8


def test_a_budget_out_of_reach_names_one_within(model_and_basis):
    model, basis, _ = model_and_basis
    with pytest.raises(BadInput, match="alone allow at most") as e:
        plan(model, 12, 256, basis)
    best = float(re.search(r"best found is ([0-9.]+)x", str(e.value))[1])
    assert plan(model, best - 0.1, 256, basis)
    for options, says in (
        ({"ratio": 0.5}, "nothing to do"),
        ({"ratio": 8, "context": 0}, "at least 1 token"),
        ({"ratio": 8, "bytes_per_token": 3}, "either ratio"),
        ({}, "either ratio"),
    ):
        with pytest.raises(BadInput, match=says):
            plan(model, **options)


def test_inner_ratio():
    # 1,000 tokens in the room of 125, 25 of them exact: 975 in the room of 100
    assert inner_ratio(8, 1000, 25) == pytest.approx(9.75)
    assert inner_ratio(8, 100, 20) is None and inner_ratio(1.0001, 100, 0) >= 1


def test_another_models_basis_is_refused(model_and_basis):
    _, basis, _ = model_and_basis
    other, _ = family.load("M")
    with pytest.raises(crosskv.errors.IncompatibleModels, match="calibrated for"):
        plan(other, 8, 4096, basis)
