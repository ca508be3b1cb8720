"""crosskv: reuse a language model's KV cache in another model, and shrink caches across layers."""

__version__ = "0.1.0"
