"""The examples run as a user would run them, one after the other, in an empty folder, and print the same text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_torch_then_mlx(tmp_path):
    said = []
    for name in ("handoff_torch.py", "handoff_mlx.py"):
        done = subprocess.run(
            [sys.executable, EXAMPLES / name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert said[0].startswith("The old man looked at the sea") and said[0].endswith(said[1])


def test_the_five_lines_of_the_readme(capsys):
    """The README's first block, with less calibration text."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    small = 'MapperConfig(k="all", n_calib_sequences=24, calib_seq_len=256, stride=1)'
    assert 'MapperConfig(k="all")' in code
    exec(code.replace('MapperConfig(k="all")', small), {})
    assert "Once upon a time" in capsys.readouterr().out
