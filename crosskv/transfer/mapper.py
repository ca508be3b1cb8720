"""The seed page imports these two from here; they live in crosskv.mapper and crosskv.layout."""

from crosskv.layout import ModelKVSpec
from crosskv.mapper import MapperConfig

__all__ = ["MapperConfig", "ModelKVSpec"]
