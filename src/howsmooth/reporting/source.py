"""What a report is made from: the rows of a scan, put into groups that belong on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from howsmooth.errors import InvalidInput

Row = dict[str, Any]
Cell = tuple[str, int | None, int | None]
"""What is measured, its layer and its head."""
_NEEDED = ("model", "what", "length", "value")


class ScanLike(Protocol):
    """Anything with the rows of a scan; ``tokens`` and ``energies`` are used where it has them."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per cell."""
        ...


Source = ScanLike | Iterable[Mapping[str, Any]] | str | PathLike[str]


@dataclass(frozen=True)
class Group:
    """The cells of one model on one text, measured in one way.

    Attributes:
        model, precision, text: as the scan names them.
        rows: one dictionary per cell; ``bounds`` is a dictionary of finite numbers.
        tokens: (length, window) → tokens.
        energies: (layer, head, length, window) → share of each token in the worst direction.
        settings: what else the scan says about how it was made.
    """

    model: str
    precision: str
    text: str
    rows: list[Row]
    tokens: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)
    energies: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model with its precision, for wherever its numbers stand."""
        return f"{self.model} [{self.precision}]" if self.precision else self.model

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens, rising."""
        return sorted({row["length"] for row in self.rows})

    @property
    def kinds(self) -> list[str]:
        """What was measured, heads first, then from the block to the model."""
        order = ["head", "attention", "residual", "mlp", "layer", "prefix", "model", "logits"]
        found = {row["what"] for row in self.rows}
        return [kind for kind in order if kind in found] + sorted(found - set(order))

    def of(self, cell: Cell) -> list[Row]:
        """All rows of a cell: every length and window."""
        return [row for row in self.rows if cell_of(row) == cell]

    def counts(self, what: str) -> dict[int, int]:
        """How many cells of a kind were measured at each length."""
        cells = {(row["length"], cell_of(row)) for row in self.rows if row["what"] == what}
        return {n: sum(length == n for length, _ in cells) for n in self.lengths}

    def main_length(self, what: str) -> int:
        """The longest length at which most cells of a kind were measured: a scan may have stopped amid a longer one."""
        counts = self.counts(what)
        return max(n for n in counts if counts[n] == max(counts.values()))

    def roughest(self, what: str, length: int | None = None) -> list[Row]:
        """One row per cell at a length (by default the main one): of its windows the roughest. Roughest cell first.

        >>> rows = [{"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": v} for v in (1.0, 2.0)]
        >>> [row["value"] for row in groups(rows)[0].roughest("head")]
        [2.0]
        """
        length = self.main_length(what) if length is None else length
        rows = [row for row in self.rows if (row["what"], row["length"]) == (what, length)]
        best: dict[Cell, Row] = {}
        for row in sorted(rows, key=lambda row: -row["value"]):
            best.setdefault(cell_of(row), row)
        return list(best.values())


def cell_of(row: Mapping[str, Any]) -> Cell:
    """What, where: without the length and the window."""
    return row["what"], row.get("layer"), row.get("head")


def groups(source: Source) -> list[Group]:
    """The scan as groups, in the order in which they were measured.

    Args:
        source: a store file, a `Scan`, or rows.

    >>> row = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}
    >>> [group.model for group in groups([row, row | {"model": "other"}])]
    ['m', 'other']
    """
    scan = opened(source)
    given = scan.rows if hasattr(scan, "rows") else scan
    found: dict[tuple[Any, ...], Group] = {}
    settings = dict(getattr(scan, "settings", None) or {})
    for raw in given:
        row = _row(raw)
        if not math.isfinite(row["value"]):
            continue
        key = tuple(row.get(name) for name in ("model", "model_sha256", "precision", "text_sha256", "dtype", "rtol"))
        if key not in found:
            named = (row["model"], row.get("precision") or "", row.get("text") or "")
            found[key] = Group(*named, rows=[], settings=settings)
        found[key].rows.append(row)
        place: tuple[Any, ...] = (row.get("layer"), row.get("head"), row["length"], row["window"])
        energy = row.pop("input_energy", None) or _looked_up(scan, "energies", row, place)
        if energy is not None and row["what"] == "head":
            found[key].energies[place] = json.loads(energy) if isinstance(energy, str) else list(energy)
        tokens = _looked_up(scan, "tokens", row, place[2:])
        if tokens is not None:
            found[key].tokens.setdefault(place[2:], json.loads(tokens) if isinstance(tokens, str) else list(tokens))
    if not found:
        raise InvalidInput("the scan holds no measured cell: run `howsmooth scan` first, or let it finish.")
    return list(found.values())


def opened(source: Source) -> Any:
    """The scan of a store file; anything else as it is."""
    if not isinstance(source, str | PathLike):
        return source
    path = Path(source)
    if not path.is_file():
        raise InvalidInput(f"there is no scan at {path}: make one with `howsmooth scan MODEL --out {path}`.")
    from howsmooth.scanning import Scan

    return Scan.open(path)


def _row(raw: Mapping[str, Any]) -> Row:
    missing = [name for name in _NEEDED if raw.get(name) is None]
    if missing:
        raise InvalidInput(f"a row of the scan lacks {missing[0]!r}: reports are made from rows of `howsmooth scan`.")
    row = {"window": 0} | dict(raw)
    bounds = row.get("bounds") or {}
    bounds = json.loads(bounds) if isinstance(bounds, str) else bounds
    row["bounds"] = {name: float(value) for name, value in bounds.items() if _number(value)}
    return row


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _looked_up(scan: Any, name: str, row: Row, place: tuple[Any, ...]) -> Any:
    """What a scan keeps beside its rows: by model, text and place, or by model and place where there is one text."""
    table = getattr(scan, name, None) or {}
    return table.get((row["model"], row.get("text_sha256"), *place)) or table.get((row["model"], *place))
