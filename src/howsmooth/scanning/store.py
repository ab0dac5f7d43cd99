"""Where the numbers of a scan are kept: one SQLite file that survives being killed at any moment.

A scan is identified by content: the sha256 of the model's weights, that of the text, the settings and the version. Its
cells arrive in batches, each in one transaction together with the tokens of its window; a cell that is there is never
written again. One process writes at a time, any number may read.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth.errors import HowsmoothError
from howsmooth.scanning.plan import Cell, Settings

APPLICATION_ID = 0x68736D31  # "hsm1"
MEMORY = ":memory:"
_CELL = {"what": "TEXT NOT NULL", "layer": "INTEGER", "head": "INTEGER", "length": "INTEGER NOT NULL"}
_CELL |= {"window": "INTEGER NOT NULL"}
NUMBERS = {
    **dict.fromkeys(["value", "lower"], "REAL NOT NULL"),
    **dict.fromkeys(["upper", "confidence"], "REAL"),
    "converged": "INTEGER NOT NULL",
    "proved": "REAL",
    "bounds": "TEXT NOT NULL",
    **dict.fromkeys(["radius", "value_path", "score_path", "value_share", "sink"], "REAL"),
    "sink_token": "INTEGER",
    "entropy": "REAL",
    "dtype": "TEXT NOT NULL",
    "seconds": "REAL NOT NULL",
    "input_energy": "TEXT",
}
"""The columns of a cell beside its place, with their types."""
_COLUMNS = _CELL | NUMBERS
_SCHEMA = f"""
CREATE TABLE scans (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, model_sha256 TEXT NOT NULL, precision TEXT NOT NULL,
    text TEXT NOT NULL, text_sha256 TEXT NOT NULL, settings TEXT NOT NULL, howsmooth TEXT NOT NULL,
    UNIQUE (model_sha256, text_sha256));
CREATE TABLE windows (
    scan INTEGER NOT NULL REFERENCES scans ON DELETE CASCADE, length INTEGER NOT NULL, window INTEGER NOT NULL,
    start INTEGER NOT NULL, tokens TEXT NOT NULL, PRIMARY KEY (scan, length, window)) WITHOUT ROWID;
CREATE TABLE cells (
    scan INTEGER NOT NULL REFERENCES scans ON DELETE CASCADE,
    {", ".join(f'"{name}" {kind}' for name, kind in _COLUMNS.items())},
    FOREIGN KEY (scan, length, window) REFERENCES windows);
-- NULL differs from NULL in a key, so that missing layers and heads are written as -1 there.
CREATE UNIQUE INDEX cell ON cells (scan, what, ifnull(layer, -1), ifnull(head, -1), length, window);
PRAGMA application_id = {APPLICATION_ID};
"""
_INSERT = (
    f"INSERT INTO cells (scan, {', '.join(_COLUMNS)}) VALUES (:scan, {', '.join(':' + name for name in _COLUMNS)}) "
    "ON CONFLICT DO NOTHING"
)
_SELECT = """
SELECT s.model, s.model_sha256, s.precision, c.what, c.layer, c.head, c.length, c.window, w.start AS window_start,
    s.text, s.text_sha256, c.value, c.lower, c.upper, c.confidence, c.converged, c.proved, c.bounds, c.radius,
    c.value_path, c.score_path, c.value_share, c.sink, c.sink_token, c.entropy,
    json_extract(s.settings, '$.seed') AS seed, json_extract(s.settings, '$.rtol') AS rtol, c.dtype, c.seconds,
    s.howsmooth, c.input_energy
FROM cells c JOIN scans s ON s.id = c.scan JOIN windows w USING (scan, length, window)
ORDER BY s.id, c.length, c.window, ifnull(c.layer, -1), c.what, ifnull(c.head, -1)
"""


class StoreError(HowsmoothError, OSError):
    """A store that cannot be opened, read or written; the message says what to do."""


@dataclass(frozen=True)
class Identity:
    """What a scan is about: the key under which a store keeps it, and names to show."""

    model: str
    model_sha256: str
    precision: str
    text: str
    text_sha256: str
    settings: Settings
    howsmooth: str


class Store:
    """A store file, open for writing (`Store.writing`) or for reading (`Store.reading`); ":memory:" for none."""

    def __init__(self, path: Path | str, connection: sqlite3.Connection):
        self.path = path
        self._db = connection

    @classmethod
    @contextmanager
    def writing(cls, path: Path | str) -> Iterator[Store]:
        """The store at a path, made when it is not there; no other process can write to it meanwhile."""
        with _only_writer(path), _explained(path):
            if path != MEMORY:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(path, isolation_level=None, timeout=30)
            try:
                if path != MEMORY:
                    db.execute("PRAGMA journal_mode = WAL")
                    db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA foreign_keys = ON")
                if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
                _check_kind(db, path)
                yield cls(path, db)
            finally:
                db.close()

    @classmethod
    @contextmanager
    def reading(cls, path: Path | str) -> Iterator[Store]:
        """An existing store; a scan may be writing to it at the same time."""
        if not Path(path).is_file():
            raise StoreError(f"there is no store {path}: make one with `howsmooth scan MODEL --out {path}`.")
        with _explained(path):
            db = sqlite3.connect(path, isolation_level=None, timeout=30)
            try:
                db.execute("PRAGMA query_only = ON")
                _check_kind(db, path)
                yield cls(path, db)
            finally:
                db.close()

    def begin(self, wanted: Identity, resume: bool = True) -> int:
        """The number of a scan in this store, new or taken up again.

        Args:
            resume: keep the cells that are there, which must have been measured with the same settings; otherwise they
                are removed.
        """
        key = (wanted.model_sha256, wanted.text_sha256)
        where = "WHERE model_sha256 = ? AND text_sha256 = ?"
        with self._transaction():
            if not resume:
                self._db.execute(f"DELETE FROM scans {where}", key)
            found = self._db.execute(f"SELECT id, settings, howsmooth FROM scans {where}", key).fetchone()
            if found is not None:
                self._check_same(wanted, *found[1:])
                return int(found[0])
            row = {**vars(wanted), "settings": wanted.settings.to_json()}
            names = ", ".join(row)
            values = ", ".join(f":{name}" for name in row)
            return int(self._db.execute(f"INSERT INTO scans ({names}) VALUES ({values})", row).lastrowid or 0)

    def cells(self, scan: int) -> set[Cell]:
        """The cells of a scan that are there."""
        query = "SELECT what, layer, head, length, window FROM cells WHERE scan = ?"
        with _explained(self.path):
            return {Cell(*row) for row in self._db.execute(query, (scan,))}

    def add(
        self, scan: int, start: int, tokens: Sequence[str], found: Iterable[tuple[Cell, Mapping[str, Any]]]
    ) -> None:
        """Keep a batch of cells of one window, all or none; cells that are there stay as they are."""
        rows = [vars(cell) | dict(numbers) | {"scan": scan} for cell, numbers in found]
        if not rows:
            return
        window = (scan, rows[0]["length"], rows[0]["window"], start, json.dumps(list(tokens)))
        with self._transaction():
            self._db.execute("INSERT INTO windows VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", window)
            kept = "SELECT start, tokens FROM windows WHERE scan = ? AND length = ? AND window = ?"
            if self._db.execute(kept, window[:3]).fetchone() != window[3:]:
                raise StoreError(
                    f"window {window[2]} of {window[1]} tokens is another one in {self.path}, which was cut by other "
                    "code: choose another --out, or --no-resume to measure it anew."
                )
            self._db.executemany(_INSERT, rows)

    def rows(self) -> list[dict[str, Any]]:
        """All cells of all scans, with ``bounds`` as a dictionary and ``input_energy`` as a list."""
        found = self._select(_SELECT)
        for row in found:
            row["converged"] = bool(row["converged"])
            row["bounds"] = json.loads(row["bounds"])
            row["input_energy"] = None if row["input_energy"] is None else json.loads(row["input_energy"])
        return found

    def windows(self) -> list[dict[str, Any]]:
        """The windows of all scans with their tokens."""
        query = """SELECT s.model, s.model_sha256, s.text_sha256, w.length, w.window, w.start, w.tokens
                   FROM windows w JOIN scans s ON s.id = w.scan ORDER BY s.id, w.length, w.window"""
        return [row | {"tokens": json.loads(row["tokens"])} for row in self._select(query)]

    def scans(self) -> list[dict[str, Any]]:
        """What each scan is about: model, text, their hashes, and its settings by name."""
        query = "SELECT model, model_sha256, precision, text, text_sha256, howsmooth, settings FROM scans ORDER BY id"
        return [row | {"settings": json.loads(row["settings"])} for row in self._select(query)]

    def check(self) -> None:
        """Raise `StoreError` unless the file is sound (SQLite's integrity_check and foreign_key_check)."""
        with _explained(self.path):
            said = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
            if said != ["ok"] or self._db.execute("PRAGMA foreign_key_check").fetchone() is not None:
                raise StoreError(f"the store {self.path} is damaged ({said[0]}): scan again into a new file.")

    def _select(self, query: str) -> list[dict[str, Any]]:
        with _explained(self.path):
            cursor = self._db.execute(query)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _check_same(self, wanted: Identity, settings: str, version: str) -> None:
        old, new = json.loads(settings) | {"howsmooth": version}, json.loads(wanted.settings.to_json())
        new |= {"howsmooth": wanted.howsmooth}
        differing = [f"{name} {old.get(name)}, not {new[name]}" for name in new if old.get(name) != new[name]]
        if differing:
            raise StoreError(
                f"{self.path} already holds {wanted.model} on this text with other settings ({'; '.join(differing)}): "
                "choose another --out, or --no-resume to measure it anew."
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:  # Ctrl-C included: the batch is not half there
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _check_kind(db: sqlite3.Connection, path: Path | str) -> None:
    found = db.execute("PRAGMA application_id").fetchone()[0]
    if found != APPLICATION_ID:
        raise StoreError(f"{path} is a database, but no store of this version of howsmooth: choose another file.")


@contextmanager
def _explained(path: Path | str) -> Iterator[None]:
    """What SQLite complains about, in one sentence that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise StoreError(
                f"cannot write to {path} ({error}; is the disk full?): free some space and run the same command again; "
                "every cell measured before is kept."
            ) from error
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreError(f"{path} is in use by another program: wait for it, or choose another --out.") from error
        if kind in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreError(f"{path} is no sound store ({error}): choose another file.") from error
        if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise StoreError(f"cannot write to {path} ({error}): choose another --out.") from error
        raise


@contextmanager
def _only_writer(path: Path | str) -> Iterator[None]:
    """Refuse a second writer. The lock is one of SQLite's on a file beside the store: it dies with its process."""
    if path == MEMORY:
        yield
        return
    beside = Path(f"{path}.lock")
    beside.parent.mkdir(parents=True, exist_ok=True)
    with _explained(path):
        lock = sqlite3.connect(beside, isolation_level=None, timeout=0)
        try:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                raise StoreError(
                    f"another scan is writing to {path}: wait until it ends, or choose another --out."
                ) from None
            try:
                yield
            finally:
                with suppress(OSError):  # where an open file cannot be removed, an empty one stays
                    beside.unlink()
        finally:
            lock.close()
