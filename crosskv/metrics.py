"""What a mapped cache is worth: likelihoods, drift, agreement, and how much of the gap to the target's own cache is
closed.

Logits come from any backend and are taken in float64 on the host. Likelihoods are in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from crosskv import backends
from crosskv.errors import BadInput


def continuation_logits(model: Any, held_back: Any, continuation: Any, cache: Any, mask: Any = None) -> Any:
    """Logits [B, C, vocab] for the tokens of `continuation` [B, C], after `cache` and the held-back tokens [B, M].

    The cache grows by M + C - 1 tokens; use a fresh one for each measurement. mask [B, cached + M + C - 1]: left
    padding.
    """
    b = backends.of(model)
    held, cont = (
        np.asarray(backends.of(x).to_numpy(x)) if hasattr(x, "shape") else np.asarray(x)
        for x in (held_back, continuation)
    )
    tokens = np.concatenate([held, cont[:, :-1]], 1)
    return b.logits(model, tokens, cache, mask)[:, held.shape[1] - 1 :]


def log_probs(logits: Shaped[Any, "*B V"]) -> Float[np.ndarray, "*B V"]:
    """log softmax in float64."""
    x = np.asarray(backends.of(logits).to_numpy(logits), dtype=np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def nll(logits: Shaped[Any, "B T V"], tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """-log p(token), each token under the logits at its own place."""
    return -np.take_along_axis(log_probs(logits), np.asarray(tokens)[..., None], -1)[..., 0]


def kl(want: Shaped[Any, "B T V"], got: Shaped[Any, "B T V"]) -> Float[np.ndarray, "B T"]:
    """KL(want || got) per token: the drift of `got` from the target's own distribution."""
    p, q = log_probs(want), log_probs(got)
    return (np.exp(p) * (p - q)).sum(-1)


def top1(want: Shaped[Any, "B T V"], got: Shaped[Any, "B T V"]) -> Any:
    """Whether both choose the same token, [B, T]."""
    a, b = (np.asarray(backends.of(x).to_numpy(x)).argmax(-1) for x in (want, got))
    return a == b


def gap_recovered(own: Any, mapped: Any, none: Any) -> float:
    """(none - mapped) / (none - own), of mean NLLs in the target: 1 is its own cache, 0 is no context at all."""
    own, mapped, none = (float(np.mean(x)) for x in (own, mapped, none))
    if not none > own:
        raise BadInput(
            f"The context does not help the target (NLL {none:.4f} without, {own:.4f} with): no gap to recover."
        )
    return (none - mapped) / (none - own)


def paired_bootstrap(
    statistic: Callable[..., float], *columns: Any, n: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Interval of `statistic(*columns)` when whole cases (first axis, the same in all columns) are drawn with
    replacement.
    """
    data = [np.asarray(c) for c in columns]
    cases = len(data[0])
    if any(len(c) != cases for c in data) or cases < 2:
        raise BadInput(f"Expected columns of one length, at least 2 cases; got {[len(c) for c in data]}.")
    rng = np.random.default_rng(seed)
    draws = (rng.integers(0, cases, cases) for _ in range(n))
    values = [statistic(*(c[d] for c in data)) for d in draws]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
