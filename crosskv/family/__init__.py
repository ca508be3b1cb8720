"""The shipped models S, M and L: small, trained, and enough to show transfer and compression without a download.

They are ordinary Hugging Face directories (Qwen3ForCausalLM) that transformers and mlx-lm open unchanged, with one
tokenizer and one KV shape (4 KV heads x 64), different depth, width, query heads and RoPE. Their cards say how they
were trained and what they reach. `smollm2()` and `smollm2_sibling()` fetch a real public pair.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from crosskv import backends
from crosskv.errors import BadArtifact, BadInput
from crosskv.family.smollm2 import smollm2, smollm2_sibling

__all__ = ["NAMES", "card", "load", "path", "smollm2", "smollm2_sibling", "text"]

NAMES = ("S", "M", "L")
HERE = Path(__file__).parent


def path(name: str) -> Path:
    """The directory of a shipped model. Raises BadInput for another name than S, M, L."""
    if name not in NAMES:
        raise BadInput(f"the family has the models {', '.join(NAMES)}; got {name!r}")
    return HERE / name


def card(name: str) -> dict[str, Any]:
    """The measured facts of a shipped model: training, held-out NLL, task accuracies, SHA-256 of its files."""
    return json.loads((path(name) / "card.json").read_text())


def text(name: Literal["calibration", "heldout"]) -> str:
    """Public-domain prose: `calibration` was in the training text, `heldout` comes from books that were left out."""
    file = HERE / "text" / f"{name}.txt"
    if not file.is_file():
        raise BadInput(f"the shipped texts are 'calibration' and 'heldout'; got {name!r}")
    return file.read_text(encoding="utf-8")


def check(name: str) -> None:
    """Compare a shipped model's files with the SHA-256s in its card. Raises BadArtifact at the first difference."""
    for file, want in card(name)["sha256"].items():
        try:
            got = hashlib.sha256((path(name) / file).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise BadArtifact(f"family model {name}: {file} is missing; reinstall crosskv") from None
        if got != want:
            raise BadArtifact(f"family model {name}: {file} has SHA-256 {got}, expected {want}; reinstall crosskv")


def load(name: str, backend: str = "torch") -> tuple[Any, Any]:
    """(model, tokenizer) of a shipped model in float32, its files' SHA-256 checked first.

    With "torch" a transformers model on the CPU in eval mode and its tokenizer; with "mlx" what `mlx_lm.load` gives.
    Raises BadInput (unknown name or backend), BadArtifact (a file differs), MissingExtra (host not installed).
    """
    host = backends.host(backend)
    check(name)
    return host.open_model(str(path(name)))
