"""Files that are whole or absent: safetensors written to a temporary place and renamed, read one tensor at a time.

The format is eight bytes of header length, a JSON header, and the raw tensors; reading it here keeps loading lazy,
free of any framework, and open to bfloat16 (uint16 bits in NumPy). No pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosskv.errors import BadArtifact, BadInput

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}
_DTYPES = {v: np.dtype(k) for k, v in _NAMES.items()}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. uint16 arrays are written as bfloat16."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, a in tensors.items():
        header[name] = {"dtype": _NAMES[a.dtype.name], "shape": a.shape, "data_offsets": [offset, offset + a.nbytes]}
        offset += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            f.write(np.ascontiguousarray(a).data)
        f.flush()
        os.fsync(f.fileno())


class Tensors:
    """A safetensors file, read tensor by tensor. Raises BadArtifact when it is missing, truncated or another kind."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                end = path.stat().st_size
                if not 0 < size <= end - 8:
                    raise ValueError("header length")
                self._header = json.loads(f.read(size))
            self.metadata: dict[str, str] = self._header.pop("__metadata__", None) or {}
            self._start = 8 + size
            stops = [e["data_offsets"][1] for e in self._header.values()]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadArtifact(f"{path} is not a readable safetensors file ({e}). Copy or make it again.") from e
        if self._start + max(stops, default=0) != end:
            raise BadArtifact(
                f"{path} has {end} bytes, its header says {self._start + max(stops, default=0)}: truncated."
            )

    def names(self) -> list[str]:
        return list(self._header)

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            entry = self._header[name]
            dtype, (a, b) = _DTYPES[entry["dtype"]], entry["data_offsets"]
            raw = np.fromfile(self.path, dtype, (b - a) // dtype.itemsize, offset=self._start + a)
            return raw.reshape(entry["shape"])
        except (KeyError, OSError, ValueError) as e:
            raise BadArtifact(f"{self.path} has no readable tensor {name!r} ({e}).") from e


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def write_directory(path: Path, marker: str, write: Callable[[Path], None]) -> None:
    """Make directory `path` with what `write(directory)` puts there: in a temporary place beside it, then renamed.

    An existing directory is replaced only if it is empty or has `marker` in it, that is, if crosskv wrote it.
    """
    if path.exists() and not (path.is_dir() and ((path / marker).exists() or not any(path.iterdir()))):
        raise BadInput(f"{path} exists and was not written by crosskv (no {marker} in it). Choose another directory.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        old = None
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent)) / "old"
            path.rename(old)
        temporary.rename(path)
        if old is not None:
            shutil.rmtree(old.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
