"""A reproduced experiment: a claim, the cells that test it, a figure and a verdict.

An experiment is one module of this package that reads like a method section: `cells` lists the units of work, `run`
computes the rows of one cell, `draw` makes the figure of all rows, `judge` compares them with the claim.
`howsmooth.papers.reproduction` runs an experiment, resumes it and saves its files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import pandas
from matplotlib.figure import Figure

from howsmooth.errors import InvalidInput

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
    def text_said(self) -> str | None:
        """A short identifier of the text: its length and the beginning of its hash.

        >>> ExperimentOptions(text="abc").text_said
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


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        id: name on the command line.
        paper: source of the claim.
        title, claim, setting: subject, claim, and the models and inputs of the test.
        cells: units of work at a size; every cell is a dictionary of plain values and can run alone.
        run: rows of one cell.
        draw, judge: figure and finding of all rows.
        minutes: approximate duration of each size on two idle cores.
        takes: options that the user may choose: "models", "text".
    """

    id: str
    paper: str
    title: str
    claim: str
    setting: str
    cells: Callable[[ExperimentOptions], list[Record]]
    run: Callable[[ExperimentOptions, Record], list[Record]]
    draw: Callable[[Rows], Figure]
    judge: Callable[[Rows], Finding]
    minutes: tuple[float, float, float]
    takes: frozenset[str] = frozenset()

    def check(self, options: ExperimentOptions) -> None:
        """Refuse an option that this experiment does not take."""
        for name, given in (("models", options.models), ("text", options.text)):
            if given and name not in self.takes:
                raise InvalidInput(f"{self.id} has no choice of {name}: {self.setting}")
