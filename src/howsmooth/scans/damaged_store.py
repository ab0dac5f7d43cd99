"""Salvage: the intact rows of a damaged store, written to a new one; the damaged file stays as it is."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth._util.common import distinct_files
from howsmooth._util.sqlite_files import Connection, StoreError, one_file
from howsmooth._util.validation import validated
from howsmooth.scans.scan_store import put, put_shard, update_scan
from howsmooth.scans.schema import COLUMNS, STORE, VERSION, WITH_SHARDS, has
from howsmooth.scans.store_reader import StoreReader, StoreRow, named

_WIDEST_GAP = 1_000_000
"""StoreRow numbers tried one by one between two that can be read."""
_NAMED = 5
_HEADER = {0: b"SQLite format 3\0", 16: b"\x10\x00", 20: b"\x00\x40\x20\x20", 44: b"\0\0\0\x04", 56: b"\0\0\0\x01"}
"""Bytes that are the same in every store: magic, page size, fractions of a page, format, UTF-8."""


@dataclass(frozen=True)
class Salvaged:
    """The result of a salvage.

    Attributes:
        store: the new one.
        kept, written: intact cells, and cells that a scan had written, None where that number cannot be read.
        dropped: damaged parts, in words.
        proved: whether every cell that was kept had its checksum; stores of version 0 have none.
    """

    store: Path
    kept: int
    written: int | None
    dropped: list[str]
    proved: bool

    def __str__(self) -> str:
        of = "cells" if self.written is None else f"of {self.written} cells"
        more = [f"and {len(self.dropped) - _NAMED} more"] if len(self.dropped) > _NAMED else []
        said = f", without {'; '.join([*self.dropped[:_NAMED], *more])}" if self.dropped else ""
        trust = "" if self.proved else "; its version has no checksums, so that changed numbers cannot be told"
        return f"{self.kept} {of} are whole and are kept in {self.store}{said}{trust}"


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
    if into.exists():
        raise StoreError(f"{into} is there already: remove it, or name another file for what is salvaged.")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.sqlite")
        shutil.copyfile(path, copy)
        if Path(f"{path}-wal").is_file():
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        try:
            with STORE.explained(path, reading=True):
                return _written(_opened(copy), path, into)
        except BaseException:
            into.unlink(missing_ok=True)
            raise


def _opened(copy: Path) -> sqlite3.Connection:
    """A connection to a copy whose header and table definitions are those of every store."""
    with copy.open("r+b") as file:
        for offset, content in _HEADER.items():
            file.seek(offset)
            file.write(content)
    db = sqlite3.connect(copy, isolation_level=None, factory=Connection)
    with suppress(sqlite3.Error):
        db.execute("PRAGMA writable_schema = ON")
        columns = "".join(str(sql) for (sql,) in db.execute("SELECT sql FROM sqlite_master"))
        version = 0
        if "checksum" in columns or db.execute("PRAGMA user_version").fetchone()[0]:
            version = VERSION if '"plan"' in columns or not columns else 2 if '"relative"' in columns else 1
        db.execute(f"PRAGMA user_version = {version}")
        db.execute(f"PRAGMA application_id = {STORE.application_id}")
        for kind, name, _, sql in STORE.objects(version):
            db.execute("UPDATE sqlite_master SET sql = ? WHERE type = ? AND name = ?", (sql, kind, name))
        db.close()
        db = sqlite3.connect(copy, isolation_level=None, factory=Connection)
    return db


def _written(old: sqlite3.Connection, path: Path, into: Path) -> Salvaged:
    new = STORE.connect_writer(into)
    try:
        new.execute("BEGIN")
        salvaged = _copied(Pieces(old), new, into)
        if not salvaged.kept:
            raise StoreError(f"nothing in {path} is whole: scan again into a new file.")
        new.execute("COMMIT")
        one_file(new)
        return salvaged
    finally:
        new.close()
        old.close()


class Pieces:
    """The rows of a damaged store, one by one.

    Args:
        db: a connection to a copy of it.
    """

    def __init__(self, db: sqlite3.Connection):
        self.db = db
        self.version = int(db.execute("PRAGMA user_version").fetchone()[0])
        self.dropped: list[str] = []
        self._reader = StoreReader("the store", db, self.version)

    def rows(self, table: str) -> Iterator[StoreRow]:
        """Every row of a table that is what was written."""
        extra = ["input_energy"] if table == "cells" else []
        for number in self._numbers(table):
            try:
                for values in self._reader.verified(table, "WHERE rowid = ?", (number,), extra):
                    row = dict(zip([*COLUMNS[table], *extra], values, strict=True))
                    yield row | self._contents(values) if table == "cells" else row
            except StoreError:
                self.dropped.append(self._words(table, number))

    def _contents(self, values: tuple[Any, ...]) -> StoreRow:
        """The shares of tokens of a cell, or none where they are damaged alone."""
        row = dict(zip(COLUMNS["cells"], values, strict=False))
        self._reader.bounds(values, row["bounds"])
        try:
            self._reader.shares(values, values[-1])
        except StoreError:
            self.dropped.append(f"the shares of tokens of {named('cells', values)}")
            return {"input_energy": None}
        return {}

    def shards(self) -> dict[int, tuple[int, int, str, int]]:
        """Scan → which part of it the store is, where that can be read."""
        if self.version >= WITH_SHARDS:
            columns = list(COLUMNS["shards"])
            return {row["scan"]: tuple(row[name] for name in columns[1:]) for row in self.rows("shards")}
        try:
            return self._reader.shards()
        except (StoreError, sqlite3.Error):
            self.dropped.append("the note of which shard it is")
            return {}

    def window(self, key: tuple[int, int, int]) -> StoreRow | None:
        """The window with a key, where it is whole."""
        where = "WHERE scan = ? AND length = ? AND window = ?"
        try:
            (values,) = self._reader.verified("windows", where, key, indexed=True)
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
            columns = ", ".join(f'"{name}"' for name in COLUMNS[table] if has(self.version, table, name))
            values = self.db.execute(f"SELECT {columns} FROM {table} WHERE rowid = ?", (number,)).fetchone()
            if values is not None:
                return named(table, values)
        return f"row {number} of {table}"


def _copied(pieces: Pieces, new: sqlite3.Connection, into: Path) -> Salvaged:
    about = {row["id"]: row for row in pieces.rows("scans")}
    written = sum(row["cells"] for row in about.values()) if pieces.version and about else None
    windows: dict[tuple[int, int, int], StoreRow | None] = {}
    for row in about.values():
        row |= {"pending": row["pending"] or 0, "cells": 0, "tally": 0}
        put(new, "scans", row)
    for row in pieces.rows("cells"):
        key = (row["scan"], row["length"], row["window"])
        if row["scan"] not in about:
            continue
        if key not in windows:
            windows[key] = pieces.window(key)
            if windows[key] is not None:
                put(new, "windows", windows[key] or {})
        if windows[key] is not None and (sum_ := put(new, "cells", row)):
            about[row["scan"]]["cells"] += 1
            about[row["scan"]]["tally"] ^= sum_
    for scan, values in pieces.shards().items():
        if scan in about:
            about[scan]["tally"] ^= put_shard(new, scan, values)
    for row in about.values():
        update_scan(new, row)
    kept = sum(row["cells"] for row in about.values())
    return Salvaged(into, kept, written, pieces.dropped, bool(pieces.version))
