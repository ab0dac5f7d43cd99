"""The ledger of a run that may be interrupted: one SQLite file, run key → item → bytes.

A run is identified by its key, a JSON object of everything that decides its results: hashes of weights and texts,
settings, version. Promises, whatever the run is:

- an item is stored as soon as it is written, in one transaction, and survives a process that is killed;
- a full disk loses nothing that was written before;
- one process writes at a time, any number may read;
- a ledger with items of another run is refused, and the differences between the keys are named;
- every item has the SHA-256 of its run, its name and its bytes: damage is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth._util.common import printable
from howsmooth._util.sqlite_files import MEMORY, FileFormat, StoreError

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = FileFormat(
    name="ledger",
    writer="run",
    application_id=0x68736D6C,  # "hsml"
    version=1,
    tables="CREATE TABLE run (key TEXT NOT NULL, sha256 TEXT NOT NULL); CREATE TABLE items "
    "(item TEXT PRIMARY KEY NOT NULL, content BLOB NOT NULL, sha256 TEXT NOT NULL);",
    remedy="choose another --out",
)


class Ledger:
    """The items of one run; open with `Ledger.writing` or `Ledger.reading`.

    >>> with Ledger.writing(None, {"norm": 2}) as ledger:
    ...     ledger.write("image 0", b"0.5")
    ...     ledger.items(), ledger.read("image 0"), "image 1" in ledger
    (['image 0'], b'0.5', False)
    """

    def __init__(self, db: sqlite3.Connection, path: Path | str):
        self._db, self.path = db, path
        self._key = self._stored_key()

    @classmethod
    @contextmanager
    def writing(cls, path: Path | None, run: Mapping[str, Any], resume: bool = True) -> Iterator[Ledger]:
        """The ledger of a run at a path, made when it is missing; None stores nothing beyond the block.

        Args:
            run: the key of the run.
            resume: use the items of this run; otherwise the ledger is emptied, whatever run it belongs to.
        """
        with _FORMAT.writing(path or MEMORY) as db:
            ledger = cls(db, path or MEMORY)
            ledger._begin(json.dumps(run, sort_keys=True), resume)
            yield ledger

    @classmethod
    @contextmanager
    def reading(cls, path: Path) -> Iterator[Ledger]:
        """An existing ledger as it is now; its run may be writing to it."""
        with _FORMAT.reading(path) as db:
            _FORMAT.check_pages(db, path)
            yield cls(db, path)

    @property
    def run(self) -> dict[str, Any]:
        """The key of the run."""
        return dict(json.loads(self._key or "{}"))

    def items(self) -> list[str]:
        """The names of the items, in the order in which they were written."""
        return [item for (item,) in self._db.execute("SELECT item FROM items NOT INDEXED ORDER BY rowid")]

    def __contains__(self, item: str) -> bool:
        return self._db.execute("SELECT 1 FROM items WHERE item = ?", (item,)).fetchone() is not None

    def write(self, item: str, content: bytes) -> None:
        """Store an item, in one transaction."""
        row = (item, content, self._sum(item, content))
        with _FORMAT.transaction(self._db, self.path):
            self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", row)

    def remove(self, items: list[str]) -> None:
        """Drop items, in one transaction."""
        with _FORMAT.transaction(self._db, self.path):
            self._db.executemany("DELETE FROM items WHERE item = ?", [(item,) for item in items])

    def read(self, item: str) -> bytes:
        """The bytes of an item, or a `StoreError` unless they are those that were written."""
        row = self._db.execute("SELECT content, sha256 FROM items WHERE item = ?", (item,)).fetchone()
        if row is None or not isinstance(row[0], bytes) or self._sum(item, row[0]) != row[1]:
            raise self._damaged(printable(item))
        return row[0]

    def write_json(self, item: str, value: Any) -> None:
        """Store a value as JSON."""
        self.write(item, json.dumps(value, allow_nan=False).encode())

    def read_json(self) -> dict[str, Any]:
        """All items, in the order in which they were written, from JSON."""
        return {item: json.loads(self.read(item)) for item in self.items()}

    def tensors(self, item: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of an item, computed and stored when it is missing.

        >>> import torch
        >>> with Ledger.writing(None, {}) as ledger:
        ...     ledger.tensors("window 0", lambda: {"sum": torch.tensor(2)})
        {'sum': tensor(2)}
        """
        from safetensors.torch import load, save

        if item not in self:
            self.write(item, save({name: tensor.contiguous() for name, tensor in compute().items()}))
        return load(self.read(item))

    def _begin(self, key: str, resume: bool) -> None:
        """Give the ledger the key of a run; one without items belongs to no run."""
        if resume and self._key != key and self.items():
            raise StoreError(
                f"{self.path} belongs to another run (there ≠ here: {_difference(self.run, json.loads(key))}): choose "
                "another --out, or remove it to begin anew."
            )
        if self._key != key or not resume:
            with _FORMAT.transaction(self._db, self.path):
                self._db.execute("DELETE FROM items")
                self._db.execute("DELETE FROM run")
                self._db.execute("INSERT INTO run VALUES (?, ?)", (key, _sha256(key.encode())))
            self._key = key

    def _stored_key(self) -> str:
        """The key in the file, "" for none."""
        rows = self._db.execute("SELECT key, sha256 FROM run").fetchall()
        if not rows and not self.items():
            return ""
        key, stored = rows[0] if len(rows) == 1 else (None, None)
        if not isinstance(key, str) or _sha256(key.encode(errors="surrogateescape")) != stored:
            raise self._damaged("the key of the run")
        return key

    def _sum(self, item: str, content: bytes) -> str:
        """The checksum of an item: of its run and its name as well as of its bytes."""
        return _sha256(json.dumps([self._key, item]).encode() + b"\n" + content)

    def _damaged(self, part: str) -> StoreError:
        return StoreError(
            f"{part} in {self.path} is not what was written: its checksum differs; choose another --out, or "
            "remove it to begin anew."
        )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The entries in which two keys differ.

    >>> _difference({"norm": "2", "heads": 4}, {"norm": "inf", "heads": 4})
    'norm 2 ≠ inf'
    """
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name} {there.get(name)!s:.40} ≠ {here.get(name)!s:.40}" for name in names)
