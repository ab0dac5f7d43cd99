"""SQLite files of howsmooth: one writer or any number of readers, and errors in one sentence.

A `FileFormat` names the tables of a kind of file. Scans and ledgers are written, read and locked by the same methods.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from howsmooth._util.common import Busy, exclusive
from howsmooth.errors import HowsmoothError, InvalidInput

MEMORY = ":memory:"
_WRITTEN_AHEAD = 2
"""The value of bytes 18 and 19 of an SQLite file whose changes may be in a -wal file beside it."""


class StoreError(HowsmoothError, OSError):
    """A store or ledger that cannot be opened, read or written; the message names a remedy."""


class EmptyFile(StoreError):
    """A database without tables: its writer has made the file and nothing else so far."""


class Connection(sqlite3.Connection):
    """A connection that raises `sqlite3.Error` for every damage.

    SQLite quotes unreadable table definitions; where they are not UTF-8, Python raises a `UnicodeDecodeError` instead.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.text_factory = lambda content: content.decode(errors="surrogateescape")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError("malformed database schema") from error


@dataclass(frozen=True)
class FileFormat:
    """A kind of SQLite file.

    Attributes:
        name: "store" or "ledger", for messages.
        writer: the process that writes such a file, for messages.
        application_id: the number in the header of the file.
        version: the user_version of the files; those of another version are refused.
        tables: the statements that create the tables.
        remedy: advice for a damaged file; ``{path}`` is replaced.
    """

    name: str
    writer: str
    application_id: int
    version: int
    tables: str
    remedy: str

    @property
    def create(self) -> str:
        """The statements that make an empty file."""
        pragmas = f"PRAGMA application_id = {self.application_id}; PRAGMA user_version = {self.version};"
        return f"{self.tables} {pragmas}"

    @cached_property
    def objects(self) -> frozenset[tuple[str, ...]]:
        """The rows of sqlite_master in such a file."""
        empty = sqlite3.connect(MEMORY)
        try:
            empty.executescript(self.create)
            return frozenset(empty.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
        finally:
            empty.close()

    def check_version(self, db: sqlite3.Connection, path: Path | str) -> None:
        """Refuse an open file of another kind or version."""
        application, version = (
            int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
        )
        stored = set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
        if (application, version) == (self.application_id, self.version):
            tables = {one[2] for one in self.objects}
            # Tables of others are ignored; views, triggers and indexes on these tables could change every answer.
            foreign = [one for one in stored - self.objects if one[2] in tables or one[0] not in ("table", "index")]
            if self.objects <= stored and not foreign:
                return
        if not stored and _written_ahead(path):
            raise StoreError(
                f"{path} is empty: its content is in the file {Path(path).name}-wal of the {self.writer} that was "
                f"killed; copy both, or run the {self.writer} again where it was."
            )
        if application == self.application_id and version != self.version:
            raise StoreError(f"{path} was written by another version of howsmooth: install that one to read it.")
        if application == self.application_id:
            wrong = f"its tables are not those of a {self.name}"
            raise StoreError(f"{path} is damaged: {wrong}; {self.remedy.format(path=path)}.")
        refusal = EmptyFile if not stored and not application else StoreError
        raise refusal(f"{path} is a database, but no {self.name} of this version of howsmooth: choose another file.")

    def check_pages(self, db: sqlite3.Connection, path: Path | str, thorough: bool = False) -> None:
        """Raise `StoreError` unless SQLite finds every page in order."""
        [(message, *_), *_] = db.execute(f"PRAGMA {'integrity' if thorough else 'quick'}_check(1)").fetchall()
        if message != "ok":
            words = " ".join(str(message).split())
            raise StoreError(f"the {self.name} {path} is damaged ({words}): {self.remedy.format(path=path)}.")

    def connect_writer(self, path: Path | str) -> sqlite3.Connection:
        """A connection that may write to a file, which is made when it is missing.

        The tables are in the file itself before anything is written to a -wal file, so that the file alone is valid.
        """
        fresh = path == MEMORY or not Path(path).exists() or not Path(path).stat().st_size
        db = sqlite3.connect(path if path == MEMORY else _address(path, "mode=rwc"), uri=path != MEMORY, **_OPTIONS)
        try:
            _set_up(db)
            if fresh:
                db.executescript(f"BEGIN IMMEDIATE; {self.create} COMMIT;")
            db.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def writing(self, path: Path | str) -> Iterator[sqlite3.Connection]:
        """The only writer's connection to a file; all content is in one file afterwards."""
        with self.only_writer(path), self.explained(path):
            db = self.connect_writer(path)
            try:
                self.check_version(db, path)
                if path != MEMORY:
                    self.check_pages(db, path, thorough=True)  # a damaged index could let a row in twice
                yield db
            finally:
                if path != MEMORY:
                    one_file(db)
                db.close()

    @contextmanager
    def reading(self, path: Path | str) -> Iterator[sqlite3.Connection]:
        """A reader's connection to a file as it is now; a writer may be at work."""
        with self.explained(path, reading=True):
            db = connect_reader(path)
            try:
                self.check_version(db, path)
                yield db
            finally:
                db.close()

    @contextmanager
    def transaction(self, db: sqlite3.Connection, path: Path | str) -> Iterator[None]:
        """All statements of the block, or none."""
        with self.explained(path):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:  # Ctrl-C included: no batch is written in part
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def explained(self, path: Path | str, reading: bool = False) -> Iterator[None]:
        """Replace errors of SQLite by one sentence with a remedy."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise  # a defect of this package
        except sqlite3.Error as error:
            raise StoreError(self._sentence(error, path, reading)) from error

    def _sentence(self, error: sqlite3.Error, path: Path | str, reading: bool) -> str:
        code = _code(error)
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) and not reading:
            return (
                f"cannot write to {path} ({error}; is the disk full?): free some space and run the same command again; "
                "everything measured before is stored."
            )
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"{path} is in use by another program: wait for it, or choose another --out."
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            if reading:
                return (
                    f"cannot read {path} ({error}): a {self.writer} that was killed left a part of it in "
                    f"{Path(path).name}-wal; copy both to a folder where you may write."
                )
            return f"cannot write to {path} ({error}): choose another --out."
        return f"{path} is no sound {self.name} ({error}): choose another file, or {self.remedy.format(path=path)}."

    @contextmanager
    def only_writer(self, path: Path | str) -> Iterator[None]:
        """Refuse a second writer, by a lock beside the file that ends with its process."""
        if path == MEMORY:
            yield
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(Path(f"{path}.lock")))
            except Busy:
                raise StoreError(
                    f"another {self.writer} is writing to {path}: wait until it ends, or choose another --out."
                ) from None
            except InvalidInput as error:
                raise StoreError(str(error)) from error
            except OSError as error:
                reason = error.strerror or error
                raise StoreError(f"cannot write to {path} ({reason}): choose another --out.") from error
            yield


def write_ahead(db: sqlite3.Connection) -> None:
    """Let a transaction cost one write, and readers read meanwhile."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")


def one_file(db: sqlite3.Connection) -> None:
    """Move all content into the file itself, so that it can be copied and read anywhere; not while it is read."""
    with suppress(sqlite3.Error):
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        db.execute("PRAGMA journal_mode = DELETE")


def connect_reader(path: Path | str) -> sqlite3.Connection:
    """A connection that sees a file as it is now and does not change it, also on a read-only medium."""
    whole = _written_ahead(path) and not Path(f"{path}-wal").exists()
    modes = ["mode=ro&immutable=1"] if whole else ["mode=ro", "mode=rw"]
    for mode in modes:
        db = sqlite3.connect(_address(path, mode), uri=True, **_OPTIONS)
        try:
            _set_up(db)
            db.execute("PRAGMA query_only = ON")
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except BaseException as error:
            db.close()
            # A process that may write recovers what a killed writer has left behind.
            if mode == modes[-1] or _code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
    raise AssertionError("one of the modes returns or raises")


def file_identity(path: Path | str) -> tuple[int, int] | None:
    """The device and number of the file that a path leads to; None for none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_OPTIONS: Mapping[str, Any] = {"isolation_level": None, "timeout": 30, "factory": Connection}


def _set_up(db: sqlite3.Connection) -> None:
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY"):
        db.execute(f"PRAGMA {setting}")


def _address(path: Path | str, mode: str) -> str:
    return f"{Path(path).absolute().as_uri()}?{mode}"


def _written_ahead(path: Path | str) -> bool:
    with Path(path).open("rb") as file:
        return _WRITTEN_AHEAD in file.read(20)[18:20]


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
