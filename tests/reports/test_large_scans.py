"""Reports of large scans: what is shown is read, what does not fit leaves its room, and nothing is left out unsaid."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evidence.large_stores import Size, write_store
from howsmooth.reports import groups, summary
from howsmooth.reports.page import page
from howsmooth.reports.payload import group_data, shown_rows
from howsmooth.reports.scan_groups import cell_of
from howsmooth.scans import Scan


class Counted(Mapping[tuple[Any, ...], list[float]]):
    """Shares of every head that say how many of them were read."""

    def __init__(self, keys: list[tuple[Any, ...]]):
        self.places, self.read = dict.fromkeys(keys), 0

    def __getitem__(self, key: tuple[Any, ...]) -> list[float]:
        self.read += 1
        return [1 / key[-2]] * key[-2]

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass
class Large:
    """A scan of 1024 heads."""

    rows: list[dict[str, Any]]
    energies: Counted
    tokens: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)


def large(lengths: Sequence[int], windows: int) -> Large:
    rows = [
        {
            "model": "m",
            "what": "head",
            "layer": layer,
            "head": head,
            "length": n,
            "window": window,
            "value": 1.0 + layer + head / 100 + (window * 7 % windows) / 10_000,
            "bounds": {},
        }
        for n in lengths
        for window in range(windows)
        for layer in range(32)
        for head in range(32)
    ]
    keys = [("m", row["layer"], row["head"], row["length"], row["window"]) for row in rows]
    return Large(rows, Counted(keys), {("m", n, w): ["word"] * n for n in lengths for w in range(windows)})


def test_shares_of_short_windows_survive_when_the_longest_do_not_fit() -> None:
    scan = large((64, 256, 1024), 1)
    (packed,) = group_data(groups(scan))
    count = {n: sum(key.split("/")[2] == str(n) for key in packed["energies"]) for n in (64, 256, 1024)}
    assert count == {64: 1024, 256: 1024, 1024: 20}
    assert "31/31/1024/0" in packed["energies"]  # the roughest head, which the page opens with
    assert scan.energies.read == len(packed["energies"]) < 3 * 1024
    assert sum(map(len, packed["energies"].values())) <= 1_500_000


@pytest.mark.slow
def test_of_too_many_rows_the_roughest_window_of_every_cell_stays_and_the_page_says_so() -> None:
    scan = large((8, 16, 32, 64), 6)  # 24,576 rows
    (group,) = groups(scan)
    rows = shown_rows(group, 16_000)
    assert len(rows) == 16_000
    places = [(row["layer"], row["head"], row["length"], row["window"]) for row in rows]
    shown = set(places)
    assert places == [place for place in group.energies if place in shown]  # in the order of the scan
    best = {(row["layer"], row["head"], row["length"]): row["window"] for row in group.rows if row["window"] == 5}
    roughest = max(range(6), key=lambda window: window * 7 % 6)
    assert {(*cell, roughest) for cell in best} <= shown
    whole = page([group])
    assert len(whole.encode()) < 5_000_000
    (packed,) = json.loads(whole.partition('id="scan">')[2].partition("</script>")[0])["groups"]
    said = dict(packed["methods"])
    assert said["cells on this page"] == (
        "16000 of 24576: of every cell at every length the roughest windows; the store has all"
    )
    assert said["cells"] == "24576, of which 24576 reached that accuracy"
    assert all(packed["tokens"][f"{n}/{roughest}"] == ["word"] * n for n in (8, 16, 32, 64))


def test_a_small_scan_is_shown_whole() -> None:
    (group,) = groups(large((8,), 2))
    assert shown_rows(group, 16_000) is group.rows
    (packed,) = group_data([group])
    assert len(packed["energies"]) == len(group.rows)
    assert "cells on this page" not in [name for name, _ in packed["methods"]]


def test_groups_are_not_made_twice() -> None:
    found = groups(large((8,), 1))
    assert groups(found) is found


def test_a_report_of_a_store_opens_it_with_the_shares_that_are_shown(tmp_path: Path) -> None:
    write_store(tmp_path / "s.sqlite", Size(layers=2, heads=2, lengths="8,16", windows=2))
    scan = Scan.open(tmp_path / "s.sqlite")
    (group,) = groups(scan)
    (packed,) = group_data([group])
    assert len(packed["energies"]) == len(scan) == 16
    assert group.energies[1, 0, 16, 1] == scan.energies["large", 1, 0, 16, 1]
    assert abs(sum(group.energies[1, 0, 16, 1]) - 1) < 1e-4


def test_the_rows_are_grouped_once_for_page_and_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped: list[Any] = []

    def counted(row: Any) -> Any:
        grouped.append(row)
        return cell_of(row)

    for module in ("scan_groups", "findings", "payload", "text_summary"):
        known = sys.modules[f"howsmooth.reports.{module}"]
        if hasattr(known, "cell_of"):
            monkeypatch.setattr(known, "cell_of", counted)
    found = groups(large((8, 16), 2))
    page(found)
    summary(found)
    assert 4096 == len(found[0].rows) <= len(grouped) < 4096 + 50
