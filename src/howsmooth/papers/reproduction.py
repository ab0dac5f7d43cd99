"""Running an experiment: cell by cell into a journal, then Parquet, a figure in three formats and a verdict.

A journal is one line of JSON per cell, appended and flushed when the cell is done, so that a run that was stopped goes
on where it was; a last line that was cut off is measured again.
"""

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
from howsmooth.engines import Engine, complete
from howsmooth.errors import InvalidInput
from howsmooth.papers.experiment import Experiment, Finding
from howsmooth.papers.experiment import ExperimentOptions as Asked
from howsmooth.papers.experiment import Record as Cell
from howsmooth.papers.experiment import Record as Row
from howsmooth.reports.figures import save_figure

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Reproduction:
    """A finished experiment: its rows, its finding and the folder of its files."""

    experiment: Experiment
    asked: Asked
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
    asked: Asked | None = None,
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
    asked = Asked() if asked is None else asked
    experiment.check(asked)
    results_folder = folder / experiment.id / asked.size
    results_folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(results_folder / "journal.jsonl", asked)
    done = journal.read() if resume else journal.forget()
    cells = {json.dumps(cell, sort_keys=True): cell for cell in experiment.cells(asked)}
    missing = {key: cell for key, cell in cells.items() if key not in done}

    def keep(key: str, rows: list[Row]) -> None:
        journal.append(cells[key], rows)
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
    """Run one cell of an experiment by name, in any process."""
    from howsmooth.papers import EXPERIMENTS

    name, asked, cell = item
    return EXPERIMENTS[name].run(asked, cell)


class Journal:
    """The cells that are done, one line each; the first line says how they were asked for."""

    def __init__(self, path: Path, asked: Asked):
        self.path = path
        self.head = json.dumps(
            {"size": asked.size, "models": list(asked.models), "text": asked.text_said}, sort_keys=True
        )

    def read(self) -> dict[str, list[Row]]:
        """What is done; a journal of another question is refused."""
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
        if not any(lines[1:]):  # no cell was finished
            return self.forget()
        if lines[0] != self.head:
            raise InvalidInput(
                f"{self.path} belongs to a run with other settings: choose another folder or --no-resume."
            )
        done: dict[str, list[Row]] = {}
        for line in lines[1:-1]:  # what follows the last line break was cut off
            entry = json.loads(line)
            done[json.dumps(entry["cell"], sort_keys=True)] = entry["rows"]
        write_whole(self.path, "\n".join([*lines[:-1], ""]).encode())
        return done

    def forget(self) -> dict[str, list[Row]]:
        """Begin anew."""
        write_whole(self.path, (self.head + "\n").encode())
        return {}

    def append(self, cell: Cell, rows: list[Row]) -> None:
        """Keep one cell."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "rows": rows}) + "\n")


def _save(made: Reproduction) -> None:
    table = io.BytesIO()
    made.rows.to_parquet(table, index=False)
    write_whole(made.folder / "rows.parquet", table.getvalue())
    figure = made.experiment.draw(made.rows)
    for suffix in PICTURES:
        save_figure(figure, made.folder / f"{made.experiment.id}{suffix}")
    write_whole(made.folder / "verdict.json", (json.dumps(made.to_dict(), indent=1) + "\n").encode())
