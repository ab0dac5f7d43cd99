"""Rows of a scan by model and text: the groups that a report is made from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from howsmooth._util.validation import shown, validated
from howsmooth.errors import InvalidInput
from howsmooth.models.random_models import RANDOM_TWIN
from howsmooth.scans import Scan
from howsmooth.scans.scan_result import Shares

Row = dict[str, Any]
Cell = tuple[str, int | None, int | None]
"""A map: its kind, its layer and its head."""
KINDS = {
    "head": "head",
    "attention": "attention block",
    "residual": "residual block",
    "mlp": "MLP",
    "layer": "layer",
    "prefix": "stack from the embeddings",
    "model": "model",
    "logits": "model with its head",
}
"""Kinds of maps → words for them, in the order in which they are shown."""
_NEEDED = ("model", "what", "length", "value")


@runtime_checkable
class ScanLike(Protocol):
    """Anything with the rows of a scan; ``tokens`` and ``energies`` are used where it has them."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per cell."""
        ...


@dataclass(frozen=True)
class Group:
    """The cells of one model on one text, measured in one way.

    Attributes:
        model, precision, text: as the scan names them.
        rows: one dictionary per cell; ``bounds`` is a dictionary of finite numbers.
        tokens: (length, window) → tokens.
        energies: (layer, head, length, window) → share of each token in the worst direction.
        settings: other settings of the scan.
        reference: the same architecture with random weights on the same text, where that was scanned too.
    """

    model: str
    precision: str
    text: str
    rows: list[Row]
    tokens: dict[tuple[Any, ...], list[str]]
    energies: Shares
    settings: dict[str, Any]
    reference: Group | None = None

    @property
    def label(self) -> str:
        """The model with its precision, for wherever its numbers stand."""
        return f"{self.model} [{self.precision}]" if self.precision else self.model

    @cached_property
    def lengths(self) -> list[int]:
        """Numbers of tokens, rising."""
        return sorted({row["length"] for row in self.rows})

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of maps that were measured, heads first, then from the block to the model."""
        measured = {row["what"] for row in self.rows}
        return [kind for kind in KINDS if kind in measured] + sorted(measured - KINDS.keys())

    @property
    def main_kind(self) -> str:
        """The kind of map that a report begins with: heads where there are any."""
        return self.kinds[0]

    @cached_property
    def _grouped(self) -> dict[tuple[str, int], dict[Cell, list[Row]]]:
        """Kind and length → cell → its rows, the roughest window first; the roughest cell first."""
        grouped: dict[tuple[str, int], dict[Cell, list[Row]]] = {}
        for row in sorted(self.rows, key=lambda row: -row["value"]):
            grouped.setdefault((row["what"], row["length"]), {}).setdefault(cell_of(row), []).append(row)
        return grouped

    @cached_property
    def cells(self) -> dict[Cell, list[Row]]:
        """Cell → all its rows: every length and window, short ones first."""
        cells: dict[Cell, list[Row]] = {}
        for key in sorted(self._grouped, key=lambda key: key[1]):
            for cell, rows in self._grouped[key].items():
                cells.setdefault(cell, []).extend(rows)
        return cells

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Row (by id) → number of rougher windows of its cell at its length."""
        several = (rows for cells in self._grouped.values() for rows in cells.values())
        return {id(row): rank for rows in several for rank, row in enumerate(rows)}

    def counts(self, what: str) -> dict[int, int]:
        """Number of measured cells of a kind at each length."""
        return {n: len(self._grouped.get((what, n), ())) for n in self.lengths}

    def main_length(self, what: str | None = None) -> int:
        """The longest length with the most cells of a kind (by default the main one): a scan may have stopped within a
        longer one.
        """
        counts = self.counts(what or self.main_kind)
        return max(n for n in counts if counts[n] == max(counts.values()))

    def roughest(self, what: str | None = None, length: int | None = None) -> list[Row]:
        """One row per cell of a kind at a length (by default the main ones): of its windows the roughest. Roughest cell
        first.

        >>> rows = [{"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": v} for v in (1.0, 2.0)]
        >>> [row["value"] for row in groups(rows)[0].roughest("head")]
        [2.0]
        """
        length = self.main_length(what) if length is None else length
        return [rows[0] for rows in self._grouped.get((what or self.main_kind, length), {}).values()]


Source = ScanLike | Iterable[Mapping[str, Any]] | Sequence[Group] | str | PathLike[str]


def kind_name(kind: str) -> str:
    """A kind of map in words."""
    return KINDS.get(kind, kind)


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The map of a row, without its length and window."""
    return row["what"], row.get("layer"), row.get("head")


def place_of_row(row: Row) -> tuple[Any, ...]:
    """Layer, head, length and window of a row."""
    return row.get("layer"), row.get("head"), row["length"], row["window"]


@validated
def groups(source: Source) -> list[Group]:
    """The groups of a scan, in the order of measurement.

    Args:
        source: a store file, a `Scan`, rows, or groups, which stay as they are.

    >>> row = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}
    >>> [group.model for group in groups([row, row | {"model": "other"}])]
    ['m', 'other']
    """
    if isinstance(source, list) and all(isinstance(group, Group) for group in source):
        return _not_empty(source)
    scan = _open(source)
    given = scan.rows if hasattr(scan, "rows") else scan
    if not isinstance(given, Iterable):
        raise InvalidInput(f"a report is made from a store, a scan or rows, got {shown(source)}.")
    rows = [row for row in map(_row, given) if math.isfinite(row["value"])]
    settings, tokens = (getattr(scan, name, None) or {} for name in ("settings", "tokens"))
    shares = getattr(scan, "energies", None) or {
        (*_names_of(row)[0], *place_of_row(row)): row["input_energy"]
        for row in rows
        if row.get("input_energy") is not None
    }
    grouped: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        about = tuple(row.get(name) for name in ("model", "model_sha256", "precision", "text_sha256", "rtol"))
        if about not in grouped:
            named = (row["model"], row.get("precision") or "", row.get("text") or "")
            grouped[about] = Group(*named, [], {}, Shares({}, partial(_fetched, shares)), dict(settings))
        group, place = grouped[about], place_of_row(row)
        window = place[2:]
        group.rows.append(row)
        for names in _names_of(row):
            if row["what"] == "head" and (*names, *place) in shares:
                group.energies.keys_of.setdefault(place, (*names, *place))
            if window not in group.tokens and (*names, *window) in tokens:
                group.tokens[window] = list(tokens[*names, *window])
    return _not_empty(_with_references(list(grouped.values())))


def _with_references(scanned: list[Group]) -> list[Group]:
    """Groups of random twins as references of their originals; a twin without its original stays a group."""
    originals = {(group.model, group.text) for group in scanned}
    twins = {
        (group.model.removesuffix(RANDOM_TWIN), group.text): group
        for group in scanned
        if group.model.endswith(RANDOM_TWIN) and (group.model.removesuffix(RANDOM_TWIN), group.text) in originals
    }
    return [
        replace(group, reference=twins.get((group.model, group.text)))
        for group in scanned
        if not any(group is twin for twin in twins.values())
    ]


def _open(source: Source) -> Any:
    """The scan in a store file; any other source unchanged."""
    if not isinstance(source, str | PathLike):
        return source
    path = Path(source)
    if not path.is_file():
        raise InvalidInput(f"there is no scan at {path}: make one with `howsmooth scan MODEL --out {path}`.")
    return Scan.open(path)


def _row(raw: Mapping[str, Any]) -> Row:
    missing = [name for name in _NEEDED if raw.get(name) is None]
    if missing:
        raise InvalidInput(f"a row of the scan lacks {missing[0]!r}: reports are made from rows of `howsmooth scan`.")
    bounds = raw.get("bounds")
    if isinstance(raw, dict) and "window" in raw and isinstance(bounds, dict) and all(map(_number, bounds.values())):
        return raw  # as it is: a copy of every row of a large scan would not fit
    row = {"window": 0} | dict(raw)
    bounds = json.loads(bounds) if isinstance(bounds, str) else bounds or {}
    row["bounds"] = {name: float(value) for name, value in bounds.items() if _number(value)}
    return row


def _not_empty(scanned: list[Group]) -> list[Group]:
    if not scanned:
        raise InvalidInput("the scan holds no measured cell: run `howsmooth scan` first, or let it finish.")
    return scanned


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _names_of(row: Row) -> tuple[tuple[Any, ...], ...]:
    """Beginnings of the keys under which a scan stores tokens and shares: model and text, or model with one text."""
    return (row["model"], row.get("text_sha256")), (row["model"],)


def _fetched(table: Mapping[Any, Any], wanted: Sequence[Any]) -> list[list[float]]:
    """The shares of pairs of a cell and its key, in one read where the scan offers it."""
    several = getattr(table, "several", None)
    stored = table if several is None else several([key for _, key in wanted])
    return [stored[key] for _, key in wanted]
