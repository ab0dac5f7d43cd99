"""How a store file is opened: by one writer or any number of readers, and what SQLite complains about, in words."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from howsmooth._util.common import Busy, exclusive
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.scans import schema

MEMORY = ":memory:"
_WRITTEN_AHEAD = 2
"""What bytes 18 and 19 of an SQLite file say when changes may stand in a -wal file beside it."""


class StoreError(HowsmoothError, OSError):
    """A store that cannot be opened, read or written; the message says what to do."""


class Connection(sqlite3.Connection):
    """A connection whose errors can all be told.

    SQLite quotes table definitions that it cannot read; where they are not UTF-8, Python has another error instead.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.text_factory = lambda content: content.decode(errors="surrogateescape")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError("malformed database schema") from error


def connect_writer(path: Path | str) -> sqlite3.Connection:
    """A connection that may write to a store, made when it is not there.

    The tables are in the file itself before anything goes into a -wal file, so that the file alone is always a store.
    """
    fresh = path == MEMORY or not Path(path).exists() or not Path(path).stat().st_size
    db = sqlite3.connect(path if path == MEMORY else _address(path, "mode=rwc"), uri=path != MEMORY, **_OPTIONS)
    try:
        _set_up(db)
        if fresh:
            db.executescript(f"BEGIN IMMEDIATE; {schema.create()} COMMIT;")
        db.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        db.close()
        raise
    return db


def write_ahead(db: sqlite3.Connection) -> None:
    """Let a batch cost one write, and readers read meanwhile."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")


def one_file(db: sqlite3.Connection) -> None:
    """Bring everything into the store file itself, so that it can be copied and read anywhere; not while it is read."""
    with suppress(sqlite3.Error):
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        db.execute("PRAGMA journal_mode = DELETE")


def connect_reader(path: Path | str) -> sqlite3.Connection:
    """A connection that sees the store as it is now and leaves it as it is, on a medium for reading too."""
    whole = _written_ahead(path) and not Path(f"{path}-wal").exists()
    ways = ["mode=ro&immutable=1"] if whole else ["mode=ro", "mode=rw"]
    for way in ways:
        db = sqlite3.connect(_address(path, way), uri=True, **_OPTIONS)
        try:
            _set_up(db)
            db.execute("PRAGMA query_only = ON")
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except BaseException as error:
            db.close()
            # What a killed writer has left behind is brought in order by who may write.
            if way == ways[-1] or _kind(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
    raise AssertionError("one of the ways returns or raises")


_OPTIONS: dict = {"isolation_level": None, "timeout": 30, "factory": Connection}


def _set_up(db: sqlite3.Connection) -> None:
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY"):
        db.execute(f"PRAGMA {setting}")


def _address(path: Path | str, way: str) -> str:
    return f"{Path(path).absolute().as_uri()}?{way}"


def _written_ahead(path: Path | str) -> bool:
    with Path(path).open("rb") as file:
        return _WRITTEN_AHEAD in file.read(20)[18:20]


def identity(path: Path | str) -> tuple[int, int] | None:
    """Which file a path leads to; None for none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_kind(db: sqlite3.Connection, path: Path | str) -> int:
    """The version of a store, or a refusal."""
    version = schema.version_of(db)
    if version is not None:
        return version
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and _written_ahead(path):
        raise StoreError(
            f"{path} is empty: its cells stand in the file {Path(path).name}-wal of the scan that was killed; copy "
            "both, or run the scan again where it was."
        )
    application = db.execute("PRAGMA application_id").fetchone()[0]
    newer = db.execute("PRAGMA user_version").fetchone()[0]
    if application == schema.APPLICATION_ID and newer > schema.VERSION:
        raise StoreError(f"{path} was written by a later version of howsmooth: install that one to read it.")
    if application == schema.APPLICATION_ID:
        raise StoreError(
            f"{path} is damaged: its tables are not those of a store. `howsmooth report {path} --salvage` keeps what "
            "is whole."
        )
    raise StoreError(f"{path} is a database, but no store of this version of howsmooth: choose another file.")


def check_pages(db: sqlite3.Connection, path: Path | str, thorough: bool = False) -> None:
    """Raise `StoreError` unless SQLite finds every page in order."""
    said = [row[0] for row in db.execute(f"PRAGMA {'integrity' if thorough else 'quick'}_check(1)")]
    if said != ["ok"]:
        words = " ".join(str(said[0]).split())
        raise StoreError(
            f"the store {path} is damaged ({words}): `howsmooth report {path} --salvage` keeps what is whole."
        )


def _kind(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def explained(path: Path | str, reading: bool = False) -> Iterator[None]:
    """What SQLite complains about, in one sentence that says what to do."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError):
        raise  # our own fault
    except sqlite3.Error as error:
        kind = _kind(error)
        if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) and not reading:
            raise StoreError(
                f"cannot write to {path} ({error}; is the disk full?): free some space and run the same command again; "
                "every cell measured before is kept."
            ) from error
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreError(f"{path} is in use by another program: wait for it, or choose another --out.") from error
        if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            if reading:
                raise StoreError(
                    f"cannot read {path} ({error}): a scan that was killed left a part of it in {Path(path).name}-wal; "
                    "copy both to a folder where you may write."
                ) from error
            raise StoreError(f"cannot write to {path} ({error}): choose another --out.") from error
        raise StoreError(
            f"{path} is no sound store ({error}): choose another file, or `howsmooth report {path} --salvage` to keep "
            "what is whole."
        ) from error


@contextmanager
def only_writer(path: Path | str) -> Iterator[None]:
    """Refuse a second writer, by a lock beside the store that dies with its process."""
    if path == MEMORY:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(Path(f"{path}.lock")))
        except Busy:
            raise StoreError(
                f"another scan is writing to {path}: wait until it ends, or choose another --out."
            ) from None
        except InvalidInput as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"cannot write to {path} ({error.strerror or error}): choose another --out.") from error
        yield
