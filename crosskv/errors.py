"""The errors that crosskv raises. Each message says what was expected, what came, and what to do next."""


class CrosskvError(Exception):
    """The parent of every error that crosskv raises on purpose."""


class BadInput(CrosskvError, ValueError):  # noqa: N818  (reads as a sentence where it is raised)
    """An argument has the wrong shape, dtype, range or content."""


class IncompatibleModels(CrosskvError):  # noqa: N818
    """Two models, or a model and an artifact, do not belong together."""


class MatchedKVError(IncompatibleModels):
    """A model pair is outside what can be mapped exactly (KV shape, RoPE or cache kind); names the field."""


class BadArtifact(CrosskvError):  # noqa: N818
    """A file on disk is missing, truncated, edited, or written by a newer format version."""


class MissingExtra(CrosskvError, ImportError):  # noqa: N818
    """An optional dependency is not installed; says which `pip install` brings it."""
