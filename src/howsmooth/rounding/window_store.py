"""What was found of each window, kept in one SQLite file as soon as it is known.

A run is named by the hash of what decides its numbers: the weights, the text, the settings and the version. Each window
is one row of tensors with the sha256 of its run, its number and its bytes; a row that is there is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from howsmooth._util.common import first_line, unwritable
from howsmooth.errors import InvalidInput

_APPLICATION = 0x68736D71  # "hsmq"
_VERSION = 1
"""The user_version of stores that are written and read; those of version 0 have no checksum of where a row belongs."""
_TABLE = """CREATE TABLE windows (run TEXT NOT NULL, window INTEGER NOT NULL, content BLOB NOT NULL,
    sha256 TEXT NOT NULL, PRIMARY KEY (run, window))"""
MEMORY = ":memory:"
Tensors = dict[str, Tensor]


def run_name(deciding: Mapping[str, Any]) -> str:
    """The name of a run: the hash of what decides its numbers."""
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def each_window(
    path: Path | None, run: str, count: int, find: Callable[[int], Tensors], resume: bool = True
) -> list[Tensors]:
    """What ``find`` has for windows 0, 1, …, each kept as soon as it is known; those that are there are only read.

    >>> import torch
    >>> each_window(None, run_name({}), 2, lambda window: {"number": torch.tensor(window)})
    [{'number': tensor(0)}, {'number': tensor(1)}]
    """
    with WindowStore.of(path, run, resume) as store:
        for window in range(count):
            if window not in store.kept():
                store.add(window, find(window))
        return [store.read(window) for window in range(count)]


class WindowStore:
    """The windows of one run; open with `WindowStore.of`."""

    def __init__(self, connection: sqlite3.Connection, run: str, path: Path | str):
        self.connection, self.run, self.path = connection, run, path

    @classmethod
    @contextmanager
    def of(cls, path: Path | None, run: str, resume: bool = True) -> Iterator[WindowStore]:
        """The store at a path, made when it is not there; None keeps nothing.

        Args:
            resume: keep what is there of this run; otherwise it is found anew.

        >>> import torch
        >>> with WindowStore.of(None, run_name({"model": "a"})) as store:
        ...     store.add(0, {"products": torch.ones(2)})
        ...     sorted(store.kept()), store.read(0)["products"]
        ([0], tensor([1., 1.]))
        """
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(path, error) from error
        try:
            with closing(sqlite3.connect(MEMORY if path is None else path, timeout=10)) as connection:
                _prepare(connection, path)
                store = cls(connection, run, path or MEMORY)
                if not resume:
                    with connection:
                        connection.execute("DELETE FROM windows WHERE run = ?", (run,))
                yield store
        except sqlite3.Error as error:
            raise InvalidInput(
                f"the store {path} cannot be used ({first_line(error)}): another run may be writing to it; name "
                "another with --out."
            ) from error

    def kept(self) -> set[int]:
        """The windows that are there."""
        return {row[0] for row in self.connection.execute("SELECT window FROM windows WHERE run = ?", (self.run,))}

    def add(self, window: int, tensors: Tensors) -> None:
        """Keep a window, in one transaction."""
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        with self.connection:
            self.connection.execute(
                "INSERT OR REPLACE INTO windows VALUES (?, ?, ?, ?)",
                (self.run, window, content, self._seal(window, content)),
            )

    def read(self, window: int) -> Tensors:
        """What was kept of a window, or an error when it is not what was written."""
        found = self.connection.execute(
            "SELECT content, sha256 FROM windows WHERE run = ? AND window = ?", (self.run, window)
        ).fetchone()
        try:
            if found is not None and self._seal(window, found[0]) == found[1]:
                return load(found[0])
        except (SafetensorError, TypeError):
            pass
        raise InvalidInput(
            f"window {window} in {self.path} is not what was written: its checksum differs; find it anew with "
            "--no-resume."
        )

    def _seal(self, window: int, content: bytes) -> str:
        """The checksum of a row: of what it is as well as of what it holds."""
        return hashlib.sha256(f"{self.run} {window}\n".encode() + content).hexdigest()


def _prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    try:
        whole = connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except UnicodeDecodeError:  # SQLite quotes definitions that it cannot read
        whole = False
    if not whole:
        raise sqlite3.DatabaseError("the file is damaged")
    with connection:
        known = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not tables and known in (0, _APPLICATION):
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif known != _APPLICATION:
            raise InvalidInput(f"{path} is not a store of howsmooth quantise: name another with --out.")
        elif version != _VERSION:
            other = "later" if version > _VERSION else "earlier"
            raise InvalidInput(f"{path} was written by a {other} version of howsmooth: name another with --out.")
