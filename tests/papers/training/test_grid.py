"""A grid runs every cell once, goes on where it was, shares its cells between processes, and adds up."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.papers.training import Corpus, Grid, TrainingSettings, run_grid
from howsmooth.papers.training.grid import TABLE, GridProgress, gap_closed, mean_bits
from howsmooth.papers.training.loop import locked
from howsmooth.papers.training.run_files import LEDGER, TrainingResult

CORPUS = Corpus.split("to be, or not to be: that is the question. " * 30)
BASE = TrainingSettings(width=8, heads=2, length=8, batch_tokens=32, steps=4, warmup=1)
GRID = Grid(BASE, ("dot-product", "contractive-2"), depths=(1, 2), seeds=(0, 1))


def result(kind: str, depth: int, seed: int, bits: float | None) -> TrainingResult:
    settings = replace(BASE, attention=kind, depth=depth, seed=seed)  # type: ignore[arg-type]
    return TrainingResult(settings, bits, bits, None, None, 0, 0.0, 0, "", "")


def test_every_cell_is_run_once_and_kept(tmp_path: Path) -> None:
    told: list[GridProgress] = []
    found = run_grid(CORPUS, GRID, tmp_path, progress=told.append)
    assert [(r.settings.attention, r.settings.depth, r.settings.seed) for r in found] == [
        (kind, depth, seed) for depth in (1, 2) for seed in (0, 1) for kind in ("dot-product", "contractive-2")
    ]
    assert {cell.number for cell in told} == set(range(1, 9))
    rows = list(csv.DictReader((tmp_path / TABLE).read_text().splitlines()))
    assert [float(row["valid_bits"]) for row in rows] == [r.valid_bits for r in found]
    told.clear()
    assert run_grid(CORPUS, GRID, tmp_path, progress=told.append) == found
    assert told == []


@pytest.mark.slow
def test_an_executor_gives_the_results_of_this_process(tmp_path: Path) -> None:
    here = run_grid(CORPUS, GRID, tmp_path / "here")
    with ThreadPoolExecutor(1) as threads:
        there = run_grid(CORPUS, GRID, tmp_path / "there", executor=threads)
    assert [r.valid_bits for r in there] == [r.valid_bits for r in here]
    assert len(there) == 8
    assert (tmp_path / "there" / TABLE).exists()


@pytest.mark.slow
def test_a_grid_that_lost_a_cell_makes_it_anew_to_the_bit(tmp_path: Path) -> None:
    before = run_grid(CORPUS, GRID, tmp_path)
    for file in (tmp_path / "contractive-2-depth1-seed1").iterdir():
        file.unlink()
    after = run_grid(CORPUS, GRID, tmp_path)
    assert [r.valid_bits for r in after] == [r.valid_bits for r in before]


def test_a_cell_that_another_process_works_on_is_left_to_it(tmp_path: Path) -> None:
    with locked(tmp_path / "dot-product-depth1-seed0"):
        found = run_grid(CORPUS, GRID, tmp_path)
    assert len(found) == 7
    assert not (tmp_path / "dot-product-depth1-seed0" / LEDGER).exists()
    assert len(run_grid(CORPUS, GRID, tmp_path)) == 8


def test_cells_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    run_grid(CORPUS, GRID, tmp_path)
    other = replace(GRID, base=replace(BASE, steps=5))
    with pytest.raises(InvalidInput, match="steps 4 ≠ 5"):
        run_grid(CORPUS, other, tmp_path)


def test_the_gap_is_a_share_of_the_means_over_seeds() -> None:
    bits = {"contractive-inf": (3.0, 3.2), "contractive-2": (2.2, 2.2), "l2": (2.0, 2.2)}
    found = [result(kind, 2, seed, value) for kind, values in bits.items() for seed, value in enumerate(values)]
    assert mean_bits(found, "contractive-inf", 2) == pytest.approx(3.1)
    assert gap_closed(found, 2) == pytest.approx((3.1 - 2.2) / (3.1 - 2.1))
    assert gap_closed(found, 4) is None
    assert gap_closed([*found, result("l2", 2, 2, None)], 2) is None  # a run that diverged has no mean
    assert gap_closed([*found, *(result("l2", 2, seed, 9.0) for seed in (3, 4, 5))], 2) is None  # no gap


def test_an_empty_grid_and_a_wrong_kind_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        Grid(BASE, seeds=())
    with pytest.raises(InvalidInput, match="kinds must be"):
        Grid(BASE, kinds=("magic",))  # type: ignore[arg-type]
