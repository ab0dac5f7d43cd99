"""Tests answer alike on every machine: under any signals, with any fonts, however slow it is to draw."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import distributions, metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import REPOSITORY, SCREEN, TERMINAL
from tests.reports.browsing import visit

HOME = "tests/reports/browsing.py"
CONSTRAINTS = REPOSITORY / "constraints.txt"
WIDTHS = """() => ["serif", "sans-serif", "system-ui", "monospace"].map((family) => ["i", "W"].map((letter) => {
  const word = document.body.appendChild(document.createElement("span"));
  word.style.font = `16px ${family}`; word.textContent = letter.repeat(20);
  return word.getBoundingClientRect().width; }))"""


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="a pytest without workers keeps its Ctrl-C")
def test_a_worker_ignores_what_nohup_and_the_background_ignore() -> None:
    assert {signal.getsignal(signal.Signals[name]) for name in TERMINAL} == {signal.SIG_IGN}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_test_that_asks_for_signals_gets_them_where_they_are_ignored_and_blocked(tmp_path: Path) -> None:
    test = f"""
import pytest, signal, subprocess, sys
from tests.conftest import usual_signals
ALL = [signal.Signals[name] for name in {(*TERMINAL, "SIGTERM")}]
@pytest.mark.parametrize("number", ALL)
def test_a_child_is_stopped(usual_signals, number):
    wait = "print(flush=True); import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.readline()
        child.send_signal(number)
        assert child.wait(100) == -number
def test_the_others_find_what_was_inherited():
    assert {{signal.getsignal(number) for number in ALL}} == {{signal.SIG_IGN}}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(ALL)
"""
    (tmp_path / "test_child.py").write_text(test, encoding="utf-8")

    def as_nohup_and_worse() -> None:
        numbers = [signal.Signals[name] for name in (*TERMINAL, "SIGTERM")]
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        preexec_fn=as_nohup_and_worse,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count("5 passed")) == (0, 1), done.stdout


def test_no_variable_of_a_terminal_reaches_a_test() -> None:
    assert not set(SCREEN) & set(os.environ)


def test_one_module_alone_starts_a_browser() -> None:
    starts = re.compile(r"sync_playwright|async_playwright|playwright\.\w+_api|selenium|[Ww]ebdriver|--headless")
    sources = [
        path for folder in ("tests", "evidence", "benchmarks", "docs") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    found = {path.relative_to(REPOSITORY).as_posix() for path in sources if starts.search(path.read_text("utf-8"))}
    assert found == {HOME, Path(__file__).relative_to(REPOSITORY).as_posix()}


@pytest.mark.slow
def test_a_browser_moves_nothing_and_has_one_font(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>letters</title><body>", encoding="utf-8")
    with visit(browser, page) as seen:
        assert seen.page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")
        if sys.platform == "linux":  # elsewhere browsers do not ask fontconfig
            assert len({width for family in seen.page.evaluate(WIDTHS) for width in family}) == 1


def test_every_pinned_package_installs_on_the_first_python_3_11() -> None:
    pinned = [Requirement(line) for line in CONSTRAINTS.read_text("utf-8").splitlines() if line and line[0] != "#"]
    asked = {name: metadata(name).get("Requires-Python") for name in {each.name for each in pinned} & installed()}
    assert len(asked) > 50
    assert {name: wish for name, wish in asked.items() if wish and not SpecifierSet(wish).contains("3.11.0")} == {}


def installed() -> set[str]:
    return {each.metadata["Name"].lower() for each in distributions()}
