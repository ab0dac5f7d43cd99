"""What all tests share: fixed seeds, one thread per worker, and the optional folder of large files."""

from __future__ import annotations

import os
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


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser; without one the test skips and says what to install."""
    from tests.reporting.browsing import chromium

    with chromium() as running:
        yield running


_CASES_WHEN_QUICK = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
