"""Small stores with numbers that nobody measured."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from howsmooth.scans.plan import ScanCell, ScanSettings
from howsmooth.scans.scan_store import Identity, Store

IDENTITY = Identity("tiny", "m" * 64, "float32", "words.txt", "t" * 64, ScanSettings(), "0.1.0")
TOKENS = ["[CLS]", "it's", '"<script>"', "☃"]


def numbers(value: float) -> dict[str, Any]:
    rest = dict.fromkeys(
        ["relative", "proved", "value_path", "score_path", "value_share", "sink", "sink_token", "entropy"]
    )
    return {
        "value": value,
        "lower": value,
        "upper": None,
        "confidence": 0.0,
        "converged": True,
        "bounds": {},
        "radius": 1.0,
        "dtype": "float32",
        "seconds": 0.5,
        "input_energy": [0.25, 0.75],
        **rest,
    }


def batch(*heads: int, window: int = 0, value: float = 2.0) -> list[tuple[ScanCell, dict[str, Any]]]:
    return [(ScanCell("head", 0, head, 4, window), numbers(value + head)) for head in heads]


def kept(path: Path, windows: int = 2) -> Path:
    """A finished store of ten heads in each window."""
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        for window in range(windows):
            store.add(scan, 7 * window, TOKENS, batch(*range(10), window=window))
    return path


def change(path: Path, *statements: str) -> None:
    """What somebody else does to a store."""
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
