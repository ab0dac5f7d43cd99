"""Two scans side by side, or a series of them: what changed, by how much, and what is only noise.

A value σ is known between its ends, a ≤ σ_A ≤ a' and b ≤ σ_B ≤ b', so that the ratio σ_B/σ_A lies between b/a' and
b'/a. The factor that is *certain* is the end nearer to 1, and 1 itself where the ends contain it: what the solver may
have added or left out is never called a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from howsmooth._util.display import grid
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import check_positive, validated
from howsmooth.errors import InvalidInput
from howsmooth.scans.scan_result import CELL, Scan, rounding_of
from howsmooth.scans.scan_store import StoreRow

_IN_NOTEBOOK = 20
LIMIT = 2.0
"""A map whose roughness has changed by more than this factor stands out."""


class Place(NamedTuple):
    """A map of a model: its kind, and its layer and head where it has them."""

    what: str
    layer: int | None
    head: int | None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}"
        if self.what == "head":
            return f"{layer}, head {self.head}"
        return f"{self.what} of {layer}" if layer else f"the {self.what}"


@dataclass(frozen=True)
class Change:
    """The change of a map, in the cell where it is most certain.

    Attributes:
        place: which map.
        length, window: of that cell.
        before, after: σ there, in the first and in the last scan.
        values: σ there, in every scan.
        ratio: after / before.
        least, most: the ratio lies between them, as sure as the ends of both values are.
        cells: how many cells of this map were compared.
    """

    place: Place
    length: int
    window: int
    values: tuple[float, ...]
    ratio: float
    least: float
    most: float
    cells: int

    @property
    def before(self) -> float:
        return self.values[0]

    @property
    def after(self) -> float:
        return self.values[-1]

    @property
    def certain(self) -> float:
        """The factor by which σ has changed at least: 1 where it may not have changed at all."""
        return self.least if self.least > 1 else min(self.most, 1.0)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of both ends of the ratio, apart from the probability of the upper ends of the values."""
        return rounding_of(self.place.what)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts; None where a ratio has no bound."""
        plain = asdict(self) | {"values": list(self.values), "certain": self.certain}
        plain |= {"guarantee": self.guarantee.name.lower()}
        plain |= {"before": self.before, "after": self.after, **plain.pop("place")._asdict()}
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in plain.items()}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        names: of the scans, in their order.
        changes: one per map, those that have changed most first.
        missing: how many cells only some of the scans have.
        limit: the factor beyond which a map stands out.
    """

    names: tuple[str, ...]
    changes: tuple[Change, ...]
    missing: int
    limit: float

    @property
    def rougher(self) -> tuple[Change, ...]:
        """Maps that are certainly more than ``limit`` times as rough as before."""
        return tuple(change for change in self.changes if change.certain > self.limit)

    @property
    def smoother(self) -> tuple[Change, ...]:
        """Maps that are certainly more than ``limit`` times as smooth as before."""
        return tuple(change for change in self.changes if change.certain < 1 / self.limit)

    def headline(self) -> str:
        """The result in one sentence."""
        beyond = sorted((*self.rougher, *self.smoother), key=_importance)
        changed = sum(change.certain != 1 for change in self.changes)
        rest = f"{changed} of {len(self.changes)} maps have changed by more than their ends"
        if not beyond:
            return f"No map of {self.names[-1]} differs from {self.names[0]} by more than {self.limit:g} times; {rest}."
        first = beyond[0]
        word, factor = ("rougher", first.ratio) if first.ratio > 1 else ("smoother", 1 / first.ratio)
        others = "" if len(beyond) == 1 else f" {len(beyond) - 1} more differ by more than {self.limit:g} times;"
        where = str(first.place)[0].upper() + str(first.place)[1:]
        change = f"{where} has become {factor:.3g} times {word}, from {first.before:.3g} to {first.after:.3g};"
        return f"{change}{others} {rest}."

    def _repr_html_(self) -> str:
        """The maps that have changed most, with the factor and its ends."""
        rows = [
            (str(change.place), f"{change.length}", *(f"{value:.4g}" for value in change.values), _said(change))
            for change in self.changes[:_IN_NOTEBOOK]
        ]
        more = [f"{len(self.changes) - _IN_NOTEBOOK} more have changed less."] * (len(self.changes) > _IN_NOTEBOOK)
        return grid(self.headline(), ("map", "tokens", *self.names, "factor"), rows, more)

    def to_dict(self) -> dict[str, Any]:
        """The comparison for a JSON file."""
        return {
            "scans": list(self.names),
            "limit": self.limit,
            "headline": self.headline(),
            "missing": self.missing,
            "rougher": [str(change.place) for change in self.rougher],
            "smoother": [str(change.place) for change in self.smoother],
            "changes": [change.to_dict() for change in self.changes],
        }


@validated
def compare(*scans: Scan | Path | str, names: Sequence[str] | None = None, limit: float = LIMIT) -> Comparison:
    """Compare scans map by map, the last with the first.

    Args:
        scans: two or more, each a `Scan` or the path of a store; the first is what the others are compared with.
        names: what to call them; by default the models, or the stores where the models have one name.
        limit: the factor beyond which a change stands out.

    >>> import howsmooth as hs
    >>> one, other = (hs.scan(f"random:bert[layers=1,width=16,heads=2,seed={seed}]", lengths=8) for seed in (0, 1))
    >>> [change.certain for change in compare(one, one).changes]
    [1.0, 1.0]
    >>> compare(one, other).changes[0].certain == 1
    False
    """
    if len(scans) < 2:
        raise InvalidInput("compare takes at least two scans: the one before and the one after.")
    check_positive(limit, "limit")
    if limit < 1:
        raise InvalidInput(f"limit is a factor, at least 1, got {limit:g}.")
    opened = [scan if isinstance(scan, Scan) else Scan.open(scan) for scan in scans]
    called = tuple(names) if names is not None else _names(scans, opened)
    if len(called) != len(scans):
        raise InvalidInput(f"{len(scans)} scans need as many names, got {len(called)}.")
    by_cell = [_by_cell(scan, name) for scan, name in zip(opened, called, strict=True)]
    _check_same(opened, called)
    shared = [cell for cell in by_cell[0] if all(cell in others for others in by_cell)]
    if not shared:
        raise InvalidInput(f"{called[0]} and {called[-1]} have no cell in common: measure the same lengths and layers.")
    changes: dict[Place, list[Change]] = {}
    for cell in shared:
        rows = [of[cell] for of in by_cell]
        if len({row.get("window_start") for row in rows}) > 1:
            raise InvalidInput(
                f"{called[0]} and {called[-1]} read different windows of the text: measure both with one seed, and "
                "with the same tokens."
            )
        place = Place(*cell[:3])
        changes.setdefault(place, []).append(_change(place, rows, *cell[3:]))
    every = set().union(*by_cell)
    most = [min(of_map, key=_importance) for of_map in changes.values()]
    counted = [replace(change, cells=len(changes[change.place])) for change in most]
    return Comparison(called, tuple(sorted(counted, key=_importance)), len(every) - len(shared), float(limit))


def _said(change: Change) -> str:
    return f"{change.ratio:.3g} (at least {change.least:.3g}, at most {change.most:.3g}, {change.guarantee.words()})"


def _importance(change: Change) -> tuple[float, float]:
    """For sorting: what is certain first, then what is measured."""
    return -abs(_log(change.certain)), -abs(_log(change.ratio))


def _log(ratio: float) -> float:
    return math.log(ratio) if 0 < ratio < math.inf else 0.0 if math.isnan(ratio) else math.inf


def _change(place: Place, rows: Sequence[StoreRow], length: int, window: int) -> Change:
    before, after = rows[0], rows[-1]
    upper = math.inf if after["upper"] is None else after["upper"]
    return Change(
        place,
        length,
        window,
        tuple(row["value"] for row in rows),
        ratio=_ratio(after["value"], before["value"]),
        least=0.0 if before["upper"] is None else _ratio(after["lower"], before["upper"]),
        most=_ratio(upper, before["lower"]),
        cells=1,
    )


def _ratio(after: float, before: float) -> float:
    """after / before; 1 where both are zero."""
    if before == 0:
        return 1.0 if after == 0 else math.inf
    return after / before


def _by_cell(scan: Scan, name: str) -> dict[tuple[Any, ...], StoreRow]:
    rows = {tuple(row[key] for key in CELL): row for row in scan.rows}
    if len(rows) < len(scan.rows):
        raise InvalidInput(f"{name} holds several models or texts: compare stores of one model on one text each.")
    return rows


def _check_same(scans: Sequence[Scan], names: Sequence[str]) -> None:
    """Numbers compare when they were measured alike."""
    differences = {
        "howsmooth": "were measured by different versions ({} and {})",
        "text_sha256": "read different texts",
    }
    for fact, words in differences.items():
        first, *others = (", ".join(sorted({str(row[fact]) for row in scan.rows})) for scan in scans)
        for name, other in zip(names[1:], others, strict=True):
            if other != first:
                raise InvalidInput(f"{names[0]} and {name} {words.format(first, other)}: measure one of them anew.")


def _names(given: Sequence[Scan | Path | str], scans: Sequence[Scan]) -> tuple[str, ...]:
    models = tuple(" and ".join(dict.fromkeys(row["model"] for row in scan.rows)) for scan in scans)
    if len(set(models)) == len(models):
        return models
    return tuple(f"scan {number}" if isinstance(one, Scan) else str(one) for number, one in enumerate(given, start=1))
