"""From a budget of bytes to a config: what each method would take at this length, and which to use.

plans = crosskv.plan(model, ratio=8, context=32_768, basis=basis)
cache = crosskv.make_cache(model, plans[0].config)            the one proposed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosskv.calibrated import Calibrated
from crosskv.compress import XKVConfig, int_bytes
from crosskv.errors import BadInput
from crosskv.layout import ModelKVSpec
from crosskv.live import measured
from crosskv.store import IntConfig

INTS = ((8, 8), (4, 4), (3, 3), (2, 2))
PLAIN = 3
"""Plain integers of this many bits and more lose nothing that was measured (docs/log.md), and need no basis."""


@dataclass(frozen=True)
class Plan:
    """One way to hold `context` tokens of one sequence.

    bytes: held for them in all, sinks and tail included; ratio: 2 bytes per entry over that. static: bytes held once
    for all sequences (a calibrated basis). breakeven: cached tokens, over all sequences, from which it takes less than
    plain 3-bit integers, None if it never does or needs nothing static. kl: to expect, nats per token (None: unknown
    before it is measured). why: in words.
    """

    config: IntConfig | XKVConfig
    bytes: int
    ratio: float
    static: int
    breakeven: int | None
    kl: float | None
    why: str


def plan(
    model: Any,
    ratio: float | None = None,
    context: int = 4096,
    basis: Calibrated | None = None,
    bytes_per_token: float | None = None,
    sinks: int = 4,
    tail: int = 16,
    block: int = 32,
) -> list[Plan]:
    """The ways to reach `ratio` (or `bytes_per_token`) for `context` tokens, the one to use first.

    model: a live one, or its ModelKVSpec. basis: a calibrated one, if there is one. Sizes are for a model in half
    precision, sinks and a full tail included. Raises BadInput when no method reaches the budget at this length, with
    the best that can be reached.
    """
    spec = model if isinstance(model, ModelKVSpec) else measured(model)
    if basis is not None:
        basis.check_model(spec)
    full = 2 * 2 * spec.n_layers * spec.width
    if (ratio is None) == (bytes_per_token is None):
        raise BadInput("Give either ratio or bytes_per_token.")
    want = float(ratio) if ratio is not None else full / float(bytes_per_token)  # type: ignore[arg-type]
    if not want > 1:
        raise BadInput(f"The budget is not below the uncompressed {full} bytes per token: nothing to do.")
    if context < 1:
        raise BadInput(f"context must be at least 1 token, got {context}.")
    reach: list[Plan] = []
    best = 1.0
    for keys, values in INTS:
        config = IntConfig(keys, values, sinks=sinks, tail=64)
        held = int_bytes(spec, config, context)
        best = max(best, full * context / held)
        if full * context / held >= want:
            why = f"plain {keys}-bit integers: no basis, nothing static"
            reach.append(Plan(config, held, full * context / held, 0, None, None, why))
            break  # fewer bits than needed would only lose more
    exact = min(context, sinks + tail + block - 1)
    middle = context - exact
    inner = inner_ratio(want, context, exact)
    if basis is not None and inner:
        found = _calibrated(basis, spec, inner, context, exact, (sinks, tail, block))
        if found is not None:
            reach.append(found)
            best = max(best, found.ratio)
    if basis is None and inner and middle >= max(256, 5.2 * spec.width * inner):  # else its basis alone is too large
        tokens = XKVConfig("tokens", ratio=inner, sinks=sinks, tail=tail, block=block)
        why = "a basis of its own for every prompt: nothing static; calibrate a basis for better quality"
        reach.append(Plan(tokens, int(full * context / want), want, 0, None, None, why))
    if not reach:
        limit = ""
        if not inner:
            most = context / exact
            limit = (
                f" {exact} exact tokens (sinks, tail and a block) alone allow at most {most:.1f}x; lower tail or block."
            )
        hint = "" if basis is not None else " A calibrated basis (crosskv calibrate) reaches further."
        raise BadInput(
            f"No method reaches {want:.1f}x at {context} tokens; the best found is {best:.1f}x.{limit}{hint}"
        )
    return sorted(reach, key=_rank)


def inner_ratio(ratio: float, context: int, exact: int) -> float | None:
    """The ratio that the other tokens need so that all have `ratio` while `exact` ones stay as they are; None when
    nothing is left for them.
    """
    left = context / ratio - exact
    return max(1.0001, (context - exact) / left) if left > 0 and context > exact else None


def _rank(p: Plan) -> int:
    """Integers of PLAIN bits and more, then a calibrated basis, then integers of 2 bits, then a basis per prompt."""
    if isinstance(p.config, IntConfig):
        return 0 if p.config.bits_keys >= PLAIN else 2
    return 1 if isinstance(p.config.basis, Calibrated) else 3


def _calibrated(
    basis: Calibrated, spec: ModelKVSpec, inner: float, context: int, exact: int, sizes: tuple[int, int, int]
) -> Plan | None:
    full = 2 * 2 * spec.n_layers * spec.width
    bits = basis.bits(8 * full / inner)
    if not any(b.any() for pair in bits for b in pair):
        return None
    packed = basis.packed_bytes(bits)
    held = full * exact + packed * (context - exact)
    static = basis.static_bytes(bits)
    plain = int_bytes(spec, IntConfig(3, 3), 1 << 20) / (1 << 20)
    breakeven = round(static / (plain - held / context)) if plain > held / context else None
    config = XKVConfig(basis, ratio=inner, sinks=sizes[0], tail=sizes[1], block=sizes[2])
    groups = max(map(len, basis.groups))
    use = "for caches that every step reads" if groups <= 4 else "for parked caches: slow to decode from"
    why = f"calibrated basis, {groups} layers a group: {use}"
    return Plan(config, held, full * context / held, static, breakeven, basis.error(bits), why)
