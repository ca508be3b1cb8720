"""The house's two import rules: one direction only, and frameworks only behind the seam."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "crosskv"
EXEMPT = {"family/smollm2.py"}  # turns model files into model files with transformers and peft; handles no cache
FRAMEWORKS = {"torch", "transformers", "mlx", "mlx_lm", "triton", "jax", "peft"}
# Lower layers first; a module may import modules of its own layer or of a lower one.
LAYERS = [
    {"errors"},
    {"kernels"},
    {"backends"},
    {"files", "layout", "moments", "ridge", "rope", "subspace", "quant"},
    {"select", "mapper", "transfer", "store", "metrics"},
    {"live", "latent"},
    {"calibrated", "judging"},
    {"polishing", "search"},
    {"compress", "planner", "parking"},
    {"family", "evals"},
    {"cli"},
]
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{a.name}" for a in node.names} | {str(node.module)}
    return names


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def wrong_frameworks(file: Path) -> set[str]:
    if part(file) in ("backends", "kernels") or file.relative_to(PACKAGE).as_posix() in EXEMPT:
        return set()
    return {n for n in imported(file) if n.split(".")[0] in FRAMEWORKS}


def wrong_direction(file: Path) -> set[str]:
    own = part(file)
    if own == "__init__":
        return set()
    parts = {n.split(".")[1] for n in imported(file) if n.startswith("crosskv.")}
    return {p for p in parts if p in LEVEL and LEVEL[p] > LEVEL[own]}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_the_seam_names_a_framework(file):
    assert not wrong_frameworks(file)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_downwards(file):
    assert part(file) == "__init__" or part(file) in LEVEL, f"give {part(file)} a place in LAYERS"
    assert not wrong_direction(file)


def test_backends_do_not_know_each_other():
    for one, other in (("torch", "mlx"), ("mlx", "torch")):
        names = imported(PACKAGE / "backends" / f"{one}.py")
        assert not {n for n in names if n.startswith(f"crosskv.backends.{other}") or n.split(".")[0] == other}


def test_the_rules_catch_what_they_forbid(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "ridge.py").write_text("import torch.nn\nfrom crosskv.live import x\n")
    assert wrong_frameworks(tmp_path / "ridge.py") == {"torch.nn"}
    assert wrong_direction(tmp_path / "ridge.py") == {"live"}


def test_importing_the_package_imports_no_framework():
    code = f"import crosskv, sys; sys.exit(len({FRAMEWORKS!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
