"""What a reproduced experiment is: a claim, the cells that test it, a picture and a verdict.

An experiment is one module of this package that reads like a method section: `cells` says what is run, `run` runs
one cell, `draw` shows the rows, `judge` compares them with the claim. What runs it, resumes and saves is
`howsmooth.papers.reproduction`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Literal

import pandas
from matplotlib.figure import Figure

from howsmooth.errors import InvalidInput

Size = Literal["quick", "normal", "full"]
Cell = dict[str, Any]
Row = dict[str, Any]

CASTIN = "How Smooth Is Attention? (Castin, Ablin, Peyré 2024)"
KIM = "The Lipschitz Constant of Self-Attention (Kim, Papamakarios, Mnih 2021)"


class Verdict(Enum):
    """What the rows say about the claim."""

    CONFIRMED = "confirmed"
    OTHER_CONSTANT = "confirmed with another constant"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True)
class Finding:
    """A verdict with the measured numbers behind it, in one or two sentences."""

    verdict: Verdict
    measured: str


@dataclass(frozen=True)
class Asked:
    """How an experiment is run: its size, and models or a text other than its own."""

    size: Size = "normal"
    models: tuple[str, ...] = ()
    text: str | None = None

    @property
    def text_said(self) -> str | None:
        """The text in a few words, the same for the same text.

        >>> Asked(text="abc").text_said
        '3 characters, sha256 ba7816bf8f01…'
        """
        if self.text is None:
            return None
        return f"{len(self.text)} characters, sha256 {sha256(self.text.encode()).hexdigest()[:12]}…"

    def pick(self, quick: Any, normal: Any, full: Any) -> Any:
        """What belongs to the size.

        >>> Asked("quick").pick(1, 2, 3)
        1
        """
        return {"quick": quick, "normal": normal, "full": full}[self.size]


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        id: its name on the command line.
        paper: where the claim stands.
        title, claim, setting: what is shown, what is claimed, and with what it is tested here.
        cells: what is run at a size; every cell is a dictionary of plain values and can be run alone.
        run: the rows of one cell.
        draw, judge: the picture and the finding of all rows.
        minutes: how long a size takes on two quiet cores, roughly; said before it starts.
        takes: what may be chosen: "models", "text".
    """

    id: str
    paper: str
    title: str
    claim: str
    setting: str
    cells: Callable[[Asked], Sequence[Cell]]
    run: Callable[[Asked, Cell], list[Row]]
    draw: Callable[[pandas.DataFrame], Figure]
    judge: Callable[[pandas.DataFrame], Finding]
    minutes: tuple[float, float, float]
    takes: frozenset[str] = frozenset()

    def check(self, asked: Asked) -> None:
        """Refuse a choice that this experiment does not have."""
        for name, given in (("models", asked.models), ("text", asked.text)):
            if given and name not in self.takes:
                raise InvalidInput(f"{self.id} has no choice of {name}: {self.setting}")
