"""A reproduced experiment: a claim, the cells that test it, a figure and a verdict.

An experiment is a class that reads like a method section: `cells` lists the units of work, `run` computes the rows of
one cell, `draw` makes the figure of all rows, `judge` compares them with the claim. `reproduce` runs an experiment cell
by cell into a ledger, resumes it, and saves Parquet, a picture in three formats and a verdict.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas
from matplotlib.figure import Figure

from howsmooth._util.common import write_whole
from howsmooth._util.ledger import Ledger
from howsmooth.engines import Engine
from howsmooth.engines.choice import complete
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures import save_figure

ExperimentSize = Literal["quick", "normal", "full"]
Record = dict[str, Any]
"""A cell or a row: names and plain values that JSON can hold."""
Rows: TypeAlias = pandas.DataFrame

CASTIN = "How Smooth Is Attention? (Castin, Ablin, Peyré 2024)"
KIM = "The Lipschitz Constant of Self-Attention (Kim, Papamakarios, Mnih 2021)"


class Verdict(Enum):
    """The answer of the rows to the claim."""

    CONFIRMED = "confirmed"
    OTHER_CONSTANT = "confirmed with another constant"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True)
class Finding:
    """A verdict with the measured numbers behind it, in one or two sentences."""

    verdict: Verdict
    measured: str

    @classmethod
    def of(cls, confirmed: bool, measured: str, other_constant: bool = False) -> Finding:
        """Choose the verdict from two conditions; ``other_constant`` counts where the claim is not confirmed."""
        weaker = Verdict.OTHER_CONSTANT if other_constant else Verdict.NOT_CONFIRMED
        return cls(Verdict.CONFIRMED if confirmed else weaker, measured)


@dataclass(frozen=True)
class ExperimentOptions:
    """The size of an experiment, and models or a text in place of its own."""

    size: ExperimentSize = "normal"
    models: tuple[str, ...] = ()
    text: str | None = None

    @property
    def text_digest(self) -> str | None:
        """A short identifier of the text: its length and the beginning of its hash.

        >>> ExperimentOptions(text="abc").text_digest
        '3 characters, sha256 ba7816bf8f01…'
        """
        if self.text is None:
            return None
        return f"{len(self.text)} characters, sha256 {sha256(self.text.encode()).hexdigest()[:12]}…"

    def pick(self, quick: Any, normal: Any, full: Any) -> Any:
        """Return the value for the size.

        >>> ExperimentOptions("quick").pick(1, 2, 3)
        1
        """
        return {"quick": quick, "normal": normal, "full": full}[self.size]


class Experiment(ABC):
    """One experiment of a paper.

    Attributes:
        id: name on the command line.
        paper: source of the claim.
        title, claim, setting: subject, claim, and the models and inputs of the test.
        minutes: approximate duration of each size on two idle cores.
        takes: options that the user may choose: "models", "text".
    """

    id: str
    paper: str
    title: str
    claim: str
    setting: str
    minutes: tuple[float, float, float]
    takes: frozenset[str] = frozenset()

    @abstractmethod
    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Return the units of work at a size; every cell is a dictionary of plain values and can run alone."""

    @abstractmethod
    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Compute the rows of one cell."""

    @abstractmethod
    def draw(self, rows: Rows) -> Figure:
        """Draw the figure of all rows."""

    @abstractmethod
    def judge(self, rows: Rows) -> Finding:
        """Compare all rows with the claim."""

    def check(self, options: ExperimentOptions) -> None:
        """Refuse an option that this experiment does not take."""
        for name, given in (("models", options.models), ("text", options.text)):
            if given and name not in self.takes:
                raise InvalidInput(f"{self.id} has no choice of {name}: {self.setting}")


LEDGER = "cells.sqlite"
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Reproduction:
    """A finished experiment: its rows, its finding and the folder of its files."""

    experiment: Experiment
    options: ExperimentOptions
    rows: pandas.DataFrame
    finding: Finding
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and verdict.json."""
        return {name: getattr(self.experiment, name) for name in ("id", "paper", "claim", "setting")} | {
            "size": self.options.size,
            "models": list(self.options.models),
            "text": self.options.text_digest,
            "measured": self.finding.measured,
            "verdict": self.finding.verdict.value,
            "rows": len(self.rows),
            "folder": str(self.folder),
        }


def reproduce(
    experiment: Experiment,
    options: ExperimentOptions | None = None,
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
    options = ExperimentOptions() if options is None else options
    experiment.check(options)
    results_folder = folder / experiment.id / options.size
    results_folder.mkdir(parents=True, exist_ok=True)
    cells = {json.dumps(cell, sort_keys=True): cell for cell in experiment.cells(options)}
    choices = {"size": options.size, "models": list(options.models), "text": options.text_digest}
    run = {"experiment": experiment.id, **choices}
    with Ledger.writing(results_folder / LEDGER, run, resume) as ledger:
        done = ledger.read_json()
        missing = {key: cell for key, cell in cells.items() if key not in done}

        def store(key: str, rows: list[Record]) -> None:
            ledger.write(key, json.dumps(rows).encode())
            done[key] = rows
            progress(len(cells.keys() & done.keys()), len(cells))

        progress(len(cells) - len(missing), len(cells))
        if executor is not None:
            complete(executor, _run_cell, {key: (experiment.id, options, cell) for key, cell in missing.items()}, store)
        else:
            for key, cell in missing.items():
                store(key, list(experiment.run(options, cell)))
        frame = pandas.DataFrame([row for key in cells for row in done[key]])
        made = Reproduction(experiment, options, frame, experiment.judge(frame), results_folder)
        _save(made)
    return made


def _run_cell(item: tuple[str, ExperimentOptions, Record]) -> list[Record]:
    """Run one cell of an experiment by name, in any process."""
    from howsmooth.papers import EXPERIMENTS

    name, options, cell = item
    return list(EXPERIMENTS[name].run(options, cell))


def _save(made: Reproduction) -> None:
    table = io.BytesIO()
    made.rows.to_parquet(table, index=False)
    write_whole(made.folder / "rows.parquet", table.getvalue())
    figure = made.experiment.draw(made.rows)
    for suffix in PICTURES:
        save_figure(figure, made.folder / f"{made.experiment.id}{suffix}")
    write_whole(made.folder / "verdict.json", (json.dumps(made.to_dict(), indent=1) + "\n").encode())
