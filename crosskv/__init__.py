"""crosskv: reuse a language model's KV cache in another model, and shrink caches across layers.

Everything is imported when first used: importing crosskv imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosskv.calibrated import Calibrated, calibrate
    from crosskv.compress import IntConfig, KVCacheBuilder, KVCacheConfig, XKVConfig, make_cache
    from crosskv.live import Handoff, fit, handoff
    from crosskv.mapper import Mapper, MapperConfig
    from crosskv.parking import park, resume
    from crosskv.planner import plan
    from crosskv.polishing import polish
    from crosskv.search import fit_auto
    from crosskv.transfer import load_mapper as load

__version__ = "0.1.0"

__all__ = [
    "Calibrated", "Handoff", "IntConfig", "KVCacheBuilder", "KVCacheConfig", "Mapper", "MapperConfig", "XKVConfig",
    "__version__", "calibrate", "fit", "fit_auto", "handoff", "load", "make_cache", "park", "plan", "polish", "resume",
]  # fmt: skip

_WHERE = {
    "Calibrated": ("calibrated", "Calibrated"),
    "KVCacheBuilder": ("compress", "KVCacheBuilder"),
    "KVCacheConfig": ("compress", "KVCacheConfig"),
    "XKVConfig": ("compress", "XKVConfig"),
    "Handoff": ("live", "Handoff"),
    "IntConfig": ("compress", "IntConfig"),
    "Mapper": ("mapper", "Mapper"),
    "MapperConfig": ("mapper", "MapperConfig"),
    "calibrate": ("calibrated", "calibrate"),
    "fit": ("live", "fit"),
    "fit_auto": ("search", "fit_auto"),
    "handoff": ("live", "handoff"),
    "load": ("transfer", "load_mapper"),
    "make_cache": ("compress", "make_cache"),
    "park": ("parking", "park"),
    "plan": ("planner", "plan"),
    "polish": ("polishing", "polish"),
    "resume": ("parking", "resume"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'crosskv' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    value = getattr(importlib.import_module(f"crosskv.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
