"""The store of scans: one SQLite file that survives a kill at any moment.

A scan is identified by content: the sha256 of the model's weights, that of the text, the settings and the version. Its
cells arrive in batches, each in one transaction together with the tokens of its window; a cell that is there is never
written again. One process writes at a time, any number may read. A row that differs from the written one raises an
error that names it: see `howsmooth.scans.schema`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth._util.sqlite_files import MEMORY, StoreError, file_identity, write_ahead
from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import ScanCell
from howsmooth.scans.scan_options import ScanSettings
from howsmooth.scans.schema import COLUMNS, STORE, VERSION, WITH_SHARDS, checksum, summed, tables
from howsmooth.scans.store_reader import StoreReader, StoreRow

_KEY = ("model_sha256", "text_sha256")


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


class Store(StoreReader):
    """A store file, open for writing (`Store.writing`) or for reading (`Store.reading`); ":memory:" for none."""

    def __init__(self, path: Path | str, connection: sqlite3.Connection, version: int = VERSION):
        super().__init__(path, connection, version)
        self._identity = None if path == MEMORY else file_identity(path)

    @classmethod
    @contextmanager
    def writing(cls, path: Path | str) -> Iterator[Store]:
        """The store at a path, made when it is not there; no other process can write to it meanwhile.

        A store of an earlier version becomes one of this version.
        """
        if str(path).startswith("file:"):
            raise InvalidInput(
                f"{path} is an address, not a file: give the plain name of a store, for example s.sqlite."
            )
        with STORE.writing(path) as (db, version):
            store = cls(path, db, version)
            if path != MEMORY:
                store._modernise()
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
        with STORE.reading(path) as (db, version):
            store = cls(path, db, version)
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
            there = {row["pending"]: row for row in self._scans() if tuple(row[name] for name in _KEY) == key}
            old, pending = there.get(0), there.get(1)
            if old is not None and resume:
                self._check_same(wanted, old)
            current = old if resume else pending
            if current is not None and not self._differences(wanted, current):
                self.check_rows(current["id"])
                return int(current["id"])
            if pending is not None and not resume:
                self._db.execute("DELETE FROM scans WHERE id = ?", (pending["id"],))
            number = 1 + max((row["id"] for row in self._scans()), default=0)
            told = {"settings": wanted.settings.to_json(), "pending": int(old is not None), "cells": 0, "tally": 0}
            put(self._db, "scans", {**vars(wanted), **told, "id": number})
            return number

    def finish(self, scan: int) -> None:
        """All that was asked for is measured: cells that were measured anew take the place of the old ones."""
        with self._transaction():
            row = self._scan(scan)
            if row["pending"]:
                where = " AND ".join(f"{name} = :{name}" for name in _KEY)
                self._db.execute(f"DELETE FROM scans WHERE {where} AND id != :id", row)
                self._update(row | {"pending": 0})

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
            put(self._db, "windows", key | {"start": start, "tokens": json.dumps(list(tokens))})
            kept = "SELECT start, tokens FROM windows WHERE scan = :scan AND length = :length AND window = :window"
            if self._db.execute(kept, key).fetchone() != (start, json.dumps(list(tokens))):
                raise StoreError(
                    f"window {key['window']} of {key['length']} tokens is another one in {self.path}, which was "
                    "cut by other code: choose another --out, or --no-resume to measure it anew."
                )
            about = self._scan(scan)
            for sum_ in filter(None, (put(self._db, "cells", row) for row in rows)):
                about["cells"] += 1
                about["tally"] ^= sum_
            self._update(about)

    def check(self) -> None:
        """Raise `StoreError` unless the file is sound: SQLite's integrity_check, and the checksum of every row."""
        with STORE.explained(self.path):
            STORE.check_pages(self._db, self.path, thorough=True)
            if self._db.execute("PRAGMA foreign_key_check").fetchone() is not None:
                raise StoreError(f"the store {self.path} is damaged (a cell without its scan): scan into a new file.")
            self.check_whole()
            self.rows()

    def note_shard(self, scan: int, values: tuple[int, int, str, int]) -> None:
        """Write of which part of a scan the cells are; within a transaction."""
        about = self._scan(scan)
        about["tally"] ^= put_shard(self._db, scan, values)
        self._update(about)

    def _scan(self, number: int) -> StoreRow:
        return next(row for row in self._scans() if row["id"] == number)

    def _update(self, row: StoreRow) -> None:
        update_scan(self._db, row | {"settings": row["written"]})

    def _differences(self, wanted: Identity, kept: StoreRow) -> list[str]:
        old = kept["settings"] | {"howsmooth": kept["howsmooth"]}
        new = json.loads(wanted.settings.to_json()) | {"howsmooth": wanted.howsmooth}
        return [f"{name} {old.get(name)}, not {new[name]}" for name in new if old.get(name) != new[name]]

    def _check_same(self, wanted: Identity, kept: StoreRow) -> None:
        differing = self._differences(wanted, kept)
        if differing:
            raise StoreError(
                f"{self.path} already holds {wanted.model} on this text with other settings ({'; '.join(differing)}): "
                "choose another --out, or --no-resume to measure it anew."
            )

    def _check_place(self) -> None:
        """Refuse to go on when the file that is open is no longer the one with its name."""
        if self.path != MEMORY and file_identity(self.path) != self._identity:
            raise StoreError(
                f"{self.path} was removed, renamed or replaced while the scan was writing to it, so that nothing can "
                "be kept there: run the same command again, and leave the store alone until it ends."
            )

    def _modernise(self) -> None:
        """Give an older store the tables of today, all or nothing; what was not measured then stays empty."""
        if self.version == VERSION:
            return
        self.check_whole()
        scans, windows, shards = self._scans(), list(self.verified("windows")), self.shards()
        self._db.execute("PRAGMA foreign_keys = OFF")
        self._db.execute("PRAGMA legacy_alter_table = ON")  # references stay with the name, not with the old table
        with self._transaction():
            if self.version < WITH_SHARDS:
                self._db.execute("DROP TABLE IF EXISTS shards")
            for table in tables(self.version):
                self._db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
            self._db.execute("DROP INDEX cell")
            for statement in STORE.create().split(";"):
                self._db.execute(statement)
            for values in windows:
                put(self._db, "windows", dict(zip(COLUMNS["windows"], values, strict=True)))
            about = {row["id"]: row | {"cells": 0, "tally": 0} for row in scans}
            names = [*(name for name in COLUMNS["cells"] if name != "energy_sum"), "input_energy"]
            for values in self.verified("cells", extra=("input_energy",), name="old_cells"):
                self.shares(values, values[-1])  # proved by their own checksum, where they have one
                row = dict(zip([*COLUMNS["cells"], "input_energy"], values, strict=True))
                of_scan = about[row["scan"]]
                of_scan["tally"] ^= put(self._db, "cells", {name: row[name] for name in names}) or 0
                of_scan["cells"] += 1
            for row in about.values():
                put(self._db, "scans", row | {"settings": row["written"]})
            for scan, values in shards.items():
                self.note_shard(scan, values)
            for table in tables(self.version):
                self._db.execute(f"DROP TABLE old_{table}")
        self._db.execute("PRAGMA legacy_alter_table = OFF")
        self._db.execute("PRAGMA foreign_keys = ON")
        self.version = VERSION

    def _transaction(self) -> AbstractContextManager[None]:
        return STORE.transaction(self._db, self.path)


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


def put_shard(db: sqlite3.Connection, scan: int, values: tuple[int, int, str, int]) -> int:
    """Write which part of a scan the cells are: number, count, digest of the plan, cells; its checksum."""
    return put(db, "shards", dict(zip(COLUMNS["shards"], (scan, *values), strict=True))) or 0


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
