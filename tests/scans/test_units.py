"""The same rows from workers as from this process; what goes wrong in a worker is said in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth.engines.dispatch import WorkerMisconfigured
from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.scans import Scan, run, units
from howsmooth.scans import scan as run_scan
from howsmooth.scans.plan import CellBatch, ScanProgress, ScanSettings
from howsmooth.scans.units import Origin, Unit, measure_unit, split

ASKED: dict[str, Any] = {"lengths": [6, 8], "windows": 2, "what": "head,attention"}
CELLS = 2 * 2 * 2 * (4 + 1)


def rows(found: Scan) -> list[dict[str, Any]]:
    """All but the seconds."""
    return [row | {"seconds": 0} for row in found.rows]


def in_words(batches: tuple[CellBatch, ...]) -> str:
    return " ".join(f"{batch.what}{batch.layer}@{batch.length}.{batch.window}" for batch in batches)


PLAN = [
    CellBatch(what, layer, (0,), 8, window)
    for window in range(2)
    for layer in range(3)
    for what in ("attention", "head")
]


@pytest.mark.parametrize(("workers", "count"), [(1, 4), (2, 6), (100, 6)])
def test_units_hold_every_batch_once_and_keep_windows_and_layers_together(workers: int, count: int) -> None:
    found = split(PLAN, workers)
    assert [batch for unit in found for batch in unit] == PLAN
    assert len(found) == count
    assert all(len({(batch.length, batch.window) for batch in unit}) == 1 for unit in found)
    assert all(len(unit) % 2 == 0 for unit in found)  # the attention of a layer stays with its heads


def test_many_windows_are_not_split() -> None:
    plan = [CellBatch("head", layer, (0,), 8, window) for window in range(12) for layer in range(3)]
    assert [len(unit) for unit in split(plan, 3)] == [3] * 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread of torch, as in a worker: the rows are compared bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def here(folder: Path, text: Path, _one_thread: None) -> Scan:
    """The scan in this process."""
    return run_scan(str(folder), text, **ASKED)


@pytest.mark.slow
def test_any_executor_gives_the_rows_of_this_process(folder: Path, text: Path, here: Scan) -> None:
    told: list[ScanProgress] = []
    with ThreadPoolExecutor(2) as threads:
        there = run_scan(str(folder), text, **ASKED, executor=threads, progress=told.append)
    assert len(here) == CELLS
    assert rows(there) == rows(here)
    assert there.tokens == here.tokens
    assert dict(there.energies) == dict(here.energies)
    assert (told[0].cells, told[-1].cells, told[-1].work) == (0, CELLS, 1.0)


@pytest.mark.slow
def test_two_processes_give_the_rows_of_this_one(folder: Path, text: Path, tmp_path: Path, here: Scan) -> None:
    """Bit by bit, with one thread of torch in each."""
    there = run_scan(str(folder), text, **ASKED, jobs=2, out=tmp_path / "s.sqlite")
    assert rows(there) == rows(here)


@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(folder: Path, text: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "s.sqlite", list[str]()

    class Watching(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            seen.extend(str(unit) for unit in args[1])
            return super().submit(fn, *args, **kwargs)

    run_scan(str(folder), text, **ASKED | {"lengths": 6}, out=out)
    with Watching(1) as threads:
        found = run_scan(str(folder), text, **ASKED, out=out, executor=threads)
    assert len(found) == CELLS
    assert {word.split(",")[0] for word in seen} == {"n = 8"}


@pytest.mark.slow
def test_a_unit_that_fails_is_reported_and_the_rest_is_kept(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.sqlite"

    def fragile(unit: Unit) -> Any:
        if unit.batches[0].length == 8 and unit.batches[0].window == 1:
            raise ArithmeticError("no such luck")
        return measure_unit(unit)

    monkeypatch.setattr(units, "measure_unit", fragile)
    with ThreadPoolExecutor(1) as threads:
        found = run_scan(str(folder), text, **ASKED, out=out, executor=threads, jobs=1)
    assert len(found) == CELLS * 3 // 4
    assert found.failures == ("n = 8, window 1: head, attention of layers 0-1: ArithmeticError: no such luck",)
    assert found.notes[-1].startswith("tried again: n = 8, window 1")
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as threads:
        assert len(run_scan(str(folder), text, **ASKED, out=out, executor=threads)) == CELLS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"software": "howsmooth 0.0.1 with torch 1.0"}, "but the driver howsmooth 0.0.1 with torch 1.0: install the"),
        ({"model": "none/such"}, "cannot open none/such .*: give it the same files"),
        ({"sha256": "0" * 64}, "finds another model under"),
    ],
)
def test_a_worker_without_the_same_model_or_software_is_unfit(
    folder: Path, change: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    opened = open_model(str(folder))
    (window,) = opened.windows("w1 w2 w3 w4 w5 w6 w7", 6)
    origin = replace(Origin.of(opened), **change)
    with pytest.raises(WorkerMisconfigured, match=said):
        measure_unit(Unit(origin, window.ids.numpy(), (CellBatch("head", 0, (0,), 6, 0),), ScanSettings()))


@pytest.mark.parametrize("jobs", [0, -1, 1.5, "2"])
def test_a_number_of_jobs_that_is_none_is_refused(folder: Path, jobs: Any) -> None:
    with pytest.raises(InvalidInput, match="jobs must be"):
        run_scan(str(folder), lengths=6, jobs=jobs)


def test_a_long_scan_ends_with_what_was_predicted_and_what_it_took(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_LONG", 4)
    with ThreadPoolExecutor(1) as threads:
        found = run_scan(str(folder), text, lengths=6, windows=2, executor=threads)
        again = run_scan(str(folder), text, lengths=6, windows=1, executor=threads)
    assert re.fullmatch(r"predicted \S+ \w+, took \S+ \w+ of workers' time \([+-]\d+ %\)", found.notes[-1])
    assert not any("predicted" in note for note in again.notes)
