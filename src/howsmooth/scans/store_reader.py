"""Reading a store: requested rows only, each verified by its checksum."""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from sys import intern
from typing import Any

from howsmooth._util.common import printable
from howsmooth._util.sqlite_files import StoreError
from howsmooth.scans.schema import COLUMNS, STORE, WITH_SHARDS, checksum, fault, has

StoreRow = dict[str, Any]
_ORDER = (
    *("model", "model_sha256", "precision", "what", "layer", "head", "length", "window", "window_start", "text"),
    *("text_sha256", "value", "lower", "upper", "relative", "confidence", "converged", "proved", "bounds", "radius"),
    *("value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "seed", "rtol", "dtype", "seconds"),
    *("howsmooth", "input_energy"),
)
"""The fields of a row."""
_OF_SCAN = ("model", "model_sha256", "precision", "text", "text_sha256", "howsmooth")
_PLACE = 'scan = ? AND what = ? AND ifnull(layer, -1) = ? AND ifnull(head, -1) = ? AND "length" = ? AND "window" = ?'


class StoreReader:
    """The rows of an open store.

    Args:
        path: of the store, for messages.
        connection: to it.
        version: of its tables.
    """

    def __init__(self, path: Path | str, connection: sqlite3.Connection, version: int):
        self.path, self.version, self._db = path, version, connection

    def rows(
        self, scan: int | None = None, lengths: Collection[int] | None = None, *, energies: bool = True
    ) -> list[StoreRow]:
        """The cells of all scans or of one, of all lengths or of some, in the order of a table.

        ``bounds`` is a dictionary and ``input_energy`` a list; without ``energies``, which are most of a store, it is
        True where there are some.
        """
        starts = {values[:3]: values[3] for values in self.verified("windows")}
        templates = {row["id"]: _template(row) for row in self._chosen(scan)}
        where, given = ("", ()) if scan is None else ("WHERE scan = ?", (scan,))
        if lengths is not None:
            where += f"{' AND' if where else 'WHERE'} length IN ({', '.join(map(str, map(int, lengths)))})"
        extra = "input_energy" if energies else "input_energy IS NOT NULL"
        names = [intern(name) for name in COLUMNS["cells"]]
        ordered = []
        for values in self.verified("cells", where, given, (extra,)):
            number, what, layer, head, length, window = values[:6]
            if number not in templates:
                continue
            row = templates[number].copy()
            row.update(zip(names[1:-1], values[1:-2], strict=True))
            row["what"] = intern(what)
            row["window_start"] = starts.get((number, length, window))
            if row["window_start"] is None:
                raise self._damaged("cells", values, "has lost its window")
            row["converged"] = bool(row["converged"])
            row["bounds"] = self.bounds(values, row["bounds"])
            row["input_energy"] = self.shares(values, values[-1]) if energies else bool(values[-1]) or None
            cell = (-1 if layer is None else layer, what, -1 if head is None else head)
            ordered.append(((number, length, window, *cell), row))
        ordered.sort(key=lambda one: one[0])
        return [row for _, row in ordered]

    def energies(self, places: Iterable[tuple[int, int | None, int | None, int, int]]) -> Iterator[list[float]]:
        """The shares of tokens of heads, each named by scan, layer, head, length and window."""
        for scan, layer, head, length, window in places:
            key = (scan, "head", -1 if layer is None else layer, -1 if head is None else head, length, window)
            values = next(self.verified("cells", f"WHERE {_PLACE}", key, ("input_energy",), indexed=True), None)
            shares = None if values is None else self.shares(values, values[-1])
            if shares is None:
                raise self._error(f"{named('cells', key)} cannot be found any more")
            yield shares

    def count(self) -> int:
        """The number of cells."""
        return sum(row["cells"] or 0 for row in self._scans()) if self.version else len(list(self.verified("cells")))

    def windows(self, scan: int | None = None) -> list[StoreRow]:
        """The windows of all scans or of one, with their tokens."""
        of = {row["id"]: row for row in self._chosen(scan)}
        rows = []
        for values in sorted(self.verified("windows"), key=lambda values: values[:3]):
            number, length, window, start, tokens = values
            if number in of:
                row = {name: of[number][name] for name in ("model", "model_sha256", "text_sha256")}
                where = {"length": length, "window": window, "start": start}
                rows.append(row | where | {"tokens": list(map(str, self._parsed("windows", values, tokens, list)))})
        return rows

    def scans(self, scan: int | None = None) -> list[StoreRow]:
        """The identity of each scan, or of one: its number, model, text, their hashes, and its settings by name."""
        return [{name: row[name] for name in ("id", *_OF_SCAN, "settings")} for row in self._chosen(scan)]

    def check_whole(self) -> None:
        """Raise `StoreError` unless SQLite finds the pages in order, and every scan has the cells that it counted."""
        STORE.check_pages(self._db, self.path, thorough=not self.version)  # without checksums, the best there is
        if not self.version:
            return
        counted = {row["id"]: (row["cells"], row["tally"]) for row in self._scans()}
        there = dict.fromkeys(counted, (0, 0))
        for scan, sum_ in self._db.execute("SELECT scan, checksum FROM cells NOT INDEXED"):
            if scan not in there or not isinstance(sum_, int):
                raise self._error("a cell belongs to no scan")
            count, tally = there[scan]
            there[scan] = (count + 1, tally ^ sum_)
        for scan, *_, sum_ in self.verified("shards", extra=("checksum",)) if self.version >= WITH_SHARDS else ():
            if scan not in there:
                raise self._error("the note of a shard belongs to no scan")
            there[scan] = (there[scan][0], there[scan][1] ^ sum_)
        for scan, (count, tally) in counted.items():
            if there[scan][0] == count and there[scan][1] != tally:
                raise self._error(f"scan {scan} has lost a cell, or the note of which shard it is, for another one")
            if there[scan][0] != count:
                raise self._error(f"of scan {scan} there are {there[scan][0]} cells, not the {count} that were written")

    def shards(self) -> dict[int, tuple[int, int, str, int]]:
        """Scan → which part of it the store is: number, count, digest of the plan, and cells; none for whole scans."""
        if self.version >= WITH_SHARDS:
            return {values[0]: values[1:] for values in self.verified("shards")}
        with STORE.explained(self.path, reading=True):
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'shards'").fetchone():
                return {}
            columns = "model_sha256, text_sha256, number, count, plan, cells"
            noted = {row[:2]: row[2:] for row in self._db.execute(f"SELECT {columns} FROM shards")}
        keys = {row["id"]: (row["model_sha256"], row["text_sha256"]) for row in self._scans()}
        return {scan: noted[key] for scan, key in keys.items() if key in noted}

    def check_rows(self, scan: int) -> None:
        """Raise `StoreError` unless every cell and window of a scan is what was written."""
        for table in ("cells", "windows"):
            deque(self.verified(table, "WHERE scan = ?", (scan,)), maxlen=0)

    def verified(
        self,
        table: str,
        where: str = "",
        given: Sequence[Any] = (),
        extra: Sequence[str] = (),
        *,
        indexed: bool = False,
        name: str = "",
    ) -> Iterator[tuple[Any, ...]]:
        """The columns of rows in the order of `COLUMNS`, and others after them; an error names a damaged row."""
        columns = [f'"{one}"' if has(self.version, table, one) else "NULL" for one in COLUMNS[table]]
        kept = "checksum" if self.version else "NULL"
        source = f"{name or table} {'' if indexed else 'NOT INDEXED'}"
        width = len(columns)
        with STORE.explained(self.path, reading=True):
            for kept_sum, *values in self._db.execute(
                f"SELECT {', '.join([kept, *columns, *extra])} FROM {source} {where}", given
            ):
                if wrong := fault(table, values[:width], kept_sum, self.version):
                    raise self._damaged(table, values, wrong)
                yield tuple(values)

    def _chosen(self, scan: int | None) -> list[StoreRow]:
        """One scan, or all but those that are being measured anew."""
        return [row for row in self._scans() if (not row["pending"] if scan is None else row["id"] == scan)]

    def _scans(self) -> list[StoreRow]:
        rows = []
        for values in self.verified("scans"):
            row = dict(zip(COLUMNS["scans"], values, strict=True))
            row["pending"] = row["pending"] or 0
            settings = self._parsed("scans", values, row["settings"], dict)
            if not all(isinstance(settings.get(name), int | float) for name in ("seed", "rtol")):
                raise self._damaged("scans", values, "has no settings")
            rows.append(row | {"settings": settings, "written": row["settings"]})
        return sorted(rows, key=lambda row: row["id"])

    def bounds(self, values: Sequence[Any], text: str) -> dict[str, float | None]:
        """The bounds of a cell by name."""
        bounds = self._parsed("cells", values, text, dict)
        if not self.version and not all(isinstance(value, int | float | None) for value in bounds.values()):
            raise self._damaged("cells", values, "has bounds that are no numbers")
        return {intern(name): value for name, value in bounds.items()}

    def shares(self, values: Sequence[Any], text: str | None) -> list[float] | None:
        """The shares of tokens of a cell, proved by their own checksum."""
        if text is None:
            return None
        if not isinstance(text, str) or (self.version and checksum([text]) != values[-2]):
            raise self._damaged("cells", values, "has other shares of tokens than were written")
        shares: list[float] = self._parsed("cells", values, text, list)
        if not self.version and not all(isinstance(share, int | float) for share in shares):
            raise self._damaged("cells", values, "has shares of tokens that are no numbers")
        return shares

    def _parsed(self, table: str, values: Sequence[Any], text: Any, kind: type) -> Any:
        try:
            content = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            content = None
        if not isinstance(content, kind):
            raise self._damaged(table, values, f"cannot be read: {text!r:.40} is no {kind.__name__} in JSON")
        return content

    def _damaged(self, table: str, values: Sequence[Any], wrong: str) -> StoreError:
        return self._error(f"{named(table, values)} {wrong}")

    def _error(self, wrong: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged: {wrong}; `howsmooth report {self.path} --salvage` keeps what is whole."
        )


def named(table: str, values: Sequence[Any]) -> str:
    """A row by its place, as far as it can be read.

    >>> named("cells", (1, "head", 3, 7, 16, 0))
    'the head at layer 3, head 7, n = 16, window 0'
    """
    said = [printable(str(value))[:40] for value in values[:6]]
    if table == "cells":
        _, what, layer, head, length, window = said
        places = [f"layer {layer}"] * (values[2] is not None) + [f"head {head}"] * (values[3] is not None)
        return f"the {what} at {', '.join([*places, f'n = {length}', f'window {window}'])}"
    if table == "shards":
        return f"the note that scan {said[0]} is shard {said[1]}/{said[2]}"
    return f"window {said[2]} of {said[1]} tokens of scan {said[0]}" if table == "windows" else f"scan {said[0]}"


def _template(scan: StoreRow) -> StoreRow:
    """A row with all its fields in their order, those of its scan filled in."""
    known = {name: scan[name] for name in _OF_SCAN} | {name: scan["settings"][name] for name in ("seed", "rtol")}
    return {name: known.get(name) for name in _ORDER}
