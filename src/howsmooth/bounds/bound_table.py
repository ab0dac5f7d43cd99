"""Every bound that applies to an attention, tightest first, beside the measurement at an input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from typing import Any, Literal, overload

import rich.box
import rich.table
from torch import Tensor, nn

from howsmooth._util.common import rounded
from howsmooth._util.display import grid, printed
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import Positive, Seed, validated
from howsmooth.attention import AttentionMap
from howsmooth.bounds.catalogue import CATALOGUE, SCOPES, Bound, evaluated
from howsmooth.bounds.question_setting import Setting, setting
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import measure_heads, measure_map
from howsmooth.norms.measurement import NormKind
from howsmooth.sets.near_sets import Over

Kind = Literal["measured", "upper", "lower"]
_CONTAINS: dict[str, tuple[str, ...]] = {
    "point": ("point",),
    "neighbourhood": ("point", "neighbourhood"),
    "ball": ("point", "ball"),
    "global": ("point", "neighbourhood", "ball", "global"),
    "mean-field W2": ("point", "ball", "mean-field W2"),
    "mean-field d2": ("point", "ball", "mean-field d2"),
}
"""Scope → the scopes whose constants are never larger: the input lies in the set, n tokens are a measure."""

_ORDER: dict[str, tuple[int, int]] = {"measured": (0, 1), "upper": (1, 1), "lower": (2, -1)}
_MARKS = {"measured": ("≈", ROUND_HALF_EVEN), "upper": ("≤", ROUND_CEILING), "lower": ("≥", ROUND_FLOOR)}
_FEW_ROWS = 4096
"""The inf-norm needs all n·d rows of the Jacobian: it is measured up to this many."""
_ROUNDING = 1e-6


class ContradictedBound(AssertionError):
    """An upper bound below a lower bound of the same constant: a mistake in this package, never in its use."""


@dataclass(frozen=True)
class BoundRow:
    """One number of a `Table`.

    Attributes:
        name: of the bound; "measured" for the measurement at x.
        value: the bound, +inf when it overflows; for "measured" the estimate.
        kind: "upper", "lower" or "measured".
        norm: 2 or inf.
        scope: where it holds; see `howsmooth.bounds.SCOPES`.
        reference: where it comes from.
        statement: LaTeX.
        ratio: value / best lower bound known for the same norm, head and scope; None when none is positive.
        head: which head; None for the block.
        guarantee: of the value (`Bound.guarantee`); for "measured", of the ends of the measurement.
    """

    name: str
    value: float
    kind: Kind
    norm: float | str
    scope: str
    reference: str
    statement: str
    ratio: float | None = None
    head: int | None = None
    guarantee: Guarantee = Guarantee.MODELLED

    def __repr__(self) -> str:
        whose = "" if self.head is None else f" of head {self.head}"
        return f"{self.name}{whose}: {self.written} {SCOPES[self.scope]}, {self.guarantee.words()}"

    @property
    def vacuous(self) -> bool:
        """Whether the bound is too large for a float64."""
        return math.isinf(self.value)

    @property
    def written(self) -> str:
        """The value in four digits, rounded to the side on which it stays true."""
        mark, rounding = _MARKS[self.kind]
        return "> 1e308 (vacuous)" if self.vacuous else f"{mark} {rounded(self.value, rounding, 4)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON: a vacuous value is None with ``"vacuous": True``, and the norm inf is "inf"."""
        value = None if self.vacuous else self.value
        guarantee = self.guarantee.name.lower()
        return vars(self) | {
            "value": value,
            "norm": _norm_name(self.norm),
            "vacuous": self.vacuous,
            "guarantee": guarantee,
        }


@dataclass(frozen=True, repr=False)
class Table(Sequence[BoundRow]):
    """Bounds on the Lipschitz constant of an attention: a sequence of `BoundRow`, tightest first.

    For each norm and head: the measurement, then upper bounds from the smallest, then lower bounds from the largest.

    Attributes:
        rows: the rows.
        setting: the question.
        measurements: norm → the measurement at x, in float64 like the bounds; one value per head when requested.
        refused: name of a bound → why it does not apply.
    """

    rows: tuple[BoundRow, ...]
    setting: Setting
    measurements: dict[float, Measurement]
    refused: dict[str, str]

    @overload
    def __getitem__(self, index: int) -> BoundRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BoundRow, ...]: ...
    def __getitem__(self, index: int | slice) -> BoundRow | tuple[BoundRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _repr_html_(self) -> str:
        rows = [(row.name, row.written, SCOPES[row.scope], row.guarantee.words()) for row in self.rows]
        left_out = [f"{len(self.refused)} bounds do not apply here: .refused says why."] * bool(self.refused)
        return grid(
            f"{len(self.rows)} numbers, tightest first", ("name", "value", "holds", "guarantee"), rows, left_out
        )

    @property
    def measured(self) -> Measurement | None:
        """The measurement at x, in the 2-norm unless another was requested; None without x."""
        return next(iter(self.measurements.values()), None)

    @property
    def best_lower(self) -> float | None:
        """The largest lower bound known for n tokens, in the norm of the first row; for measures without n."""
        many = self.setting.n is None or math.isinf(self.setting.n)
        ends = [end for end in _lower_ends(self.rows, self.measurements) if end.norm == self.rows[0].norm]
        return max((end.value for end in ends if many or not end.scope.startswith("mean-field")), default=None)

    def tightest(self, kind: Kind, scopes: Iterable[str] = tuple(SCOPES), norm: float = 2) -> BoundRow | None:
        """The best row of a kind on some scopes; with several heads, that of the head where it is largest."""
        best: dict[int | None, BoundRow] = {}
        for row in self.rows:  # tightest first within each head
            if (row.kind, row.norm) == (kind, norm) and row.scope in scopes:
                best.setdefault(row.head, row)
        return max(best.values(), key=lambda row: row.value, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON; see `BoundRow.to_dict` for infinite values."""
        where, tokens = self.setting, self.setting.tokens
        return {
            "kind": where.kind,
            "heads": where.heads,
            "n": None if where.n is None else "inf" if math.isinf(where.n) else int(where.n),
            "radius": None if tokens is None else tokens.radius,
            "tokens": None if tokens is None else tokens.origin,
            "eps": where.eps,
            "best_lower": self.best_lower,
            "measured": {str(_norm_name(norm)): m.to_dict() for norm, m in self.measurements.items()},
            "rows": [row.to_dict() for row in self.rows],
            "refused": dict(self.refused),
        }

    def to_latex(self) -> str:
        r"""A ``tabular`` for ``\usepackage{booktabs}``, the statements written out."""
        heads = any(row.head is not None for row in self.rows)
        lines = [rf"\begin{{tabular}}{{{'r' * heads}lllrlrl}}", r"\toprule"]
        lines.append(
            r"head & " * heads + r"bound & statement & where & value & guarantee & ratio & reference \\ \midrule"
        )
        for row in self.rows:
            cells = [str(row.head)] * heads + [_escaped(row.name), f"${row.statement}$", _escaped(SCOPES[row.scope])]
            ratio = "--" if row.ratio is None else f"${_latex_number(row.ratio)}$"
            cells += [_latex_value(row), row.guarantee.words(), ratio, _escaped(row.reference)]
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def __rich__(self) -> rich.table.Table:
        heads, norms = any(row.head is not None for row in self.rows), {row.norm for row in self.rows} != {2}
        names = ["head"] * heads + ["bound", "value"] + ["norm"] * norms + ["where", "guarantee", "ratio", "reference"]
        shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for name in names:
            shown.add_column(name, justify="right" if name in ("head", "ratio") else "left")
        for row in self.rows:
            ratio = "" if row.ratio is None else rounded(row.ratio, _MARKS[row.kind][1], 3)
            cells = [str(row.head)] * heads + [row.name, row.written] + [str(_norm_name(row.norm))] * norms
            shown.add_row(*cells, SCOPES[row.scope], row.guarantee.words(), ratio, row.reference)
        return shown

    def __repr__(self) -> str:
        return printed(self.__rich__(), 160)


@validated
@full_precision
def table(
    attention: nn.Module,
    *,
    n: float | None = None,
    over: Over | None = None,
    per_head: bool = False,
    norm: float | str | None = None,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
) -> Table:
    """Every bound of the catalogue that applies, the measurement at the input of the set, and their ratios.

    Args:
        attention, n, over: as in `howsmooth.bounds.setting`.
        per_head: one row per bound and head, each head with its own slice of the output matrix.
        norm: only bounds of this norm, 2, inf or "token"; None for the first two. Norms other than 2 are measured when
            n·d is small.
        rtol, seed: of the measurement at x; see `howsmooth.measure`.

    Lower bounds that are not positive are omitted, and an upper bound that overflows is +inf.

    >>> import torch
    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> for row in table(head, n=100, over=hs.sets.Ball(1.0)):
    ...     if row.name in ("howsmooth.unified", "castin2024.sqrt_n"):
    ...         print(row.name, row.written, row.scope)
    howsmooth.unified ≤ 6.437 ball
    castin2024.sqrt_n ≤ 38.77 ball
    """
    if norm not in (None, 2, math.inf, "token"):
        raise InvalidInput(f"bounds are known for the norms 2, inf and 'token', got {norm}.")
    where = setting(attention, n=n, over=over)
    asked = [bound for bound in CATALOGUE.values() if bound.norm == norm or (norm is None and bound.norm != "token")]
    refused = {bound.name: reason for bound in asked if (reason := bound.refusal(where, per_head)) is not None}
    if norm is None:
        others = [bound for bound in CATALOGUE.values() if bound.norm == "token"]
        refused |= {bound.name: bound.refusal(where, per_head) or "is for norm='token'" for bound in others}
    values = evaluated([bound for bound in asked if bound.name not in refused], where, per_head)
    rows = [row for name, numbers in values.items() for row in _bound_rows(CATALOGUE[name], numbers, per_head)]
    if not rows and where.tokens is None and where.x is None:
        given = "the weights" if where.n is None else "n"
        raise InvalidInput(
            f"no bound of {where.kind} attention can be had from {given} alone: give a set (over), such as "
            "Ball(1.0), the LayerNorm before it, or an input."
        )
    norms = dict.fromkeys([2.0] * (norm in (None, 2)) + [row.norm for row in rows] + [norm or 2.0])
    measurements = measurements_at(where, list(norms), per_head, rtol, seed)
    for m in measurements.values():
        rows += _rows("measured", m.value, per_head, "measured", m.norm, "point", *_measured(m), m.lower_holds)
    return Table(_ranked(rows, measurements), where, measurements, refused)


def with_witness(before: Table, x: Tensor, name: str, *, per_head: bool = False, seed: int = 0) -> Table:
    """The table with the norm at an input of its set as one more lower bound on that set.

    Args:
        x: as many tokens as the table is for, all in its set. name: of the new row.
    """
    m = measurements_at(replace(before.setting, x=x), [2.0], per_head, seed=seed)[2.0]
    new = _rows(name, m.lower, per_head, "lower", m.norm, "ball", *_measured(m), m.lower_holds)
    rows = [*(replace(row, ratio=None) for row in before.rows), *new]
    return replace(before, rows=_ranked(rows, before.measurements))


def _bound_rows(bound: Bound, values: Tensor, per_head: bool) -> list[BoundRow]:
    facts = (bound.norm, bound.scope, bound.reference, bound.statement, bound.guarantee(per_head))
    rows = _rows(bound.name, values, per_head, bound.side, *facts)
    return [row for row in rows if bound.side == "upper" or row.value > 0]


def _rows(
    name: str,
    values: Tensor,
    per_head: bool,
    kind: Kind,
    norm: NormKind,
    scope: str,
    reference: str,
    statement: str,
    guarantee: Guarantee,
) -> list[BoundRow]:
    """One row for each head, or that of the block."""
    facts = (kind, norm if isinstance(norm, str) else float(norm), scope, reference, statement)
    numbers = enumerate(values.reshape(-1).tolist())
    return [
        BoundRow(name, value, *facts, head=head if per_head else None, guarantee=guarantee) for head, value in numbers
    ]


def _measured(m: Measurement) -> tuple[str, str]:
    """Reference and statement of a measurement."""
    return "howsmooth.measure", r"\|J(X)\|_\infty" if m.norm == math.inf else r"\|J(X)\|_2"


def _ranked(rows: Sequence[BoundRow], measurements: dict[float, Measurement]) -> tuple[BoundRow, ...]:
    """The rows with their ratios, tightest first."""
    known = _lower_ends(rows, measurements)
    return tuple(sorted((compared_with(row, known) for row in rows), key=_tightest_first))


def measurements_at(
    where: Setting, norms: Iterable[Any], per_head: bool = False, rtol: Positive = 1e-3, seed: Seed = 0
) -> dict[Any, Measurement]:
    """The measurement at x in each norm, in float64, since the bounds are about the exact map."""
    if where.x is None:
        return {}
    solve: Callable[..., Measurement] = (
        measure_heads if per_head and isinstance(where.attention, AttentionMap) else measure_map
    )
    exact = copy.deepcopy(where.attention).double()
    cheap = where.x.numel() <= _FEW_ROWS
    return {norm: solve(exact, where.point, norm, rtol=rtol, seed=seed) for norm in norms if norm == 2 or cheap}


def _lower_ends(rows: Iterable[BoundRow], measurements: dict[Any, Measurement]) -> list[BoundRow]:
    """All lower ends: lower bounds, and the lower ends of measurements."""
    ends = {norm: m.lower.reshape(-1).tolist() for norm, m in measurements.items()}
    measured = [replace(row, value=ends[row.norm][row.head or 0]) for row in rows if row.kind == "measured"]
    return measured + [row for row in rows if row.kind == "lower"]


def compared_with(row: BoundRow, known: Iterable[BoundRow]) -> BoundRow:
    """The row with its ratio to the largest of the known lower ends; an upper bound below it is refused."""
    below = [end for end in known if (end.norm, end.head) == (row.norm, row.head) and end.scope in _CONTAINS[row.scope]]
    best = max(below, key=lambda end: end.value, default=None)
    if best is None or best.value <= 0 or row.vacuous:
        return row
    if row.kind == "upper" and row.value < best.value * (1 - _ROUNDING):
        raise ContradictedBound(
            f"{row.name} says that the constant is at most {row.value:.6g}, but {best.name} ({SCOPES[best.scope]}) "
            f"reaches {best.value:.6g}: please report this attention and input."
        )
    return replace(row, ratio=row.value / best.value)


def _tightest_first(row: BoundRow) -> tuple[Any, int, int, float, str]:
    order, direction = _ORDER[row.kind]
    return row.norm, -1 if row.head is None else row.head, order, direction * row.value, row.name


def _norm_name(norm: float | str) -> int | str:
    if isinstance(norm, str):
        return norm
    return "inf" if math.isinf(norm) else int(norm)


def _escaped(text: str) -> str:
    special = {letter: rf"\{letter}" for letter in "_&%#$"} | {"₂": r"\textsubscript{2}"}
    return "".join(special.get(letter, letter) for letter in text)


def _latex_value(row: BoundRow) -> str:
    sign = {"upper": r"\le", "lower": r"\ge", "measured": r"\approx"}[row.kind]
    return r"$>10^{308}$" if row.vacuous else f"${sign} {_latex_number(row.value, _MARKS[row.kind][1])}$"


def _latex_number(value: float, rounding: str = ROUND_HALF_EVEN) -> str:
    digits, _, power = rounded(value, rounding, 4).partition("e")
    return digits if not power else rf"{digits}\times 10^{{{int(power)}}}"
