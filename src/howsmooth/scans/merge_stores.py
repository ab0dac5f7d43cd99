"""Several stores as one: every cell once, and nothing joined that was not measured in the same way.

A scan that was cut into shards leaves one store per shard, each with a note of which part it is; together they must be
the whole scan. Stores without such a note are joined as they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from howsmooth._util.common import distinct_files
from howsmooth._util.sqlite_files import StoreError, file_identity
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.scans.scan_store import Store, put, update_scan
from howsmooth.scans.schema import COLUMNS, STORE
from howsmooth.scans.shards import Shard, read_shards
from howsmooth.scans.store_reader import StoreRow, named

_SAME = ("precision", "written", "howsmooth")
"""Columns in which scans of one model on one text must agree to be one scan; ``written`` are the settings."""
_IN_WORDS = {"precision": "precision", "written": "settings", "howsmooth": "version of howsmooth"}
_FREE = ("seconds",)
"""The columns of a cell that differ from run to run: how long it took."""


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
    if out.exists():
        raise StoreError(f"{out} is there already: remove it, or name another file for the joined store.")
    if not partial:
        _check_shards(inputs)
    with _new_file(out) as path, STORE.explained(out):
        db = STORE.connect_writer(path)
        try:
            db.execute("BEGIN")
            joined = _Joined(db)
            for one in inputs:
                with Store.reading(one) as store:
                    joined.add(one, store)
            joined.finish()
            db.execute("COMMIT")
        finally:
            db.close()
    return Merged(out, len(inputs), len(joined.scans), joined.cells, joined.twice)


class _Joined:
    """A store that is being made of others."""

    def __init__(self, db: sqlite3.Connection):
        self.db = db
        self.scans: dict[tuple[str, str], StoreRow] = {}
        self.origin: dict[int, Path] = {}
        self.twice = 0

    @property
    def cells(self) -> int:
        return sum(row["cells"] for row in self.scans.values())

    def add(self, path: Path, store: Store) -> None:
        """All that another store holds."""
        numbers: dict[int, int] = {}
        for row in store._scans():
            if row["pending"]:
                raise StoreError(f"{path} holds a scan that is being measured anew: let it end first.")
            numbers[row["id"]] = self._number(path, row)
        for values in store.verified("windows"):
            self._window(path, dict(zip(COLUMNS["windows"], (numbers[values[0]], *values[1:]), strict=True)))
        names = [*COLUMNS["cells"], "input_energy"]
        for values in store.verified("cells", extra=("input_energy",)):
            store.shares(values, values[-1])  # proved by their own checksum
            self._cell(path, dict(zip(names, (numbers[values[0]], *values[1:]), strict=True)))

    def finish(self) -> None:
        """Write the counts of the scans."""
        for row in self.scans.values():
            update_scan(self.db, row | {"settings": row["written"]})

    def _number(self, path: Path, row: StoreRow) -> int:
        """That of a scan in the new store."""
        key = (row["model_sha256"], row["text_sha256"])
        there = self.scans.get(key)
        if there is None:
            there = row | {"id": len(self.scans) + 1, "pending": 0, "cells": 0, "tally": 0}
            self.scans[key] = there
            self.origin[there["id"]] = path
            put(self.db, "scans", there | {"settings": there["written"]})
        for name in _SAME:
            if there[name] != row[name]:
                raise StoreError(
                    f"{self.origin[there['id']]} and {path} hold {row['model']} on the same text with another "
                    f"{_IN_WORDS[name]} ({there[name]}, and {row[name]}): join those that share it."
                )
        return int(there["id"])

    def _window(self, path: Path, row: StoreRow) -> None:
        if put(self.db, "windows", row) is None:
            query = "SELECT start, tokens FROM windows WHERE scan = :scan AND length = :length AND window = :window"
            if self.db.execute(query, row).fetchone() != (row["start"], row["tokens"]):
                raise StoreError(
                    f"window {row['window']} of {row['length']} tokens is another one in {path} than in a store before "
                    "it: they were cut by different code and cannot be joined."
                )

    def _cell(self, path: Path, row: StoreRow) -> None:
        sum_ = put(self.db, "cells", row)
        if sum_ is not None:
            about = next(scan for scan in self.scans.values() if scan["id"] == row["scan"])
            about["cells"] += 1
            about["tally"] ^= sum_
            return
        self.twice += 1
        there = self._there(row)
        differing = [name for name in there if name not in _FREE and there[name] != row[name]]
        if differing:
            name = differing[0]
            raise StoreError(
                f"{named('cells', list(row.values()))} has two different numbers ({name} {there[name]!r:.30}, and "
                f"{row[name]!r:.30} in {path}): join stores that agree."
            )

    def _there(self, row: StoreRow) -> dict[str, Any]:
        """The cell of the same place that is there."""
        names = [name for name in (*COLUMNS["cells"], "input_energy") if name != "energy_sum"]
        columns = ", ".join(f'"{name}"' for name in names)
        map_key = [row["scan"], row["what"], *(-1 if row[one] is None else row[one] for one in ("layer", "head"))]
        where = "scan = ? AND what = ? AND ifnull(layer, -1) = ? AND ifnull(head, -1) = ? AND length = ? AND window = ?"
        query = f"SELECT {columns} FROM cells WHERE {where}"
        values = self.db.execute(query, (*map_key, row["length"], row["window"])).fetchone()
        return dict(zip(names, values, strict=True))


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


@contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """A path beside ``out`` whose file takes that name when the block ends well, unless there is one by then."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}-{token_hex(8)}")
    try:
        yield path
        try:
            out.hardlink_to(path)  # refuses to replace
        except OSError:  # there is such a file by now, or links are not known here
            if out.exists():
                raise StoreError(f"{out} was made by somebody else meanwhile: name another file.") from None
            path.rename(out)
    finally:
        with suppress(OSError):
            path.unlink()
