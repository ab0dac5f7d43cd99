"""The result of a search for both ends: cells with a lower and an upper end, as rows, table and figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import rich.box
import rich.table

from howsmooth._util.common import rounded
from howsmooth._util.display import printed
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.optional_deps import need
from howsmooth.bounds.bound_table import BoundRow
from howsmooth.search.witness import Witness
from howsmooth.sets import InputSet

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SandwichCell:
    """Both ends for one number of tokens on one set.

    Attributes:
        n: number of tokens.
        over: the set.
        witness: an input of the set and the norm of the Jacobian there, the lower end.
        upper: the smallest upper bound that holds on the set; None when no theorem applies.
        centre: the norm of the Jacobian at the centre of a neighbourhood.
        file: where the witness is kept.
    """

    n: int
    over: InputSet
    witness: Witness
    upper: BoundRow | None = None
    centre: float | None = None
    file: Path | None = None

    @property
    def lower(self) -> float:
        """L: the lower end of the norm of the Jacobian at the witness."""
        return self.witness.lower

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of the lower end."""
        return self.witness.lower_holds

    @property
    def upper_holds(self) -> Guarantee | None:
        """The guarantee of the upper end; None when no theorem applies."""
        return None if self.upper is None else self.upper.guarantee

    @property
    def start(self) -> str:
        """The start that led to the witness."""
        return "an earlier witness" if self.witness.start.startswith("given") else self.witness.start

    @property
    def size(self) -> float | None:
        """R, or ε of a neighbourhood; None for a set that has neither."""
        return self.over.size

    @property
    def ratio(self) -> float | None:
        """U / L; None when one of them says nothing."""
        if self.upper is None or self.upper.vacuous or not self.lower > 0:
            return None
        return self.upper.value / self.lower

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON; an upper bound that overflows is None with ``"vacuous": True``."""
        upper = None if self.upper is None else self.upper.to_dict()
        return {
            "n": self.n,
            "size": self.size,
            "over": self.over.describe(),
            "norm": "inf" if math.isinf(self.witness.norm) else int(self.witness.norm),
            "head": self.witness.head,
            "value": self.witness.value,
            "lower": self.lower,
            "lower_holds": self.lower_holds.name.lower(),
            "start": self.start,
            "stopped": self.witness.stopped,
            "upper": None if upper is None else upper["value"],
            "upper_holds": None if upper is None else upper["guarantee"],
            "vacuous": False if upper is None else upper["vacuous"],
            "bound": None if self.upper is None else self.upper.name,
            "scope": None if self.upper is None else self.upper.scope,
            "ratio": self.ratio,
            "centre": self.centre,
            "converged": bool(self.witness.measurement.converged.all()),
            "seconds": self.witness.seconds,
            "file": None if self.file is None else str(self.file),
        }


@dataclass(frozen=True, repr=False)
class Sandwich(Sequence[SandwichCell]):
    """Both ends of the Lipschitz constant, one `SandwichCell` for each set and number of tokens.

    Attributes:
        cells: in the order in which they were searched.
        interrupted: whether Ctrl-C ended the search; the last cell then holds the best input found until then.
    """

    cells: tuple[SandwichCell, ...]
    interrupted: bool = False

    @overload
    def __getitem__(self, index: int) -> SandwichCell: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SandwichCell, ...]: ...
    def __getitem__(self, index: int | slice) -> SandwichCell | tuple[SandwichCell, ...]:
        return self.cells[index]

    def __len__(self) -> int:
        return len(self.cells)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain Python for JSON."""
        return [cell.to_dict() for cell in self.cells]

    def to_pandas(self) -> pandas.DataFrame:
        """One line per cell."""
        pd = need("pandas", "a data frame")

        return pd.DataFrame([row | {"over": row["over"]["set"]} for row in self.to_dict()])

    def figure(self) -> Figure:
        """L ≤ Lip ≤ U against n and against the size of the set; see `howsmooth.reports.figures.sandwich_curves`."""
        from howsmooth.reports.figures.sandwich_curves import sandwich_figure

        return sandwich_figure(self)

    def __rich__(self) -> rich.table.Table:
        near = any(cell.centre is not None for cell in self.cells)
        shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for name in ("n", "set", *["at its centre"] * near, "lower bound (witness)", "upper bound (theorem)", "ratio"):
            shown.add_column(name, justify="right" if name in ("n", "ratio") else "left")
        for cell in self.cells:
            centre = "" if cell.centre is None else f"≈ {rounded(cell.centre, digits=4)}"
            upper = "none applies"
            if cell.upper is not None:
                upper = f"{cell.upper.written}, {cell.upper.guarantee.words()} ({cell.upper.name})"
            ratio = "–" if cell.ratio is None else rounded(cell.ratio, ROUND_CEILING, 3)
            lower = f"≥ {rounded(cell.lower, ROUND_FLOOR, 4)}, {cell.lower_holds.words()} ({cell.start})"
            shown.add_row(str(cell.n), str(cell.over), *[centre] * near, lower, upper, ratio)
        return shown

    def __repr__(self) -> str:
        return printed(self.__rich__())
