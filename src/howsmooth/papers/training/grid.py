"""A grid of runs, kinds × depths × seeds, as in Kim et al. (2021): one resumable folder per cell, and one table.

Several processes may run the same grid at once: each skips the cells of the others.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from howsmooth._util.common import Busy, spreadsheet_safe, write_whole
from howsmooth._util.validation import Device, check_device, check_fields, validated
from howsmooth.engines import Engine
from howsmooth.engines.choice import complete
from howsmooth.errors import InvalidInput
from howsmooth.papers.training.loop import StatusCallback, train
from howsmooth.papers.training.run_files import Intervals, TrainingResult, TrainingStatus
from howsmooth.papers.training.text_batches import Corpus
from howsmooth.papers.training.training_settings import Attention, TrainingSettings

COMPARED_KINDS: tuple[Attention, ...] = ("dot-product", "l2-untied", "l2", "contractive-inf", "contractive-2")
TABLE = "table.csv"


@dataclass(frozen=True)
class Grid:
    """Runs that differ only in attention, depth and seed.

    >>> grid = Grid(TrainingSettings(), kinds=("dot-product", "l2"), depths=(2,), seeds=(0, 1))
    >>> [name for name, _ in grid.cells()]
    ['dot-product-depth2-seed0', 'l2-depth2-seed0', 'dot-product-depth2-seed1', 'l2-depth2-seed1']
    """

    base: TrainingSettings
    kinds: Sequence[Attention] = COMPARED_KINDS
    depths: Sequence[int] = (2, 4, 6)
    seeds: Sequence[int] = (0, 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(map(len, (self.kinds, self.depths, self.seeds))):
            raise InvalidInput("a grid needs at least one kind of attention, one depth and one seed.")
        self.cells()

    def cells(self) -> list[tuple[str, TrainingSettings]]:
        """Return names and settings, the shallow first, so that an interrupted grid can be compared."""
        return [
            (f"{kind}-depth{depth}-seed{seed}", replace(self.base, attention=kind, depth=depth, seed=seed))
            for depth, seed, kind in itertools.product(self.depths, self.seeds, self.kinds)
        ]


@dataclass(frozen=True)
class GridProgress:
    """The progress of a grid: cell ``number`` of ``total``, its name, and the status of its run."""

    number: int
    total: int
    name: str
    status: TrainingStatus


@validated
def run_grid(
    corpus: Corpus,
    grid: Grid,
    folder: Path,
    *,
    intervals: Intervals | None = None,
    progress: Callable[[GridProgress], None] = lambda cell: None,
    executor: Executor | Engine | None = None,
    device: Device | None = None,
) -> list[TrainingResult]:
    """Run the missing cells and return all finished ones; the table is written after each.

    Args:
        executor: an executor, or a `howsmooth.engines.Engine`, that runs cells in place of this process, on machines
            with access to the folder; it reports no progress inside cells.
        device: device of every cell; None for the CPU.
    """
    check_device(device or "cpu")
    folder = Path(folder).absolute()
    runs = {name: (corpus, settings, folder / name, intervals, device) for name, settings in grid.cells()}
    update = lambda *cell: write_table(folder, finished(folder, grid))  # noqa: E731
    if executor is not None:
        complete(executor, _run_cell, runs, update)
    else:
        for number, (name, run) in enumerate(runs.items(), start=1):
            show = lambda status, n=number, name=name: progress(GridProgress(n, len(runs), name, status))  # noqa: E731
            _run_cell(run, show)
            update()
    return finished(folder, grid)


def _run_cell(
    run: tuple[Corpus, TrainingSettings, Path, Intervals | None, Device | None],
    progress: StatusCallback = lambda status: None,
) -> None:
    """Run one cell in any process; a cell of another process is skipped."""
    corpus, settings, folder, intervals, device = run
    with suppress(Busy):
        train(corpus, settings, folder, resume=True, intervals=intervals, progress=progress, device=device)


def finished(folder: Path, grid: Grid) -> list[TrainingResult]:
    """Return the finished results, in the order of the grid."""
    results = [TrainingResult.read(folder / name) for name, _ in grid.cells()]
    return [result for result in results if result is not None]


def write_table(folder: Path, results: Sequence[TrainingResult], name: str = TABLE) -> None:
    """Write all cells as CSV, one row each."""
    text = io.StringIO()
    rows = [row_of(result) for result in results]
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: spreadsheet_safe(cell) for name, cell in row.items()} for row in rows)
    write_whole(folder / name, text.getvalue().encode())


def row_of(result: TrainingResult) -> dict[str, Any]:
    """Return one cell as a row: its settings and its result."""
    settings = result.settings
    return {
        "attention": settings.attention,
        "blocks": settings.block_kind,
        "window": settings.window,
        "coefficient": settings.coefficient if settings.is_contractive else None,
        "depth": settings.depth,
        "seed": settings.seed,
        "valid_bits": result.valid_bits,
        "train_bits": result.train_bits,
        "bound": result.bound,
        "diverged": result.diverged,
        "steps": settings.steps,
        "tokens": result.tokens,
        "parameters": result.parameters,
        "seconds": result.seconds,
    }


@validated
def mean_bits(results: Sequence[TrainingResult], kind: str, depth: int) -> float | None:
    """Return the mean of the validation bits over the seeds; None when one diverged or none is finished."""
    bits = [r.valid_bits for r in results if (r.settings.attention, r.settings.depth) == (kind, depth)]
    return mean(bits) if bits and None not in bits else None  # type: ignore[type-var]


@validated
def gap_closed(results: Sequence[TrainingResult], depth: int) -> float | None:
    """Return (contractive-inf − contractive-2)/(contractive-inf − l2) in validation bits.

    One: the division by the bound in the 2-norm costs nothing. Zero: it gains nothing over the ∞-norm. None: a kind is
    missing or there is no gap.
    """
    loose, ours, tied = (mean_bits(results, kind, depth) for kind in ("contractive-inf", "contractive-2", "l2"))
    if loose is None or ours is None or tied is None or loose <= tied:
        return None
    return (loose - ours) / (loose - tied)
