"""What all tests share: fixed seeds, one thread per worker, the same surroundings, and the folder of large files."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

# Property tests draw the same examples in every run; a slow shared machine is no failure (pytest-timeout guards hangs).
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


TERMINAL = ("SIGINT", "SIGQUIT", "SIGHUP")
"""The signals of a terminal, which nohup and the background of a script leave ignored."""
SCREEN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "CI", "TERM")
"""Variables by which a terminal, or a machine without one, changes how text is printed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="Run the tests in a random order, drawn from a seed.")


def pytest_configure() -> None:
    for name in SCREEN:
        os.environ.pop(name, None)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        # Every worker begins as under nohup, in the background: a test that needs a signal asks for `usual_signals`,
        # and one that forgot to fails on every machine, not on some.
        for number in _numbers(TERMINAL):
            signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Signals as a terminal gives them, here and in processes begun here, whatever this process has inherited."""
    usual = dict.fromkeys(_numbers((*TERMINAL, "SIGTERM")), signal.SIG_DFL)
    usual[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, usual) if hasattr(signal, "pthread_sigmask") else None
    yield
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


def _numbers(names: tuple[str, ...]) -> list[signal.Signals]:
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]  # Windows has few


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser; without one the test skips and says what to install."""
    from tests.reports.browsing import chromium

    with chromium() as running:
        yield running


_CASES_WHEN_QUICK = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with many parameters the first, middle and last case are quick, the others slow."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for some in cases.values():
        last = len(some) - 1
        kept = {round(last * part / (_CASES_WHEN_QUICK - 1)) for part in range(_CASES_WHEN_QUICK)}
        for number, item in enumerate(some):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    if config.getoption("--shuffle") is not None:
        random.Random(config.getoption("--shuffle")).shuffle(items)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from seed 0, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of large weights and texts: HOWSMOOTH_SHARED, or `shared` beside the checkout; skips without it."""
    folder = Path(os.environ.get("HOWSMOOTH_SHARED") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the folder {folder}, which is missing: set HOWSMOOTH_SHARED to where it is")
    return folder
