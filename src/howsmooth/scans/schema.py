"""The tables of a store, and the checksums that tell its rows from others.

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


def _typed(table: str) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS[table].items())


# The tables of a store are compared letter by letter with these. NULL differs from NULL in a key, so that missing
# layers and heads are written as -1 in the index.
_TABLES = f"""
CREATE TABLE scans ({_typed("scans")}, checksum INTEGER NOT NULL,
    UNIQUE (model_sha256, text_sha256, pending));
CREATE TABLE windows ({_typed("windows")}, checksum INTEGER NOT NULL,
    PRIMARY KEY (scan, length, window), FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE) WITHOUT ROWID;
CREATE TABLE cells (checksum INTEGER NOT NULL, {_typed("cells")}, input_energy TEXT,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE,
    FOREIGN KEY (scan, length, window) REFERENCES windows);
CREATE UNIQUE INDEX cell ON cells (scan, what, ifnull(layer, -1), ifnull(head, -1), length, window);
CREATE TABLE shards ({_typed("shards")}, checksum INTEGER NOT NULL,
    FOREIGN KEY (scan) REFERENCES scans ON DELETE CASCADE);
"""
STORE = FileFormat(
    name="store",
    writer="scan",
    application_id=0x68736D31,  # "hsm1"
    version=3,
    tables=_TABLES,
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


def fault(values: Sequence[Any], written: int) -> str:
    """The fault of a row with a wrong checksum, or ""."""
    try:
        return "" if checksum(values) == written else "is not what was written: its checksum differs"
    except TypeError:  # bytes where text was
        return "is not what was written: a column holds bytes"
