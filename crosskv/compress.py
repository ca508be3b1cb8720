"""Caches that hold fewer bytes: one small frozen config per method, and the host's own kind of cache for a model.

    cache = crosskv.make_cache(model, crosskv.IntConfig(bits_keys=4, bits_values=4))
    transformers:  model.generate(ids, cache=cache)               (past_key_values= before 5.24)
    mlx-lm:        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

A method is a config and a kind of `backends.Held`; the hosts' caches know nothing else of it.
"""

from __future__ import annotations

from typing import Any

from crosskv import backends
from crosskv.errors import BadInput
from crosskv.store import IntConfig, Store

__all__ = ["IntConfig", "make_cache", "nbytes"]


def make_cache(model: Any, config: IntConfig | None = None, cache: Any = None) -> Any:
    """A packed cache for a live model of either host, for one prompt or batch: empty, or with the tokens of `cache`.

    transformers: a Cache for generate and forward, with left padding, beams, crop, reorder and deepcopy. Left padding
    counts among the sinks and the first groups. mlx-lm: a list of caches for generate and generate_step, with trim.
    cache: the host's own one of this model (a prefilled one, or crosskv.handoff's), which is not changed.
    Layers with a sliding window keep the host's own cache. `cache.nbytes` (each cache's, in mlx-lm; `compress.nbytes`
    for the sum) is what is held. Raises MatchedKVError for models with recurrent, shared or latent caches.
    """
    config = IntConfig() if config is None else config
    if not isinstance(config, IntConfig):
        raise BadInput(f"Expected an IntConfig, got {type(config).__name__}.")
    b = backends.of(model)
    return b.held_cache(model, lambda _: Store(config), None if cache is None else b.read(model, cache))


def nbytes(model: Any, cache: Any) -> int:
    """Bytes of the arrays that a cache of this model holds now, ours or the host's own."""
    return backends.of(model).cache_bytes(cache)
