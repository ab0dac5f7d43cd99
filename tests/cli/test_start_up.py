"""What answers at once: help, version, the list of models and a command that does not exist need no torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module

import pytest
from typer.main import get_command

import howsmooth as hs
from howsmooth.cli import app
from howsmooth.cli.program import LazyCommand, leave_busy_cores

ANSWER = """
import sys
from howsmooth.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in ("torch", "numpy", "scipy", "matplotlib", "transformers") if name in sys.modules]
    print("heavy:", heavy)
"""


def answered(*args: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ANSWER, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--help",), 0, "worst-case"),
        (("-h",), 0, "Exit codes"),
        (("--version",), 0, f"howsmooth {hs.__version__}"),
        (("models",), 0, "MiniLM"),
        (("models", "--json"), 0, '"architectures"'),
        (("mesure",), 2, "measure"),
        (("--nothing",), 2, "--nothing"),
        (("models", "--nothing"), 2, "--nothing"),
    ],
)
def test_nothing_heavy_is_imported_for_an_answer_at_once(args: tuple[str, ...], code: int, said: str) -> None:
    done = answered(*args)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_summary_is_the_beginning_of_the_help_of_its_command() -> None:
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        assert isinstance(command, LazyCommand)
        first, _, _ = inspect.cleandoc(command.command.help).partition("\n\n")
        assert " ".join(first.split()) == command.help
        assert command.params is command.command.params


def test_every_public_name_is_there_and_listed() -> None:
    for package in (hs, import_module("howsmooth.models")):
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert name in dir(package)
        with pytest.raises(AttributeError, match="attribute nothing"):
            package.nothing  # noqa: B018
    assert hs.models is sys.modules["howsmooth.models"]


@pytest.mark.slow
def test_the_package_needs_no_module_that_windows_lacks() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in ('fcntl', 'grp', 'posix_ipc', 'pty', 'pwd', 'resource', 'syslog', 'termios', 'tty'):\n"
        "    sys.modules[name] = None\n"
        "import howsmooth as hs\n"
        "for module in pkgutil.walk_packages(hs.__path__, 'howsmooth.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "assert callable(hs.scan) and importlib.import_module('howsmooth.scans.cost').peak_bytes() == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("load", "threads"), [(0.2, None), (1.0, 7), (5.4, 3), (40.0, 1)])
def test_torch_takes_the_cores_that_are_free(monkeypatch: pytest.MonkeyPatch, load: float, threads: int | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    for said in (None, "5"):
        environment = {} if said is None else {"OMP_NUM_THREADS": said}
        monkeypatch.setattr(os, "environ", environment)
        leave_busy_cores()
        assert environment.get("OMP_NUM_THREADS") == (said or (None if threads is None else str(threads)))


@pytest.mark.slow
def test_completion_knows_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        asked = {"_HOWSMOOTH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return answered(environment=os.environ | asked).stdout.split("\n")

    assert completed("howsmooth sc")[0] == "scan"
    assert "--device" in completed("howsmooth compare --d")
