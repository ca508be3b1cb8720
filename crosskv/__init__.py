"""crosskv: reuse a language model's KV cache in another model, and shrink caches across layers.

Everything is imported when first used: importing crosskv imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosskv.calibrate import Calibrated
    from crosskv.compress import IntConfig, XKVConfig, make_cache
    from crosskv.live import Handoff, fit, handoff
    from crosskv.mapper import Mapper, MapperConfig
    from crosskv.transfer import load_mapper as load

__version__ = "0.1.0"

__all__ = [
    "Calibrated", "Handoff", "IntConfig", "Mapper", "MapperConfig", "XKVConfig", "__version__", "calibrate", "fit",
    "handoff", "load", "make_cache",
]  # fmt: skip

_WHERE = {
    "Calibrated": ("calibrate", "Calibrated"),
    "XKVConfig": ("compress", "XKVConfig"),
    "Handoff": ("live", "Handoff"),
    "IntConfig": ("compress", "IntConfig"),
    "Mapper": ("mapper", "Mapper"),
    "MapperConfig": ("mapper", "MapperConfig"),
    "fit": ("live", "fit"),
    "handoff": ("live", "handoff"),
    "load": ("transfer", "load_mapper"),
    "make_cache": ("compress", "make_cache"),
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
