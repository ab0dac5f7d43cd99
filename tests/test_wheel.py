"""The built wheel in an environment of its own: the README's first lines run with nothing but the light core."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRA = ("ot", "pandas", "pyarrow", "gguf", "accelerate", "matplotlib", "PIL", "peft", "datasets")


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel in it; torch and the rest of the core are borrowed."""
    pytest.importorskip("hatchling", reason="needs hatchling, which builds the wheel: pip install hatchling")
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place, ROOT)
    (wheel,) = place.glob("howsmooth-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv")
    python = place / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    shared = sysconfig.get_paths()["purelib"]
    (packages / "borrowed.pth").write_text(f"{shared}\nimport sys; sys.modules.update(dict.fromkeys({EXTRA!r}))\n")
    return python


@pytest.mark.slow
def test_the_first_lines_of_the_readme_run_from_the_wheel(clean: Path, tmp_path: Path) -> None:
    lines = re.findall(r"^(?:>>>|\.\.\.) (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)[:4]
    assert lines[0].startswith("import torch, howsmooth as hs")
    script = "\n".join([*lines[:-1], f"print({lines[-1]})", "print(hs.__path__[0])"])
    said = run(clean, "-c", script, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert "‖J‖₂ = 4.523" in said
    assert str(clean.parents[1]) in said


@pytest.mark.slow
def test_the_light_core_scans_and_reports_and_names_what_is_missing(clean: Path, tmp_path: Path) -> None:
    script = """
import howsmooth as hs
scanned = hs.scan("random:gpt2[layers=1,width=16]", "Down the rabbit hole " * 9, lengths=6, bounds="none")
scanned.report("page.html")
for missing in (scanned.to_pandas, lambda: hs.reports.figures):
    try:
        missing()
    except hs.MissingPackage as error:
        print(error)
"""
    said = run(clean, "-c", script, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)})
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert "needs the package pandas, which is not installed: pip install 'howsmooth[frames]'" in said
    assert "needs the package matplotlib, which is not installed: pip install 'howsmooth[figures]'" in said
