"""What a packed cache costs and saves: likelihood, drift, bytes really held and time, against the host's own cache."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from crosskv import backends, metrics
from crosskv.compress import IntConfig, XKVConfig, make_cache, nbytes
from crosskv.errors import BadInput
from crosskv.evals.run import Encode
from crosskv.evals.tasks import Case

Config = IntConfig | XKVConfig


@dataclass(frozen=True)
class Cost:
    """nll, kl (against the own cache), agree [n, C] of the continuation; bytes held for the prompt, per sequence."""

    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    bytes: float


def described(config: Any) -> str:
    """The options that differ from the default, in words."""
    plain = type(config)()
    chosen = {f.name: getattr(config, f.name) for f in fields(config)}
    words = [
        f"{k}=calibrated" if k == "basis" and not isinstance(v, str) else f"{k}={v:g}" if isinstance(v, float)
        else f"{k}={v}"
        for k, v in chosen.items()
        if v is not getattr(plain, k)
    ]  # fmt: skip
    return f"{type(config).__name__}({', '.join(words)})"


class Peak:
    """How far memory rose above where it stood, in bytes: the device's, else the process's (Linux), else None.

    with Peak(model) as peak: ...;  peak.bytes
    """

    def __init__(self, model: Any):
        self.backend = backends.of(model)
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.backend.memory(reset=True)
        return self

    def __exit__(self, *_: Any) -> None:
        after = self.backend.memory()
        self.bytes = None if self.before is None or after is None else max(0, after - self.before)


def own_cache(model: Any, tokens: Any) -> Any:
    """The host's own cache of `tokens` [B, T]."""
    b = backends.of(model)
    return b.install(model, b.capture(model, tokens))


def score(model: Any, passages: np.ndarray, prefix: int, configs: dict[str, Config], batch: int = 4) -> dict:
    """{arm: Cost} for the arms "own" and every config: passages [n, prefix + C], the first `prefix` tokens cached (the
    last of them is read on top of the packed cache), the rest scored in one step.
    """
    b = backends.of(model)
    found: dict[str, list[tuple[Any, ...]]] = {arm: [] for arm in ("own", *configs)}
    for i in range(0, len(passages), batch):
        ids = passages[i : i + batch]
        first, last, rest = ids[:, : prefix - 1], ids[:, prefix - 1 : prefix], ids[:, prefix:]
        layers, reference = b.capture(model, first), None
        for arm in found:
            cache = b.install(model, layers)
            cache = cache if arm == "own" else make_cache(model, configs[arm], cache)
            size = nbytes(model, cache)
            logits = metrics.continuation_logits(model, last, rest, cache)
            reference = logits if reference is None else reference
            found[arm].append(
                (metrics.nll(logits, rest), metrics.kl(reference, logits), metrics.top1(reference, logits), size)
            )
    out = {}
    for arm, parts in found.items():
        nll, kl, agree = (np.concatenate([p[j] for p in parts]) for j in range(3))
        out[arm] = Cost(nll, kl, agree, sum(p[3] for p in parts) / len(passages))
    return out


def answers(model: Any, encode: Encode, case: Case, configs: dict[str, Config | None]) -> dict[str, bool]:
    """For every config (None: the host's own cache), whether the model answers greedily with the document in its cache,
    compressed, and the question read on top of it.
    """
    b = backends.of(model)
    context, prompt = (encode(text) for text in (case.context, case.prompt))
    full = encode(case.prompt + case.answer)
    n = next((i for i, (x, y) in enumerate(zip(context, full, strict=False)) if x != y), len(context))
    layers, at, out = b.capture(model, [full[:n]]), len(prompt) - n, {}
    for arm, config in configs.items():
        cache = b.install(model, layers)
        cache = cache if config is None else make_cache(model, config, cache)
        best = b.to_numpy(b.logits(model, [full[n:]], cache))[0].argmax(-1)
        out[arm] = bool((best[at - 1 : -1] == np.asarray(full[len(prompt) :])).all())
    return out


def decode(model: Any, tokenizer: Any, ids: list[int], cache: Any, limit: int) -> tuple[list[int], float]:
    """Tokens that the host generates after `ids`, of which `cache` holds all but the last; seconds per token."""
    b = backends.of(model)
    b.generate(model, tokenizer, ids[:8], 1)  # what is compiled or loaded on first use
    started = time.perf_counter()
    new = b.generate(model, tokenizer, ids, limit, cache)
    return new, (time.perf_counter() - started) / max(1, len(new))


def compare(
    model: Any, tokenizer: Any, ids: list[int], config: Config, max_tokens: int = 64, scored: int = 64
) -> dict[str, Any]:
    """The packed cache beside the host's own on one prompt: text, bytes held at the end, NLL of the prompt's last
    tokens given the others, time per token.
    """
    if not 0 < scored < len(ids) - 1 or max_tokens < 1:
        raise BadInput(
            f"Expected 1 to {len(ids) - 2} scored tokens of a prompt of {len(ids)}, and at least 1 new one; "
            f"got {scored} and {max_tokens}."
        )
    costs = score(model, np.asarray([ids]), len(ids) - scored, {"packed": config})
    out: dict[str, Any] = {"method": described(config), "prompt_tokens": len(ids), "scored": scored}
    for arm in ("own", "packed"):
        with Peak(model) as peak:
            cache = own_cache(model, np.asarray([ids[:1]])) if arm == "own" else make_cache(model, config)
            b = backends.of(model)
            b.logits(model, [ids[1:-1] if arm == "own" else ids[:-1]], cache)
            new, seconds = decode(model, tokenizer, ids, cache, max_tokens)
        out["cached_tokens"] = len(ids) + len(new) - 1
        out[arm] = {
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "new_tokens": len(new),
            "bytes": nbytes(model, cache),
            "nll": float(costs[arm].nll.mean()),
            "seconds_per_token": seconds,
            "peak": peak.bytes,
        }
    out["dtype"] = backends.of(model).describe(model)["dtype"]
    out["ratio"] = out["own"]["bytes"] / out["packed"]["bytes"]
    out["nll_increase"] = out["packed"]["nll"] - out["own"]["nll"]
    return out
