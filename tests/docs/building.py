"""The documentation site, built from a copy of its sources; examples of the gallery are shown but not executed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = shutil.ignore_patterns("gallery", "*.rst", "__pycache__")


def build(folder: Path) -> Path:
    """The folder of the built site; warnings are errors. Skips where the tools of the docs extra are missing."""
    for tool in ("furo", "latex2mathml", "myst_parser", "sphinx", "sphinx_gallery"):
        pytest.importorskip(tool, reason='needs the tools of the site: pip install -c constraints.txt -e ".[docs]"')
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=MADE)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "benchmarks").mkdir()
    for name in ("CHANGELOG.md", "pyproject.toml", "benchmarks/results.md"):
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-D", "plot_gallery=0", "docs", "site"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "site"
