"""The tables of a store, version by version, and the checksums that tell its rows from others.

Every row carries 64 bits of BLAKE2b over its columns, written as JSON: a number that was changed by anything but a scan
is found when it is read. A scan also counts its cells and keeps the exclusive or of their checksums, and of that of the
note which shard of a scan it is, so that a cell or a note that has vanished is missed. The shares of tokens, most of a
store, have a checksum of their own, and a row is proved without them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from howsmooth._util.sqlite_files import FileFormat

VERSION = 3
"""The user_version of stores that are written. Those of version 0 have no checksums, those of version 1 no relative
condition, those of version 2 no checksum of the shard that they are; all can be read."""
PLACE = {
    "what": "TEXT NOT NULL",
    "layer": "INTEGER",
    "head": "INTEGER",
    "length": "INTEGER NOT NULL",
    "window": "INTEGER NOT NULL",
}
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
    "relative": "REAL",
    "input_energy": "TEXT",
}
"""The columns of a cell beside its place, with their types."""
_PROVED = {"scan": "INTEGER NOT NULL"} | PLACE | {name: NUMBERS[name] for name in NUMBERS if name != "input_energy"}
COLUMNS: dict[str, dict[str, str]] = {
    "scans": {
        "id": "INTEGER PRIMARY KEY",
        **dict.fromkeys(
            ["model", "model_sha256", "precision", "text", "text_sha256", "settings", "howsmooth"], "TEXT NOT NULL"
        ),
        **dict.fromkeys(["pending", "cells", "tally"], "INTEGER NOT NULL"),
    },
    "windows": {**dict.fromkeys(["scan", "length", "window", "start"], "INTEGER NOT NULL"), "tokens": "TEXT NOT NULL"},
    "cells": _PROVED | {"energy_sum": "INTEGER"},
    "shards": {
        "scan": "INTEGER PRIMARY KEY",
        **dict.fromkeys(["number", "count"], "INTEGER NOT NULL"),
        "plan": "TEXT NOT NULL",
        "cells": "INTEGER NOT NULL",
    },
}
"""Table → the columns under its checksum, in that order."""
ADDED: dict[str, dict[str, int]] = {
    "scans": {"pending": 1, "cells": 1, "tally": 1},
    "windows": {},
    "cells": {"energy_sum": 1, "relative": 2},
    "shards": {},
}
"""Table → columns that came later, beside the checksum of version 1, with the first version that has them."""
WITH_SHARDS = 3
"""The first version whose shards stand among the tables with checksums."""


def tables(version: int) -> tuple[str, ...]:
    """The tables that every store of a version has."""
    return tuple(name for name in COLUMNS if name != "shards" or version >= WITH_SHARDS)


def has(version: int, table: str, column: str) -> bool:
    """Whether stores of a version have a column."""
    return ADDED[table].get(column, 0) <= version


def _typed(columns: Mapping[str, str], version: int = VERSION) -> str:
    """Columns of cells, or of tables that all versions with checksums have, as far as a version has them."""
    return ", ".join(f'"{name}" {kind}' for name, kind in columns.items() if has(version, "cells", name))


_INDEX = "CREATE UNIQUE INDEX cell ON cells (scan, what, ifnull(layer, -1), ifnull(head, -1), length, window);"
"""NULL differs from NULL in a key, so that missing layers and heads are written as -1 there."""


_SHARDS = f"""CREATE TABLE shards ({_typed(COLUMNS["shards"])}, checksum INTEGER NOT NULL,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE);"""


def _with_checksums(version: int) -> str:
    return f"""
CREATE TABLE scans ({_typed(COLUMNS["scans"])}, checksum INTEGER NOT NULL,
    UNIQUE (model_sha256, text_sha256, pending));
CREATE TABLE windows ({_typed(COLUMNS["windows"])}, checksum INTEGER NOT NULL,
    PRIMARY KEY (scan, length, window), FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE) WITHOUT ROWID;
CREATE TABLE cells (checksum INTEGER NOT NULL, {_typed(COLUMNS["cells"], version)}, input_energy TEXT,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE,
    FOREIGN KEY (scan, length, window) REFERENCES windows);
{_INDEX}
{_SHARDS if version >= WITH_SHARDS else ""}
"""


_SCHEMAS = {
    # The spelling of a version is compared letter by letter with the stores that have it.
    0: f"""
CREATE TABLE scans (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, model_sha256 TEXT NOT NULL, precision TEXT NOT NULL,
    text TEXT NOT NULL, text_sha256 TEXT NOT NULL, settings TEXT NOT NULL, howsmooth TEXT NOT NULL,
    UNIQUE (model_sha256, text_sha256));
CREATE TABLE windows (
    scan INTEGER NOT NULL REFERENCES scans ON DELETE CASCADE, length INTEGER NOT NULL, window INTEGER NOT NULL,
    start INTEGER NOT NULL, tokens TEXT NOT NULL, PRIMARY KEY (scan, length, window)) WITHOUT ROWID;
CREATE TABLE cells (
    scan INTEGER NOT NULL REFERENCES scans ON DELETE CASCADE,
    {_typed(PLACE | NUMBERS, 0)},
    FOREIGN KEY (scan, length, window) REFERENCES windows);
{_INDEX}
""",
    **{version: _with_checksums(version) for version in range(1, VERSION + 1)},
}


STORE = FileFormat(
    name="store",
    writer="scan",
    application_id=0x68736D31,  # "hsm1"
    schemas=tuple(_SCHEMAS.items()),
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
    kept = {name: _stored(row[name], kind) for name, kind in COLUMNS[table].items()}
    return kept | {"checksum": checksum(kept.values())}


def _stored(value: Any, kind: str) -> Any:
    """A value as SQLite gives it back."""
    if value is None or kind.startswith("TEXT"):
        return value
    if kind.startswith("REAL"):
        return None if math.isnan(value) else float(value)
    return int(value)


def fault(table: str, values: Sequence[Any], kept: int | None, version: int = VERSION) -> str:
    """The fault of a row, or "": a wrong checksum, or without checksums a wrong type."""
    if kept is not None:
        known = [value for name, value in zip(COLUMNS[table], values, strict=True) if has(version, table, name)]
        try:
            return "" if checksum(known) == kept else "is not what was written: its checksum differs"
        except TypeError:  # bytes where text was
            return "is not what was written: a column holds bytes"
    for (name, kind), value in zip(COLUMNS[table].items(), values, strict=True):
        if name not in ADDED[table] and not _fits(value, kind):
            return f"cannot be read: {name} is {value!r:.40}"
    return ""


_PYTHON = {"TEXT": str, "REAL": float, "INTEGER": int}


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return not kind.endswith("NOT NULL")
    if not isinstance(value, _PYTHON[kind.split()[0]]):
        return False
    return not isinstance(value, str) or not any("\ud800" <= letter <= "\udfff" for letter in value)
