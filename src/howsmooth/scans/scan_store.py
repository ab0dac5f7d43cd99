"""The store of scans: one SQLite file that survives a kill at any moment.

A scan is identified by content: the sha256 of the model's weights, that of the text, the settings and the version. Its
cells arrive in batches, each in one transaction together with the tokens of its window; a cell that is there is never
written again. One process writes at a time, any number may read. Requested rows only are read, each verified by its
checksum; a row that differs from the written one raises an error that names it.

Every row carries 64 bits of BLAKE2b over its columns, written as JSON: a number that was changed by anything but a scan
is found when it is read. A scan also counts its cells and keeps the exclusive or of their checksums, and of that of the
note which shard of a scan it is, so that a cell or a note that has vanished is missed. The shares of tokens, most of a
store, have a checksum of their own, and a row is proved without them.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any

from howsmooth._util.common import printable
from howsmooth._util.sqlite_files import MEMORY, FileFormat, StoreError, file_identity, write_ahead
from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import ScanCell, ScanSettings

_TYPED = {
    "scans": "id INTEGER PRIMARY KEY, model TEXT NOT NULL, model_sha256 TEXT NOT NULL, precision TEXT NOT NULL, "
    "text TEXT NOT NULL, text_sha256 TEXT NOT NULL, settings TEXT NOT NULL, howsmooth TEXT NOT NULL, "
    "pending INTEGER NOT NULL, cells INTEGER NOT NULL, tally INTEGER NOT NULL",
    "windows": "scan INTEGER NOT NULL, length INTEGER NOT NULL, window INTEGER NOT NULL, start INTEGER NOT NULL, "
    "tokens TEXT NOT NULL",
    "cells": "scan INTEGER NOT NULL, what TEXT NOT NULL, layer INTEGER, head INTEGER, length INTEGER NOT NULL, "
    "window INTEGER NOT NULL, value REAL NOT NULL, lower REAL NOT NULL, upper REAL, confidence REAL, "
    "converged INTEGER NOT NULL, proved REAL, bounds TEXT NOT NULL, radius REAL, value_path REAL, score_path REAL, "
    "value_share REAL, sink REAL, sink_token INTEGER, entropy REAL, dtype TEXT NOT NULL, seconds REAL NOT NULL, "
    "relative REAL, energy_sum INTEGER",
    "shards": "scan INTEGER PRIMARY KEY, number INTEGER NOT NULL, count INTEGER NOT NULL, plan TEXT NOT NULL, "
    "cells INTEGER NOT NULL",
}
COLUMNS: dict[str, dict[str, str]] = {
    table: dict(column.split(" ", 1) for column in columns.split(", ")) for table, columns in _TYPED.items()
}
"""Table → the columns under its checksum, in that order."""


def _typed(table: str) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS[table].items())


# The tables of a store are compared letter by letter with these. NULL differs from NULL in a key, so that missing
# layers and heads are written as -1 in the index.
_TABLES = f"""
CREATE TABLE scans ({_typed("scans")}, checksum INTEGER NOT NULL,
    UNIQUE (model_sha256, text_sha256, pending));
CREATE TABLE windows ({_typed("windows")}, checksum INTEGER NOT NULL,
    PRIMARY KEY (scan, length, window), FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE) WITHOUT ROWID;
CREATE TABLE cells (checksum INTEGER NOT NULL, {_typed("cells")}, input_energy TEXT,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE,
    FOREIGN KEY (scan, length, window) REFERENCES windows);
CREATE UNIQUE INDEX cell ON cells (scan, what, ifnull(layer, -1), ifnull(head, -1), length, window);
CREATE TABLE shards ({_typed("shards")}, checksum INTEGER NOT NULL,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE);
"""
STORE = FileFormat(
    name="store",
    writer="scan",
    application_id=0x68736D31,  # "hsm1"
    version=3,
    tables=_TABLES,
    remedy="`howsmooth report {path} --salvage` keeps what is whole",
)


_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def checksum(values: Iterable[Any]) -> int:
    """64 bits that change when any of the values does.

    >>> checksum([1, 2.0, None, "☃"])
    850597854711265880
    """
    written = _JSON.encode(list(values)).encode()
    return int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), "big", signed=True)


def summed(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is stored: its columns in their types, with its checksum."""
    kept = {name: _as_stored(row[name], kind) for name, kind in COLUMNS[table].items()}
    return kept | {"checksum": checksum(kept.values())}


def _as_stored(value: Any, kind: str) -> Any:
    """A value as SQLite gives it back."""
    if value is None or kind.startswith("TEXT"):
        return value
    if kind.startswith("REAL"):
        return None if math.isnan(value) else float(value)
    return int(value)


def fault(values: Sequence[Any], written: int) -> str:
    """The fault of a row with a wrong checksum, or ""."""
    try:
        return "" if checksum(values) == written else "is not what was written: its checksum differs"
    except TypeError:  # bytes where text was
        return "is not what was written: a column holds bytes"


StoreRow = dict[str, Any]
KEY = ("model_sha256", "text_sha256")
_ORDER = (
    *("model", "model_sha256", "precision", "what", "layer", "head", "length", "window", "window_start", "text"),
    *("text_sha256", "value", "lower", "upper", "relative", "confidence", "converged", "proved", "bounds", "radius"),
    *("value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "seed", "rtol", "dtype", "seconds"),
    *("howsmooth", "input_energy"),
)
"""The fields of a row."""
_OF_SCAN = ("model", "model_sha256", "precision", "text", "text_sha256", "howsmooth")
_SAME_PLACE = (
    'scan = ? AND what = ? AND ifnull(layer, -1) = ? AND ifnull(head, -1) = ? AND "length" = ? AND "window" = ?'
)


@dataclass(frozen=True)
class Identity:
    """The identity of a scan: its key in a store, and names to show."""

    model: str
    model_sha256: str
    precision: str
    text: str
    text_sha256: str
    settings: ScanSettings
    howsmooth: str


class Store:
    """A store file, open for writing (`Store.writing`) or for reading (`Store.reading`); ":memory:" for none.

    Args:
        path: of the store, for messages.
        connection: to it.
    """

    def __init__(self, path: Path | str, connection: sqlite3.Connection):
        self.path, self._db = path, connection
        self._identity = None if path == MEMORY else file_identity(path)

    @classmethod
    @contextmanager
    def writing(cls, path: Path | str) -> Iterator[Store]:
        """The store at a path, made when it is not there; no other process can write to it meanwhile."""
        if str(path).startswith("file:"):
            raise InvalidInput(
                f"{path} is an address, not a file: give the plain name of a store, for example s.sqlite."
            )
        with STORE.writing(path) as db:
            store = cls(path, db)
            if path != MEMORY:
                store.check_whole()
                write_ahead(db)
            yield store
            store._check_place()

    @classmethod
    @contextmanager
    def reading(cls, path: Path | str) -> Iterator[Store]:
        """An existing store as it is now; a scan may be writing to it at the same time."""
        if not Path(path).is_file():
            raise StoreError(f"there is no store {path}: make one with `howsmooth scan MODEL --out {path}`.")
        with STORE.reading(path) as db:
            store = cls(path, db)
            store.check_whole()
            yield store

    def begin(self, wanted: Identity, resume: bool = True) -> int:
        """The number of a scan in this store, new or taken up again.

        Args:
            resume: keep the cells that are there, which must have been measured with the same settings; otherwise
                measure anew beside them, until `finish` puts the new cells in their place. An interrupted attempt to
                measure anew is taken up again.
        """
        key = (wanted.model_sha256, wanted.text_sha256)
        with self._transaction():
            there = {row["pending"]: row for row in self.identities() if tuple(row[name] for name in KEY) == key}
            old, pending = there.get(0), there.get(1)
            current = old if resume else pending
            differing = _differences(wanted, current) if current is not None else []
            if differing and resume:
                raise StoreError(
                    f"{self.path} already holds {wanted.model} on this text with other settings "
                    f"({'; '.join(differing)}): choose another --out, or --no-resume to measure it anew."
                )
            if current is not None and not differing:
                for table in ("cells", "windows"):  # a scan does not go on beside damaged rows
                    deque(self.verified(table, "WHERE scan = ?", (current["id"],)), maxlen=0)
                return int(current["id"])
            if pending is not None and not resume:
                self._db.execute("DELETE FROM scans WHERE id = ?", (pending["id"],))
            number = 1 + max((row["id"] for row in self.identities()), default=0)
            new = {"settings": wanted.settings.to_json(), "pending": int(old is not None), "cells": 0, "tally": 0}
            put(self._db, "scans", {**vars(wanted), **new, "id": number})
            return number

    def finish(self, scan: int) -> None:
        """All that was asked for is measured: cells that were measured anew take the place of the old ones."""
        with self._transaction():
            row = self._scan(scan)
            if row["pending"]:
                where = " AND ".join(f"{name} = :{name}" for name in KEY)
                self._db.execute(f"DELETE FROM scans WHERE {where} AND id != :id", row)
                update_scan(self._db, row | {"pending": 0})

    def cells(self, scan: int) -> set[ScanCell]:
        """The cells of a scan that are there."""
        self._check_place()
        query = "SELECT what, layer, head, length, window FROM cells NOT INDEXED WHERE scan = ?"
        with STORE.explained(self.path):
            return {ScanCell(*row) for row in self._db.execute(query, (scan,))}

    def add(
        self, scan: int, start: int, tokens: Sequence[str], measured: Iterable[tuple[ScanCell, Mapping[str, Any]]]
    ) -> None:
        """Keep a batch of cells of one window, all or none; cells that are there stay as they are."""
        rows = [vars(cell) | _in_json(values) | {"scan": scan} for cell, values in measured]
        if not rows:
            return
        key = {"scan": scan, "length": rows[0]["length"], "window": rows[0]["window"]}
        self._check_place()
        with self._transaction():
            if not put_window(self._db, key | {"start": start, "tokens": json.dumps(list(tokens))}):
                raise StoreError(
                    f"window {key['window']} of {key['length']} tokens is another one in {self.path}, which was "
                    "cut by other code: choose another --out, or --no-resume to measure it anew."
                )
            about = self._scan(scan)
            for sum_ in filter(None, (put(self._db, "cells", row) for row in rows)):
                about["cells"] += 1
                about["tally"] ^= sum_
            update_scan(self._db, about)

    def check(self) -> None:
        """Raise `StoreError` unless the file is sound: SQLite's integrity_check, and the checksum of every row."""
        with STORE.explained(self.path):
            STORE.check_pages(self._db, self.path, thorough=True)
            if self._db.execute("PRAGMA foreign_key_check").fetchone() is not None:
                raise StoreError(f"the store {self.path} is damaged (a cell without its scan): scan into a new file.")
            self.check_whole()
            self.rows()

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
            row["bounds"] = {intern(name): value for name, value in json.loads(row["bounds"]).items()}
            row["input_energy"] = self.shares(values) if energies else bool(values[-1]) or None
            ordered.append(((number, length, window, _order(layer), what, _order(head)), row))
        ordered.sort(key=lambda one: one[0])
        return [row for _, row in ordered]

    def energies(self, places: Iterable[tuple[int, int | None, int | None, int, int]]) -> Iterator[list[float]]:
        """The shares of tokens of heads, each named by scan, layer, head, length and window."""
        for scan, layer, head, length, window in places:
            place = (scan, "head", layer, head, length, window)
            values = self.cell(place)
            shares = None if values is None else self.shares(values)
            if shares is None:
                raise self._error(f"{named('cells', place)} cannot be found any more")
            yield shares

    def cell(self, place: Sequence[Any]) -> tuple[Any, ...] | None:
        """The columns of a cell and its shares of tokens, by scan, what, layer, head, length and window."""
        scan, what, layer, head, *window = place
        key = (scan, what, _order(layer), _order(head), *window)
        return next(self.verified("cells", f"WHERE {_SAME_PLACE}", key, ("input_energy",), indexed=True), None)

    def count(self) -> int:
        """The number of cells."""
        return sum(row["cells"] for row in self.identities())

    def windows(self, scan: int | None = None) -> list[StoreRow]:
        """The windows of all scans or of one, with their tokens."""
        of = {row["id"]: {name: row[name] for name in ("model", *KEY)} for row in self._chosen(scan)}
        return [
            of[number] | {"length": length, "window": window, "start": start, "tokens": json.loads(tokens)}
            for number, length, window, start, tokens in sorted(self.verified("windows"))
            if number in of
        ]

    def scans(self, scan: int | None = None) -> list[StoreRow]:
        """The identity of each scan, or of one: its number, model, text, their hashes, and its settings by name."""
        return [row | {"settings": json.loads(row["settings"])} for row in self._chosen(scan)]

    def check_whole(self) -> None:
        """Raise `StoreError` unless SQLite finds the pages in order, and every scan has the cells that it counted."""
        STORE.check_pages(self._db, self.path)
        counted = {row["id"]: (row["cells"], row["tally"]) for row in self.identities()}
        there = dict.fromkeys(counted, (0, 0))
        for scan, sum_ in self._db.execute("SELECT scan, checksum FROM cells NOT INDEXED"):
            if scan not in there or not isinstance(sum_, int):
                raise self._error("a cell belongs to no scan")
            count, tally = there[scan]
            there[scan] = (count + 1, tally ^ sum_)
        for scan, *_, sum_ in self.verified("shards", extra=("checksum",)):
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
        return {values[0]: values[1:] for values in self.verified("shards")}

    def verified(
        self,
        table: str,
        where: str = "",
        given: Sequence[Any] = (),
        extra: Sequence[str] = (),
        *,
        indexed: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """The columns of rows in the order of `COLUMNS`, and others after them; an error names a damaged row."""
        columns = [f'"{name}"' for name in COLUMNS[table]]
        source = f"{table} {'' if indexed else 'NOT INDEXED'}"
        query = f"SELECT {', '.join(['checksum', *columns, *extra])} FROM {source} {where}"
        with STORE.explained(self.path, reading=True):
            for written, *values in self._db.execute(query, given):
                if wrong := fault(values[: len(columns)], written):
                    raise self._damaged(table, values, wrong)
                yield tuple(values)

    def _chosen(self, scan: int | None) -> list[StoreRow]:
        """One scan, or all but those that are being measured anew."""
        return [row for row in self.identities() if (not row["pending"] if scan is None else row["id"] == scan)]

    def identities(self) -> list[StoreRow]:
        """Every scan as it is stored, those that are being measured anew too."""
        rows = [dict(zip(COLUMNS["scans"], values, strict=True)) for values in self.verified("scans")]
        return sorted(rows, key=lambda row: row["id"])

    def shares(self, values: Sequence[Any]) -> list[float] | None:
        """The shares of tokens of a cell, the last of its values, proved by their own checksum, the one before."""
        *_, written, text = values
        if text is None:
            return None
        if not isinstance(text, str) or checksum([text]) != written:
            raise self._damaged("cells", values, "has other shares of tokens than were written")
        shares: list[float] = json.loads(text)
        return shares

    def _damaged(self, table: str, values: Sequence[Any], wrong: str) -> StoreError:
        return self._error(f"{named(table, values)} {wrong}")

    def _error(self, wrong: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged: {wrong}; `howsmooth report {self.path} --salvage` keeps what is whole."
        )

    def note_shard(self, scan: int, values: tuple[int, int, str, int]) -> None:
        """Write of which part of a scan the cells are; within a transaction."""
        about = self._scan(scan)
        about["tally"] ^= put(self._db, "shards", dict(zip(COLUMNS["shards"], (scan, *values), strict=True))) or 0
        update_scan(self._db, about)

    def _scan(self, number: int) -> StoreRow:
        return next(row for row in self.identities() if row["id"] == number)

    def _check_place(self) -> None:
        """Refuse to go on when the file that is open is no longer the one with its name."""
        if self.path != MEMORY and file_identity(self.path) != self._identity:
            raise StoreError(
                f"{self.path} was removed, renamed or replaced while the scan was writing to it, so that nothing can "
                "be kept there: run the same command again, and leave the store alone until it ends."
            )

    def _transaction(self) -> AbstractContextManager[None]:
        return STORE.transaction(self._db, self.path)


def _differences(wanted: Identity, stored: StoreRow) -> list[str]:
    """The settings that differ, in words."""
    old = json.loads(stored["settings"]) | {"howsmooth": stored["howsmooth"]}
    new = json.loads(wanted.settings.to_json()) | {"howsmooth": wanted.howsmooth}
    return [f"{name} {old.get(name)}, not {new[name]}" for name in new if old.get(name) != new[name]]


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a cell as its row has them: bounds and shares of tokens in JSON."""
    shares = values["input_energy"]
    return {
        **values,
        "bounds": json.dumps(values["bounds"]),
        "input_energy": None if shares is None else json.dumps(shares),
    }


def update_scan(db: sqlite3.Connection, row: StoreRow) -> None:
    """Write what a scan counts anew, with its checksum."""
    counted = "pending = :pending, cells = :cells, tally = :tally, checksum = :checksum"
    db.execute(f"UPDATE scans SET {counted} WHERE id = :id", summed("scans", row))


def put_window(db: sqlite3.Connection, row: Mapping[str, Any]) -> bool:
    """Write a window unless it is there; whether the one that is there is this one."""
    put(db, "windows", row)
    query = "SELECT start, tokens FROM windows WHERE scan = :scan AND length = :length AND window = :window"
    return bool(db.execute(query, row).fetchone() == (row["start"], row["tokens"]))


def put(db: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int | None:
    """Write a row with its checksum, and give it back; None where there is one in its place, which stays."""
    extra: dict[str, Any] = {}
    if table == "cells":
        energy = row["input_energy"]
        extra = {"input_energy": energy}
        row = {**row, "energy_sum": None if energy is None else checksum([energy])}
    stored = summed(table, row) | extra
    names = ", ".join(f'"{name}"' for name in stored)
    values = ", ".join(f":{name}" for name in stored)
    done = db.execute(f"INSERT INTO {table} ({names}) VALUES ({values}) ON CONFLICT DO NOTHING", stored)
    return int(stored["checksum"]) if done.rowcount else None


def named(table: str, values: Sequence[Any]) -> str:
    """A row by its place, as far as it can be read.

    >>> named("cells", (1, "head", 3, 7, 16, 0))
    'the head at layer 3, head 7, n = 16, window 0'
    """
    shown = [printable(str(value))[:40] for value in values[:6]]
    if table == "cells":
        _, what, layer, head, length, window = shown
        places = [f"layer {layer}"] * (values[2] is not None) + [f"head {head}"] * (values[3] is not None)
        return f"the {what} at {', '.join([*places, f'n = {length}', f'window {window}'])}"
    if table == "shards":
        return f"the note that scan {shown[0]} is shard {shown[1]}/{shown[2]}"
    return f"window {shown[2]} of {shown[1]} tokens of scan {shown[0]}" if table == "windows" else f"scan {shown[0]}"


def _order(number: int | None) -> int:
    """A layer or head for sorting, and in the index: -1 for none."""
    return -1 if number is None else number


def _template(scan: StoreRow) -> StoreRow:
    """A row with all its fields in their order, those of its scan filled in."""
    settings = json.loads(scan["settings"])
    known = {name: scan[name] for name in _OF_SCAN} | {name: settings[name] for name in ("seed", "rtol")}
    return {name: known.get(name) for name in _ORDER}
