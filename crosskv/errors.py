"""The errors that crosskv raises. Each message says what was expected, what came, and what to do next."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


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


def nearest(word: str, known: Iterable[str]) -> str:
    """What was probably meant: "; did you mean ...?", or the list of what there is."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}."


def known_fields(cls: T) -> T:
    """Decorate a dataclass: a keyword that it lacks is BadInput with the nearest field, not a TypeError."""
    plain = cls.__init__  # type: ignore[misc]

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **options: Any) -> None:
        names = [f.name for f in fields(cls) if f.init]
        for name in options:
            if name not in names:
                raise BadInput(f"{cls.__name__} has no field {name!r}{nearest(name, names)}")
        plain(self, *args, **options)

    cls.__init__ = init  # type: ignore[misc]
    return cls
