"""Running an experiment: cell by cell into a ledger, then Parquet, a picture in three formats and a verdict."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from howsmooth._util.common import write_whole
from howsmooth._util.ledger import Ledger
from howsmooth.engines import Engine
from howsmooth.engines.choice import complete
from howsmooth.papers.experiment import Experiment, ExperimentOptions, Finding, Record
from howsmooth.reports.figures import save_figure

LEDGER = "cells.sqlite"
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Reproduction:
    """A finished experiment: its rows, its finding and the folder of its files."""

    experiment: Experiment
    asked: ExperimentOptions
    rows: pandas.DataFrame
    finding: Finding
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and verdict.json."""
        return {name: getattr(self.experiment, name) for name in ("id", "paper", "claim", "setting")} | {
            "size": self.asked.size,
            "models": list(self.asked.models),
            "text": self.asked.text_said,
            "measured": self.finding.measured,
            "verdict": self.finding.verdict.value,
            "rows": len(self.rows),
            "folder": str(self.folder),
        }


def reproduce(
    experiment: Experiment,
    asked: ExperimentOptions | None = None,
    folder: Path = Path("reproduced"),
    *,
    resume: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    executor: Executor | Engine | None = None,
) -> Reproduction:
    """Run one experiment and save its data, figure and verdict in ``folder/ID``; cells may run on any executor.

    >>> import tempfile
    >>> from howsmooth.papers import EXPERIMENTS, ExperimentOptions
    >>> made = reproduce(EXPERIMENTS["not-lipschitz"], ExperimentOptions("quick"), Path(tempfile.mkdtemp()))
    >>> made.finding.verdict.value
    'confirmed'
    """
    asked = ExperimentOptions() if asked is None else asked
    experiment.check(asked)
    results_folder = folder / experiment.id / asked.size
    results_folder.mkdir(parents=True, exist_ok=True)
    cells = {json.dumps(cell, sort_keys=True): cell for cell in experiment.cells(asked)}
    run = {"experiment": experiment.id, "size": asked.size, "models": list(asked.models), "text": asked.text_said}
    with Ledger.writing(results_folder / LEDGER, run, resume) as ledger:
        done = ledger.read_json()
        missing = {key: cell for key, cell in cells.items() if key not in done}

        def keep(key: str, rows: list[Record]) -> None:
            ledger.write(key, json.dumps(rows).encode())
            done[key] = rows
            progress(len(cells.keys() & done.keys()), len(cells))

        progress(len(cells) - len(missing), len(cells))
        if executor is not None:
            complete(executor, _run_cell, {key: (experiment.id, asked, cell) for key, cell in missing.items()}, keep)
        else:
            for key, cell in missing.items():
                keep(key, experiment.run(asked, cell))
        frame = pandas.DataFrame([row for key in cells for row in done[key]])
        made = Reproduction(experiment, asked, frame, experiment.judge(frame), results_folder)
        _save(made)
    return made


def _run_cell(item: tuple[str, ExperimentOptions, Record]) -> list[Record]:
    """Run one cell of an experiment by name, in any process."""
    from howsmooth.papers import EXPERIMENTS

    name, asked, cell = item
    return EXPERIMENTS[name].run(asked, cell)


def _save(made: Reproduction) -> None:
    table = io.BytesIO()
    made.rows.to_parquet(table, index=False)
    write_whole(made.folder / "rows.parquet", table.getvalue())
    figure = made.experiment.draw(made.rows)
    for suffix in PICTURES:
        save_figure(figure, made.folder / f"{made.experiment.id}{suffix}")
    write_whole(made.folder / "verdict.json", (json.dumps(made.to_dict(), indent=1) + "\n").encode())
