"""Result rows: one JSON object a line, each saying what was measured, on what, from which commit, by which command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from crosskv.errors import BadInput

PACKAGES = ("crosskv", "numpy", "scipy", "torch", "transformers", "mlx", "mlx-lm")


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What this runs on: processor, cores, system, Python, package versions, commit of the checkout (if it is one)."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    git = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return {
        "machine": f"{_processor()}, {cores} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
        "commit": git.stdout.strip() if git.returncode == 0 else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def row(
    claim: str,
    setting: dict[str, Any],
    metric: str,
    value: float,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    baseline: dict[str, Any] | None = None,
    n: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """One measured figure. low, high: an interval or the 20th and 80th percentile; baseline: {"name", "value"}."""
    out: dict[str, Any] = {"claim": claim, "setting": setting, "metric": metric, "value": value, "unit": unit}
    out |= {"low": low, "high": high, "n": n, "seed": seed}
    if baseline is not None:
        out["baseline"] = baseline
        out["ratio"] = baseline["value"] / value if value else None
    return out | stamp()


def stamp() -> dict[str, Any]:
    """Where, when, with what and by which command: the end of every row."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return machine() | {"date": now, "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All rows to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text("".join(json.dumps(r) + "\n" for r in rows))
    temporary.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or of every .jsonl file of a directory."""
    files: Sequence[Path] = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise BadInput(f"{path} holds no result rows (.jsonl); run `crosskv demo` or a script in benchmarks/ first")
    return [_parsed(line, f, i) for f in files for i, line in enumerate(_lines(f), 1) if line.strip()]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"{file} cannot be read as UTF-8 text: {e}") from e


def _parsed(line: str, file: Path, number: int) -> dict[str, Any]:
    """The row of a line, or which line of which file is none and why."""
    try:
        found = json.loads(line)
    except ValueError as e:
        raise BadInput(f"{file}, line {number}: not a JSON object ({e})") from e
    if not isinstance(found, dict):
        raise BadInput(f"{file}, line {number}: not a JSON object but {line[:40]!r}")
    needed = {"claim", "setting"} if found.get("claim") == "case" else {"claim", "setting", "metric", "value"}
    if not needed <= set(found) or not isinstance(found["setting"], dict):
        raise BadInput(f"{file}, line {number}: a row needs {', '.join(sorted(needed))}; this one has {sorted(found)}")
    return found
