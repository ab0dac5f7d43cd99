"""New stores from others: several joined into one, or the intact rows of a damaged one.

A merge holds every cell once, and joins nothing that was not measured in the same way. A scan that was cut into shards
leaves one store per shard, each with a note of which part it is; together they must be the whole scan. Stores without
such a note are joined as they are. The stores that are read stay as they are.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from howsmooth._util.common import distinct_files
from howsmooth._util.sqlite_files import Connection, StoreError, file_identity
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.scans.scan_store import COLUMNS, KEY, STORE, Store, StoreRow, named, put, put_window, update_scan
from howsmooth.scans.units import Shard, read_shards

_SAME = {"precision": "precision", "settings": "settings", "howsmooth": "version of howsmooth"}
"""Columns in which scans of one model on one text must agree to be one scan, in words."""
_CELL = (*COLUMNS["cells"], "input_energy")
_FREE = ("seconds", "energy_sum")
"""The columns of a cell that differ from run to run, how long it took, or with another column."""
_WIDEST_GAP = 1_000_000
"""Row numbers tried one by one between two that can be read."""
_NAMED = 5
_HEADER = {0: b"SQLite format 3\0", 16: b"\x10\x00", 20: b"\x00\x40\x20\x20", 44: b"\0\0\0\x04", 56: b"\0\0\0\x01"}
"""Bytes that are the same in every store: magic, page size, fractions of a page, format, UTF-8."""


class _NewStore:
    """A store that is being made of others; it counts the cells of its scans.

    Args:
        db: a connection to it, within a transaction.
    """

    def __init__(self, db: sqlite3.Connection):
        self.db = db
        self.scans: dict[int, StoreRow] = {}

    @property
    def cells(self) -> int:
        return sum(row["cells"] for row in self.scans.values())

    def add_scan(self, row: StoreRow) -> None:
        self.scans[row["id"]] = row | {"cells": 0, "tally": 0}
        put(self.db, "scans", self.scans[row["id"]])

    def add_cell(self, row: StoreRow) -> bool:
        """Write a cell unless there is one in its place; whether it was written."""
        written = put(self.db, "cells", row)
        if written is not None:
            self.scans[row["scan"]]["cells"] += 1
            self.scans[row["scan"]]["tally"] ^= written
        return written is not None


@contextmanager
def _new_store(out: Path) -> Iterator[_NewStore]:
    """A store beside ``out`` that takes its name when the block ends well, unless there is such a file by then."""
    if out.exists():
        raise StoreError(f"{out} is there already: remove it, or name another file for the new store.")
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}-{token_hex(8)}")
    try:
        with STORE.explained(out), closing(STORE.connect_writer(path)) as db:
            db.execute("BEGIN")
            new = _NewStore(db)
            yield new
            for row in new.scans.values():
                update_scan(db, row)
            db.execute("COMMIT")
        try:
            out.hardlink_to(path)  # refuses to replace
        except OSError:  # there is such a file by now, or links are not known here
            if out.exists():
                raise StoreError(f"{out} was made by somebody else meanwhile: name another file.") from None
            path.rename(out)
    finally:
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        store: the new one.
        stores, scans, cells: how many were read, and how many it holds.
        twice: cells that several stores held, all with the same numbers.
    """

    store: Path
    stores: int
    scans: int
    cells: int
    twice: int

    def __str__(self) -> str:
        more = f"; {self.twice} of them stood in several, with the same numbers" if self.twice else ""
        return f"{self.cells} cells of {self.scans} scan(s) from {self.stores} stores are in {self.store}{more}"


@validated
def merge(stores: Sequence[Path | str], out: Path | str, *, partial: bool = False) -> Merged:
    """Join stores into a new one.

    Args:
        stores: at least one; they are not changed.
        out: the new store, which must not be there.
        partial: also where shards of a scan are missing or unfinished.

    Raises:
        StoreError: a cell with two different numbers (it is named), scans with different settings or versions, shards
            that are missing, unfinished or given twice. Nothing is written then.
    """
    inputs, out = [Path(one) for one in stores], Path(out)
    if not inputs:
        raise InvalidInput("which stores? Name those to join.")
    _check_once(inputs)
    distinct_files(read=[("the store", one) for one in inputs], written=[("--out", out)])
    if not partial:
        _check_shards(inputs)
    origins: dict[int, Path] = {}
    with _new_store(out) as new:
        twice = sum(_join(new, origins, path) for path in inputs)
    return Merged(out, len(inputs), len(new.scans), new.cells, twice)


def _join(new: _NewStore, origins: dict[int, Path], path: Path) -> int:
    """Add all that a store holds; the number of its cells that were there already."""
    twice = 0
    with Store.reading(path) as store:
        numbers = {row["id"]: _number(new, origins, path, row) for row in store.identities()}
        for scan, *values in store.verified("windows"):
            row = dict(zip(COLUMNS["windows"], (numbers[scan], *values), strict=True))
            if not put_window(new.db, row):
                raise StoreError(
                    f"window {row['window']} of {row['length']} tokens is another one in {path} than in a store before "
                    "it: they were cut by different code and cannot be joined."
                )
        for scan, *values in store.verified("cells", extra=("input_energy",)):
            store.shares(values)  # proved by their own checksum
            cell = (numbers[scan], *values)
            if not new.add_cell(dict(zip(_CELL, cell, strict=True))):
                twice += 1
                _check_equal(new, cell, path)
    return twice


def _number(new: _NewStore, origins: dict[int, Path], path: Path, row: StoreRow) -> int:
    """The number of a scan in the new store; ``origins`` are the stores in which the scans stood first."""
    if row["pending"]:
        raise StoreError(f"{path} holds a scan that is being measured anew: let it end first.")
    same = (scan for scan in new.scans.values() if all(scan[name] == row[name] for name in KEY))
    number = next((scan["id"] for scan in same), None)
    if number is None:
        number = len(new.scans) + 1
        new.add_scan(row | {"id": number})
    there, origin = new.scans[number], origins.setdefault(number, path)
    for name, words in _SAME.items():
        if there[name] != row[name]:
            raise StoreError(
                f"{origin} and {path} hold {row['model']} on the same text with another {words} ({there[name]}, and "
                f"{row[name]}): join those that share it."
            )
    return int(number)


def _check_equal(new: _NewStore, cell: tuple[Any, ...], path: Path) -> None:
    """Refuse a cell with other numbers than the one in its place."""
    there = Store(path, new.db).cell(cell[:6]) or ()
    for name, old, other in zip(_CELL, there, cell, strict=True):
        if name not in _FREE and old != other:
            raise StoreError(
                f"{named('cells', cell)} has two different numbers ({name} {old!r:.30}, and {other!r:.30} in {path}): "
                "join stores that agree."
            )


def _check_once(paths: Sequence[Path]) -> None:
    """Refuse a store that is given twice, by one name or by two."""
    seen: dict[tuple[int, int] | None, Path] = {}
    for path in paths:
        file = file_identity(path)
        if file is not None and file in seen:
            twice = f"{path} is given twice" if seen[file] == path else f"{seen[file]} and {path} are one file"
            raise InvalidInput(f"{twice}: name each store once.")
        seen[file] = path


def _check_shards(paths: Sequence[Path]) -> None:
    """Refuse shards that are not together, once each and to the end, the whole of their scans."""
    parts: dict[Shard, list[tuple[Path, Shard]]] = {}
    for path in paths:
        for shard in read_shards(path):
            parts.setdefault(shard.whole, []).append((path, shard))
    for several in parts.values():
        seen: dict[int, Path] = {}
        for path, shard in several:
            if shard.number in seen:
                raise StoreError(f"{seen[shard.number]} and {path} are both shard {shard}: give each shard once.")
            seen[shard.number] = path
            if shard.there < shard.cells:
                raise StoreError(
                    f"{path}, shard {shard}, has {shard.there} of its {shard.cells} cells: run that shard again to "
                    "finish it, or --partial to join what is there."
                )
        count = several[0][1].count
        missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in seen]
        if missing:
            raise StoreError(
                f"shard{'s' * (len(missing) > 1)} {', '.join(missing[:8])}{' …' * (len(missing) > 8)} of "
                f"{several[0][0]}'s scan {'are' if len(missing) > 1 else 'is'} not among the stores: add what is "
                "missing, or --partial to join the rest."
            )


@dataclass(frozen=True)
class Salvaged:
    """The result of a salvage.

    Attributes:
        store: the new one.
        kept, written: intact cells, and cells that a scan had written, None where that number cannot be read.
        dropped: damaged parts, in words.
    """

    store: Path
    kept: int
    written: int | None
    dropped: list[str]

    def __str__(self) -> str:
        of = "cells" if self.written is None else f"of {self.written} cells"
        more = [f"and {len(self.dropped) - _NAMED} more"] if len(self.dropped) > _NAMED else []
        without = f", without {'; '.join([*self.dropped[:_NAMED], *more])}" if self.dropped else ""
        return f"{self.kept} {of} are whole and are kept in {self.store}{without}"


@validated
def salvage(path: Path | str, into: Path | str) -> Salvaged:
    """Keep every cell that is whole, with its scan and its window, in a new store.

    Args:
        path: the damaged store; it is not changed.
        into: the new store, which must not be there.
    """
    path, into = Path(path), Path(into)
    distinct_files(read=[("the store", path)], written=[("the new store", into)])
    if not path.is_file():
        raise StoreError(f"there is no store {path}.")
    with _new_store(into) as new, tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.sqlite")
        shutil.copyfile(path, copy)
        if Path(f"{path}-wal").is_file():
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        with STORE.explained(path, reading=True), closing(_opened(copy)) as old:
            pieces = Pieces(old)
            written = _copy(pieces, new)
        if not new.cells:
            raise StoreError(f"nothing in {path} is whole: scan again into a new file.")
    return Salvaged(into, new.cells, written, pieces.dropped)


def _copy(pieces: Pieces, new: _NewStore) -> int | None:
    """Add every row that is whole; the number of cells that were written once, None where it cannot be read."""
    scans = list(pieces.rows("scans"))
    windows: dict[tuple[int, int, int], bool] = {}
    for row in scans:
        new.add_scan(row)
    for row in pieces.rows("cells"):
        key = (row["scan"], row["length"], row["window"])
        if row["scan"] not in new.scans:
            continue
        if key not in windows:
            window = pieces.window(key)
            windows[key] = window is not None and put_window(new.db, window)
        if windows[key]:
            new.add_cell(row)
    for row in pieces.rows("shards"):
        if row["scan"] in new.scans:
            new.scans[row["scan"]]["tally"] ^= put(new.db, "shards", row) or 0
    return sum(row["cells"] for row in scans) if scans else None


def _opened(copy: Path) -> sqlite3.Connection:
    """A connection to a copy whose header and table definitions are those of every store."""
    with copy.open("r+b") as file:
        for offset, content in _HEADER.items():
            file.seek(offset)
            file.write(content)
    db = sqlite3.connect(copy, isolation_level=None, factory=Connection)
    with suppress(sqlite3.Error):
        db.execute("PRAGMA writable_schema = ON")
        db.execute(f"PRAGMA user_version = {STORE.version}")
        db.execute(f"PRAGMA application_id = {STORE.application_id}")
        for kind, name, _, sql in STORE.objects:
            db.execute("UPDATE sqlite_master SET sql = ? WHERE type = ? AND name = ?", (sql, kind, name))
        db.close()
        db = sqlite3.connect(copy, isolation_level=None, factory=Connection)
    return db


class Pieces:
    """The rows of a damaged store, one by one.

    Args:
        db: a connection to a copy of it.
    """

    def __init__(self, db: sqlite3.Connection):
        self.db = db
        self.dropped: list[str] = []
        self._store = Store("the store", db)

    def rows(self, table: str) -> Iterator[StoreRow]:
        """Every row of a table that is what was written; a cell without its shares where those alone are damaged."""
        extra = ["input_energy"] if table == "cells" else []
        for number in self._numbers(table):
            try:
                for values in self._store.verified(table, "WHERE rowid = ?", (number,), extra):
                    row = dict(zip([*COLUMNS[table], *extra], values, strict=True))
                    if table == "cells" and not self._has_shares(values):
                        row["input_energy"] = None
                    yield row
            except StoreError:
                self.dropped.append(self._words(table, number))

    def _has_shares(self, values: tuple[Any, ...]) -> bool:
        """Whether the shares of tokens of a cell are whole."""
        try:
            self._store.shares(values)
        except StoreError:
            self.dropped.append(f"the shares of tokens of {named('cells', values)}")
            return False
        return True

    def window(self, key: tuple[int, int, int]) -> StoreRow | None:
        """The window with a key, where it is whole."""
        where = "WHERE scan = ? AND length = ? AND window = ?"
        try:
            (values,) = self._store.verified("windows", where, key, indexed=True)
        except (StoreError, ValueError):  # damaged, or not there
            self.dropped.append(f"{named('windows', key)} with its cells")
            return None
        return dict(zip(COLUMNS["windows"], values, strict=True))

    def _numbers(self, table: str) -> Iterator[int]:
        """The numbers of rows: upwards and downwards to what cannot be read, and one by one in between."""
        upwards, whole = self._run(table, "ASC")
        yield from upwards
        if whole:
            return
        downwards = [number for number in self._run(table, "DESC")[0] if number > (upwards or [0])[-1]]
        first, last = (upwards or [0])[-1] + 1, min(downwards, default=len(upwards) + 10_000)
        self.dropped.append(f"pages of {table} that cannot be read")
        yield from range(first, min(last, first + _WIDEST_GAP))
        yield from reversed(downwards)

    def _run(self, table: str, way: str) -> tuple[list[int], bool]:
        numbers: list[int] = []
        try:
            for (number,) in self.db.execute(f"SELECT rowid FROM {table} NOT INDEXED ORDER BY rowid {way}"):
                if numbers and (number <= numbers[-1] if way == "ASC" else number >= numbers[-1]):
                    return numbers, False  # a page that leads back
                numbers.append(number)
        except sqlite3.Error:
            return numbers, False
        return numbers, True

    def _words(self, table: str, number: int) -> str:
        with suppress(sqlite3.Error):
            columns = ", ".join(f'"{name}"' for name in COLUMNS[table])
            values = self.db.execute(f"SELECT {columns} FROM {table} WHERE rowid = ?", (number,)).fetchone()
            if values is not None:
                return named(table, values)
        return f"row {number} of {table}"
