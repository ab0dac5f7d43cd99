"""Stores of ``quantise``: what is damaged is refused or found anew, and no run goes on for ever."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from evidence.damage import KINDS, damage
from howsmooth.errors import InvalidInput
from howsmooth.rounding.window_store import each_window, run_name

RUN = run_name({"model": "a"})


def windows(path: Path, count: int = 3) -> list[float]:
    return [float(one["x"]) for one in each_window(path, RUN, count, lambda window: {"x": torch.tensor(window / 7)})]


def test_a_damaged_byte_never_changes_a_number() -> None:
    found = damage(KINDS["windows"], trials=25)
    assert not found.wrong
    assert found.counts["refused"]


def test_rows_that_have_changed_places_are_refused(tmp_path: Path) -> None:
    """Every row is what was written, but of another window."""
    path = tmp_path / "store.sqlite"
    windows(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE windows SET window = 9 WHERE window = 0")
        db.execute("UPDATE windows SET window = 0 WHERE window = 1")
        db.execute("UPDATE windows SET window = 1 WHERE window = 9")
    with pytest.raises(InvalidInput, match=r"window 0 in .* is not what was written"):
        windows(path)


def test_an_index_that_lacks_rows_is_refused_and_not_filled_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    windows(path)
    content = path.read_bytes()
    place = content.rindex(RUN.encode())  # in the index, which stands behind the table
    path.write_bytes(content[:place] + b"z" + content[place + 1 :])
    with pytest.raises(InvalidInput, match="the file is damaged"):
        windows(path)


def test_a_store_that_is_cut_short_is_refused_or_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    expected = windows(path)
    content = path.read_bytes()
    refused = 0
    for length in range(0, len(content), 512):
        path.write_bytes(content[:length])
        try:
            assert windows(path) == expected
        except InvalidInput:
            refused += 1
    assert refused


@pytest.mark.parametrize(("version", "said"), [(0, "earlier"), (2, "later")])
def test_stores_of_other_versions_are_refused(tmp_path: Path, version: int, said: str) -> None:
    path = tmp_path / "store.sqlite"
    windows(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(InvalidInput, match=f"written by a {said} version"):
        windows(path)
