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
from howsmooth.papers.experiment import Asked, Cell, Experiment, Finding, Row
from howsmooth.reports.figures import save_figure

LEDGER = "cells.sqlite"
PICTURES = (".png", ".svg", ".pdf")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Reproduction:
    """An experiment that was run: its rows, its finding and the files that hold them."""

    experiment: Experiment
    asked: Asked
    rows: pandas.DataFrame
    finding: Finding
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and verdict.json."""
        return {
            "id": self.experiment.id,
            "paper": self.experiment.paper,
            "claim": self.experiment.claim,
            "setting": self.experiment.setting,
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
    asked: Asked | None = None,
    folder: Path = Path("reproduced"),
    *,
    resume: bool = True,
    progress: Progress = lambda done, total: None,
    executor: Executor | Engine | None = None,
) -> Reproduction:
    """Run one experiment and keep its data, picture and verdict in ``folder/ID``; cells may run on any executor.

    >>> import tempfile
    >>> from howsmooth.papers import EXPERIMENTS, Asked
    >>> made = reproduce(EXPERIMENTS["not-lipschitz"], Asked("quick"), Path(tempfile.mkdtemp()))
    >>> made.finding.verdict.value
    'confirmed'
    """
    asked = Asked() if asked is None else asked
    experiment.check(asked)
    results_folder = folder / experiment.id / asked.size
    results_folder.mkdir(parents=True, exist_ok=True)
    cells = {json.dumps(cell, sort_keys=True): cell for cell in experiment.cells(asked)}
    run = {"experiment": experiment.id, "size": asked.size, "models": list(asked.models), "text": asked.text_said}
    with Ledger.writing(results_folder / LEDGER, run, resume) as ledger:
        done = ledger.read_json()
        missing = {key: cell for key, cell in cells.items() if key not in done}

        def keep(key: str, rows: list[Row]) -> None:
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


def _run_cell(item: tuple[str, Asked, Cell]) -> list[Row]:
    """One cell of an experiment by name, in whatever process this runs."""
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
