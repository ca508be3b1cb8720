"""Find the mapper that serves a pair best under a budget, for those who do not want to choose.

The moments are read once; every candidate is solved from them, and judged on held-out sequences by what the target
says (`judging`), never by R2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosskv.errors import BadInput
from crosskv.judging import Judge, split
from crosskv.layout import ModelKVSpec
from crosskv.live import measured, read_moments, sequences
from crosskv.mapper import Mapper, MapperConfig
from crosskv.moments import Moments
from crosskv.transfer import Stats, best_penalty, solve

LATENTS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
WINDOW = 64
"""Tokens of a continuation that is judged, at most a quarter of a sequence."""
BATCH = 4
ITEM = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a weight."""


def fit_auto(
    source: Any,
    target: Any,
    texts: str | Iterable[str] | Iterable[Sequence[int]],
    tokenizer: Any = None,
    config: MapperConfig | None = None,
    *,
    max_bytes: float | None = None,
    max_operations: float | None = None,
    batch_size: int = 8,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Mapper:
    """The mapper with the lowest held-out KL that fits the budget; of those as good to within one standard error of
    the paired difference, the smallest.

    config: how much text is read, the stored dtype and so on; k, penalty, features, exact_layers and latent are what
    is searched (layer 0 of the target is always its own: it costs a projection of the embeddings). max_bytes: of the
    stored weights; max_operations: multiply-adds of a mapped token. Candidates with more features than there are rows
    are left out. `provenance["tried"]` lists the others with their weights, R2 and KL. Raises BadInput when none is
    left, and what crosskv.fit raises.
    """
    base = replace(
        config or MapperConfig(), k="all", ridge_lambda="auto", selection="topk", features="both", exact_layers=1,
        latent=None,
    )  # fmt: skip
    ids = list(islice(sequences(texts, tokenizer, base.calib_seq_len), base.n_calib_sequences))
    stats, about = read_moments(
        source, target, ids, tokenizer, base,
        batch_size=batch_size, checkpoint=checkpoint, resume=resume, progress=progress,
    )  # fmt: skip
    whole = np.array([s for s in ids if len(s) == base.calib_seq_len])
    judge = Judge(source, target, base.calib_seq_len, min(WINDOW, base.calib_seq_len // 4))
    judged = judge.examples(whole[split(len(whole))[0]], BATCH)
    specs = measured(source), measured(target)
    tried: list[tuple[Mapper, np.ndarray]] = []
    rows = stats.train[0].count if stats.train and stats.held else 0
    known = [c for c in _candidates(*specs, base) if _sizes(c, *specs)[0] < rows]
    if not known:
        raise BadInput(f"Too few rows: {rows} to fit on. Give more text, or lower stride.")
    fitting = [c for c in known if _fits(c, *specs, max_bytes, max_operations)]
    penalty: float | None = None  # the same for latents of all sizes
    for options in tqdm(fitting, desc="trying", unit="mapper", disable=not progress):
        if options.latent:
            penalty = penalty or best_penalty(stats.train[0], stats.held[0], specs[1].head_dim)
            options = replace(options, ridge_lambda=penalty)
        mapper = solve(_part(stats, options), *specs, options, about)
        tried.append((mapper, judge.kl(mapper, judged)))
    if not tried:
        least = min(_operations(c, *specs) for c in known)
        raise BadInput(
            f"No mapper fits max_bytes={max_bytes} and max_operations={max_operations}: the smallest tried has "
            f"{least:,} weights. Raise them."
        )
    return _chosen(tried)


def _candidates(source: ModelKVSpec, target: ModelKVSpec, base: MapperConfig) -> Iterator[MapperConfig]:
    """The paper's features and both, from all, half and a quarter of the source layers; and latents of every size that
    is smaller than a full map."""
    ks: list[int | str] = ["all", *sorted({-(-source.n_layers // 2), -(-source.n_layers // 4)} - {source.n_layers})]
    for k in ks:
        yield replace(base, features="own", k=k)
        yield replace(base, k=k)
    full = _operations(base, source, target)
    for r in LATENTS:
        c = replace(base, latent=r)
        if _operations(c, source, target) < full:
            yield c


def _sizes(c: MapperConfig, source: ModelKVSpec, target: ModelKVSpec) -> tuple[int, int]:
    """(features of one regression, outputs of all)."""
    k = source.n_layers if c.k == "all" else int(c.k)
    x = (k * source.width + c.exact_layers * target.width) * (2 if c.features == "both" else 1)
    return x, 2 * (target.n_layers - c.exact_layers) * target.width


def _operations(c: MapperConfig, source: ModelKVSpec, target: ModelKVSpec) -> int:
    """Multiply-adds of a mapped token: the weights that are not biases."""
    x, y = _sizes(c, source, target)
    return c.latent * (x + y) if c.latent else x * y


def _fits(
    c: MapperConfig, source: ModelKVSpec, target: ModelKVSpec, max_bytes: float | None, max_operations: float | None
) -> bool:
    n = _operations(c, source, target)
    size = n * ITEM[c.dtype]
    return (max_bytes is None or size <= max_bytes) and (max_operations is None or n <= max_operations)


def _part(stats: Stats, c: MapperConfig) -> Stats:
    """The moments that these features need, out of those of both."""
    if c.features == "both":
        return stats

    def cut(m: Moments) -> tuple[Moments, ...]:
        (x, y) = (len(m.mean_x) // 2, len(m.mean_y) // 2)
        return tuple(m.sub(slice(i * x, (i + 1) * x), slice(i * y, (i + 1) * y)) for i in (0, 1))

    return Stats(cut(stats.train[0]), cut(stats.held[0]))


def _chosen(tried: Sequence[tuple[Mapper, np.ndarray]]) -> Mapper:
    _, best = min(tried, key=lambda pair: pair[1].mean())

    def as_good(kl: np.ndarray) -> bool:
        d = kl - best
        return bool(d.mean() <= (d.std(ddof=1) / len(d) ** 0.5 if len(d) > 1 else 0))

    chosen, _ = min((pair for pair in tried if as_good(pair[1])), key=lambda pair: pair[0].n_parameters)
    table = [
        {
            "features": m.config.features,
            "k": len(next(iter(m.layers.values())).sources),
            "latent": m.config.latent,
            "weights": m.n_parameters,
            "r2": m.provenance["mean_held_out_r2"],
            "kl": float(kl.mean()),
            "se": float(kl.std(ddof=1) / len(kl) ** 0.5) if len(kl) > 1 else 0.0,
            "chosen": m is chosen,
        }
        for m, kl in tried
    ]
    return chosen.with_provenance({"tried": table})
