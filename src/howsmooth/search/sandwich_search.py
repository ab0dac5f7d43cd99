r"""Both ends: :math:`L \le \mathrm{Lip} \le U` for several numbers of tokens and several sets.

L is the norm of the Jacobian at a witness that the search found, U the smallest upper bound of the catalogue that holds
on the whole set: no input of the set is worse than U, and the witness is one that reaches L.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import rich.box
import rich.table
import torch
from torch import Tensor, nn

from howsmooth._util.common import rounded
from howsmooth._util.display import printed
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.optional_deps import need
from howsmooth._util.validation import Positive, Seed, Size, validated
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.bounds.bound_table import BoundRow, compared_with
from howsmooth.bounds.catalogue import ON_SETS, least_upper_bound
from howsmooth.bounds.question_setting import setting
from howsmooth.engines import Engine, open_engine
from howsmooth.errors import InvalidInput
from howsmooth.search.ascent import norm_at
from howsmooth.search.witness import Witness
from howsmooth.search.worst_case_search import worst_case
from howsmooth.sets import InputSet
from howsmooth.sets.near_sets import Over, as_set

Function = Callable[[Tensor], Tensor]


def tightest_upper(f: Function, n: int, over: InputSet, *, norm: float = 2, head: int | None = None) -> BoundRow | None:
    """The smallest upper bound of the catalogue that holds for n tokens on the whole set; None when none applies.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0)).written
    '≤ 6.437'
    """
    attention = as_attention_map(f, n, kind=nn.Module) or f
    if not isinstance(attention, nn.Module) or not hasattr(attention, "kind"):
        return None
    whole = over.x is None and over.reach == 0  # no theorem is about a single token
    where = setting(attention, n=n, over=None if whole else over)  # a ball per token holds the ball of all together
    least = least_upper_bound(where, norm, head=head, scopes=("neighbourhood", *ON_SETS))
    if least is None:
        return None
    bound, value = least
    facts = (norm, bound.scope, bound.reference, bound.statement)
    return BoundRow(bound.name, float(value), "upper", *facts, head=head, guarantee=bound.guarantee(head is not None))


def not_passed(upper: BoundRow | None, reached: float) -> BoundRow | None:
    """The upper end with its ratio to what a witness reaches, or `ContradictedBound` when the witness passes it.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> upper = tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0))
    >>> not_passed(upper, 6.5)
    Traceback (most recent call last):
    howsmooth.bounds.bound_table.ContradictedBound: howsmooth.mean_field says ... at most 6.43656, but the witness ...
    """
    if upper is None:
        return None
    lower = BoundRow("the witness", reached, "lower", upper.norm, "point", "", "", head=upper.head)
    return compared_with(upper, [lower])


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
        file: of the witness.
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
        upper = {} if self.upper is None else self.upper.to_dict()
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
            "upper": upper.get("value"),
            "upper_holds": upper.get("guarantee"),
            "vacuous": upper.get("vacuous", False),
            "bound": upper.get("name"),
            "scope": upper.get("scope"),
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
        """L ≤ Lip ≤ U against n and against the size of the set; see `howsmooth.reports.figures.bound_curves`."""
        from howsmooth.reports.figures.bound_curves import sandwich_figure

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


Progress = Callable[[str, float, int, float], None]


@validated
def sandwich(
    f: Function,
    lengths: Sequence[int],
    *,
    over: Over | Sequence[Over] | Mapping[int, Sequence[Over]] | None = None,
    norm: float = 2,
    head: Size | None = None,
    starts: Size = 8,
    steps: Size = 200,
    seconds: Positive | None = None,
    seed: Seed = 0,
    files: Callable[[int, InputSet], Path] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    executor: Executor | Engine | None = None,
) -> Sandwich:
    """The worst input found and the best theorem known, for every number of tokens on every set.

    A witness is offered as a start to the next search: its tokens repeated when more are requested, and itself on a
    larger set. An upper bound below a witness would be a mistake in this package and raises `ContradictedBound`.

    Args:
        f: an attention map, or any differentiable function of x, for which there is no upper end.
        lengths: numbers of tokens.
        over: one set or several, as in `howsmooth.worst_case`; of a set about an input (`Around`) the first n tokens. A
            mapping gives the sets of each number of tokens. None for all inputs, for Lipschitz maps.
        norm: 2 or inf.
        head: one head of the map with its slice of the output projection; None for the whole.
        starts, steps, seed: of each search; see `howsmooth.worst_case`.
        seconds: for all searches together.
        files: the file of the witness of a cell, renewed during the search.
        source: how the map was made, stored in those files.
        progress: called with a label, the cells done (in parts), all cells, and the best value of the present one.
        executor: for the starts of each search; see `howsmooth.worst_case`.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> for cell in sandwich(head, [4, 8], over=hs.sets.Ball(1.0), starts=2, steps=30):
    ...     print(cell.n, cell.lower <= cell.upper.value, cell.upper.name)
    4 True howsmooth.sqrt_n
    8 True howsmooth.mean_field
    """
    questions = [(n, region) for n in _checked(lengths) for region in _regions(n, over)]
    began, cells = time.monotonic(), list[SandwichCell]()
    try:
        with nullcontext() if executor is None else open_engine(executor) as workers:
            for done, (n, region) in enumerate(questions):
                label = f"n = {n}, {region}"
                attention = as_attention_map(f, n, kind=nn.Module) or f
                alone = attention.head(head) if isinstance(attention, AttentionMap) and head is not None else attention

                def show(step: int, steps: Size, best: float, label: str = label, done: int = done) -> None:
                    if progress is not None:
                        progress(label, done + step / max(steps, 1), len(questions), best)

                show(0, 1, 0.0)
                upper = tightest_upper(f, n, region, norm=norm, head=head)
                share = None if seconds is None else (seconds - (time.monotonic() - began)) / (len(questions) - done)
                file = None if files is None else files(n, region)
                witness = worst_case(
                    f,
                    n,
                    over=region,
                    start=_offered(n, region, cells),
                    norm=norm,
                    head=head,
                    starts=starts,
                    steps=steps,
                    seconds=None if share is None else max(share, 0.01),
                    seed=seed,
                    save=file,
                    source=source,
                    progress=show,
                    executor=workers,
                )
                centre = None if region.x is None else float(norm_at(alone, region.x, norm))
                cells.append(SandwichCell(n, region, witness, not_passed(upper, witness.lower), centre, file))
                if witness.stopped == "interrupted":
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        return Sandwich(tuple(cells), interrupted=True)
    return Sandwich(tuple(cells))


def _checked(lengths: Sequence[int]) -> list[int]:
    counts = sorted(set(lengths))
    if not counts or counts[0] < 1:
        raise InvalidInput(f"lengths are whole numbers of tokens, at least one, got {list(lengths)}.")
    return [int(n) for n in counts]


def _regions(n: int, over: object) -> list[InputSet]:
    """The sets for n tokens, smallest first where they have a size."""
    given = over.get(n, ()) if isinstance(over, Mapping) else over
    regions = [as_set(each).first(n) for each in (given if isinstance(given, Sequence) else [given])]
    if not regions:
        raise InvalidInput("there is no set to search: give at least one (over), such as Ball(1.0).")
    return sorted(regions, key=lambda region: region.size or 0.0)


def _offered(n: int, over: InputSet, cells: Sequence[SandwichCell]) -> list[Tensor]:
    """Starts on this set from the last witness of fewer tokens and the last with as many."""
    starts = [cell.witness.x for cell in cells if cell.n == n][-1:]
    for cell in [cell for cell in cells if cell.n < n and cell.over.describe() == over.describe()][-1:]:
        x = cell.witness.x
        if over.x is not None:
            starts.append(torch.cat([x, over.x[cell.n :].to(x)]))
        else:  # every token repeated, or the last one alone: an outlier stays alone
            starts += [x[torch.arange(n) * cell.n // n], torch.cat([x, x[-1:].expand(n - cell.n, -1)])]
    return [over.project_(x.clone()) for x in starts]
