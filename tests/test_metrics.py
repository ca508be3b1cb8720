"""Scores against SciPy, against the host's own likelihoods, and against known intervals."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import array_backends, model_hosts, small
from scipy.special import log_softmax, rel_entr, softmax

from crosskv import backends, metrics
from crosskv.errors import BadInput


@pytest.mark.parametrize("name", array_backends())
def test_nll_kl_and_top1(name: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (30 * rng.standard_normal((2, 5, 11)).astype(np.float32) for _ in "ab")
    tokens = rng.integers(0, 11, (2, 5))
    x, y = (backends.load(name).from_numpy(z) for z in (a, b))
    want = -np.take_along_axis(log_softmax(a.astype(np.float64), -1), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(metrics.nll(x, tokens), want, rtol=1e-12)
    p, q = (softmax(z.astype(np.float64), -1) for z in (a, b))
    np.testing.assert_allclose(metrics.kl(x, y), rel_entr(p, q).sum(-1), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(metrics.top1(x, y), a.argmax(-1) == b.argmax(-1))


@pytest.mark.parametrize("host", model_hosts())
def test_a_continuation_after_a_cache_is_scored_as_the_whole_text_is(host: str) -> None:
    model = small(host)
    b = backends.of(model)
    ids = np.random.default_rng(0).integers(0, 128, (3, 30))
    whole = metrics.nll(b.logits(model, ids)[:, 19:-1], ids[:, 20:])
    cache = b.install(model, b.capture(model, ids[:, :17]))
    got = metrics.nll(metrics.continuation_logits(model, ids[:, 17:20], ids[:, 20:], cache), ids[:, 20:])
    np.testing.assert_allclose(got, whole, atol=1e-4)


def test_gap_recovered_and_its_interval() -> None:
    assert metrics.gap_recovered(3.0, 3.25, 4.0) == 0.75
    with pytest.raises(BadInput, match="no gap to recover"):
        metrics.gap_recovered(3.0, 3.0, 2.9)
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(100):  # a 95 % interval of a mean holds the true mean in about 95 of 100 samples
        low, high = metrics.paired_bootstrap(lambda c: float(np.mean(c)), rng.standard_normal(60), n=400, seed=seed)
        hits += low <= 0 <= high
    assert 88 <= hits <= 99
    case = rng.standard_normal(40)  # what varies between cases, not between methods, cancels
    low, high = metrics.paired_bootstrap(lambda a, b: float(np.mean(a - b)), 100 * case + 1, 100 * case)
    assert low == pytest.approx(1)
    assert high == pytest.approx(1)
    with pytest.raises(BadInput, match="one length"):
        metrics.paired_bootstrap(lambda a, b: 0.0, [1, 2], [1])
