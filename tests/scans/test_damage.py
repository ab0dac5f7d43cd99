"""Stores with one byte changed are refused or as good as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.damage import KINDS, Kind, damage
from howsmooth.scans import Scan


@pytest.mark.parametrize(
    ("name", "trials"),
    [
        ("store", 40),
        pytest.param("store-resumed", 12, marks=pytest.mark.slow),
        pytest.param("store-salvaged", 12, marks=pytest.mark.slow),
    ],
)
def test_no_changed_byte_passes_for_good_or_crashes(name: str, trials: int) -> None:
    found = damage(KINDS[name], trials, seed=1)
    assert found.wrong == []
    assert found.counts["refused"] + found.counts["same"] == trials
    assert all("\n" not in said for said in found.messages)


@pytest.mark.slow
def test_the_loop_tells_other_contents_and_crashes_from_the_rest(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        path = folder / "note.txt"
        path.write_bytes(bytes(range(200)))
        return path

    def read(path: Path) -> bytes:
        content = path.read_bytes()
        if max(content[:100]) > 99:
            raise KeyError("a bare error")
        return content

    found = damage(Kind("note", make, read), trials=30)
    assert set(found.counts) == {"different", "crash"}
    assert len(found.wrong) == 30


def test_a_store_of_the_kind_is_sound(tmp_path: Path) -> None:
    assert len(Scan.open(KINDS["store"].make(tmp_path))) == 3 * 4 * 3 * 3
