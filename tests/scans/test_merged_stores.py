"""Stores as one: shards give the whole scan, and what does not belong together is refused and named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evidence.scan_faults import contents
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.scans import Store, StoreError, merge, salvage
from howsmooth.scans import scan as run_scan
from howsmooth.scans.plan import CellBatch, ScanSettings
from howsmooth.scans.units import Shard, note_shard, parse_shard, read_shards
from tests.cli.command import Command
from tests.scans.stores import IDENTITY, TOKENS, batch, change, kept, numbers

ASKED: dict[str, Any] = {"lengths": [6, 8], "windows": 3, "what": "head,attention"}
MERGE = Command("merge")


def store(path: Path, *heads: int, window: int = 0, value: float = 2.0, **changes: Any) -> Path:
    """A store of some heads of one window."""
    with Store.writing(path) as made:
        number = made.begin(replace(IDENTITY, **changes))
        made.add(number, 7 * window, TOKENS, batch(*heads, window=window, value=value))
    return path


def shard(path: Path, number: int, count: int, *heads: int, cells: int | None = None) -> Path:
    """The same, as a part of a scan."""
    with Store.writing(path) as made:
        part = Shard(number, count, IDENTITY.model_sha256, IDENTITY.text_sha256, "plan", len(heads))
        note_shard(made, made.begin(IDENTITY), part if cells is None else replace(part, cells=cells))
    return store(path, *heads)


@pytest.mark.slow
def test_four_shards_are_the_whole_scan(folder: Path, text: Path, tmp_path: Path) -> None:
    run_scan(str(folder), text, **ASKED, out=tmp_path / "whole.sqlite")
    parts = [tmp_path / f"{number}.sqlite" for number in range(1, 5)]
    for number, path in enumerate(parts, start=1):
        run_scan(str(folder), text, **ASKED, out=path, shard=f"{number}/4")
    done = merge(parts, tmp_path / "all.sqlite")
    assert (done.cells, done.twice, done.scans) == (2 * 3 * 2 * 5, 0, 1)
    assert contents(tmp_path / "all.sqlite") == contents(tmp_path / "whole.sqlite")
    sizes = [len(contents(path)) for path in parts]
    assert sum(sizes) == done.cells
    assert max(sizes) - min(sizes) <= 10  # one unit: both kinds of one layer, twice


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shards_of_a_plan_are_disjoint_and_complete(count: int) -> None:
    plan = [CellBatch("head", layer, (0, 1), n, window) for n in (8, 16) for window in range(3) for layer in range(5)]
    parts = [Shard(number, count).part(plan) for number in range(1, count + 1)]
    together = [one for part in parts for one in part]
    assert len(together) == len(set(together)) == len(plan)
    assert set(together) == set(plan)


def test_a_cell_that_stands_in_two_stores_is_kept_once(tmp_path: Path) -> None:
    one, other = store(tmp_path / "1", 0, 1, 2), store(tmp_path / "2", 2, 3)
    with Store.writing(other) as made:  # it took another time there
        made.add(1, 7, TOKENS, [(cell, numbers(5.0) | {"seconds": 9.0}) for cell, _ in batch(4, window=1)])
    with Store.writing(one) as made:
        made.add(1, 7, TOKENS, [(cell, numbers(5.0)) for cell, _ in batch(4, window=1)])
    done = merge([one, other], tmp_path / "all")
    assert (done.cells, done.twice) == (5, 2)
    assert str(done) == f"5 cells of 1 scan(s) from 2 stores are in {tmp_path / 'all'}; 2 of them stood in several, " \
        "with the same numbers"  # fmt: skip
    with Store.reading(tmp_path / "all") as made:
        made.check()
        assert [row["value"] for row in made.rows()] == [2.0, 3.0, 4.0, 5.0, 5.0]


def test_scans_of_other_models_stand_side_by_side(tmp_path: Path) -> None:
    one, other = store(tmp_path / "1", 0), store(tmp_path / "2", 0, model="large", model_sha256="l" * 64)
    merge([one, other], tmp_path / "all")
    with Store.reading(tmp_path / "all") as made:
        assert [row["model"] for row in made.scans()] == ["tiny", "large"]


def _refusals() -> dict[str, tuple[Any, str]]:
    def two(tmp: Path, **changes: Any) -> list[Path]:
        return [store(tmp / "1", 0, 1), store(tmp / "2", 1, 2, **changes)]

    return {
        "another number": (lambda tmp: two(tmp, value=2.5), "the head at layer 0, head 1, n = 4, window 0 has two"),
        "other settings": (lambda tmp: two(tmp, settings=ScanSettings(rtol=0.5)), "with another settings"),
        "another version": (lambda tmp: two(tmp, howsmooth="0.0.9"), "with another version of howsmooth"),
        "another precision": (lambda tmp: two(tmp, precision="4 bits"), "with another precision"),
        "the same store twice": (lambda tmp: [store(tmp / "1", 0)] * 2, r"/1 is given twice: name each store once"),
        "the same store by another name": (
            lambda tmp: [store(tmp / "1", 0), _link(tmp)],
            "/1 and .*/2 are one file: name each",
        ),
        "a shard that says that it is the whole": (
            lambda tmp: [_changed(tmp, "count = 1")],
            "is shard 1/1 is not what was",
        ),
        "no store": (lambda tmp: [store(tmp / "1", 0), tmp / "none"], "there is no store"),
        "a missing shard": (
            lambda tmp: [shard(tmp / "1", 1, 3, 0), shard(tmp / "3", 3, 3, 2)],
            "shard 2/3 of .* is not among the stores",
        ),
        "a shard twice": (lambda tmp: [shard(tmp / "1", 1, 1, 0), shard(tmp / "2", 1, 1, 0)], "are both shard 1/1"),
        "an unfinished shard": (lambda tmp: [shard(tmp / "1", 1, 1, 0, cells=9)], "has 1 of its 9 cells"),
        "a damaged store": (lambda tmp: [_damaged(store(tmp / "1", 0))], "is damaged"),
    }


def _link(folder: Path) -> Path:
    (folder / "2").symlink_to(folder / "1")
    return folder / "2"


def _changed(folder: Path, to: str) -> Path:
    path = shard(folder / "1", 1, 2, 0, 1)
    change(path, f"UPDATE shards SET {to}")
    return path


def _damaged(path: Path) -> Path:
    change(path, "UPDATE cells SET value = 17")
    return path


@pytest.mark.parametrize("name", _refusals())
def test_what_does_not_belong_together_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, said = _refusals()[name]
    inputs = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(HowsmoothError, match=said):
        merge(inputs, tmp_path / "all")
    assert "howsmooth: " in MERGE.refusal(*inputs, "--out", tmp_path / "all")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before  # nothing new, nothing changed


def test_an_existing_file_or_an_input_is_never_written_over(tmp_path: Path) -> None:
    one, other = store(tmp_path / "1", 0), store(tmp_path / "2", 1)
    before = other.read_bytes()
    assert "is also the store" in MERGE.refusal(one, other, "--out", other)
    (tmp_path / "all").write_text("mine")
    assert "is there already" in MERGE.refusal(one, other, "--out", tmp_path / "all")
    assert (other.read_bytes(), (tmp_path / "all").read_text()) == (before, "mine")


def test_partial_joins_the_shards_that_are_there(tmp_path: Path) -> None:
    found = MERGE.json(shard(tmp_path / "1", 1, 3, 0, 1), "--out", tmp_path / "all", "--partial")
    assert (found["cells"], found["store"]) == (2, str(tmp_path / "all"))
    assert read_shards(tmp_path / "all") == []


def test_another_shard_in_the_same_store_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.sqlite"
    run_scan(str(folder), text, lengths=6, out=out, shard="1/2")
    with pytest.raises(StoreError, match=r"holds shard 1/2 of another plan, not shard 2/2 .* a store of its own"):
        run_scan(str(folder), text, lengths=6, out=out, shard="2/2")
    assert len(run_scan(str(folder), text, lengths=6, out=out, shard="1/2")) == len(contents(out))


@pytest.mark.parametrize(
    "statement",
    [
        *(f"UPDATE shards SET {to}" for to in ("count = 1", "number = 2", "plan = 'p'", "cells = 1", "checksum = 0")),
        "DELETE FROM shards",
        "DROP TABLE shards",
        "INSERT INTO shards SELECT scan + 1, number, count, plan, cells, checksum FROM shards",
    ],
)
def test_the_note_of_a_shard_is_what_was_written_or_refused(tmp_path: Path, statement: str) -> None:
    path = shard(tmp_path / "1", 1, 2, 0, 1)
    change(path, statement)
    for opened in (Store.reading, Store.writing):
        with pytest.raises(StoreError, match="is damaged"), opened(path):
            pass


def test_what_is_salvaged_of_a_shard_is_still_a_shard(tmp_path: Path) -> None:
    path = shard(tmp_path / "1", 1, 2, 0, 1)
    change(path, "UPDATE cells SET value = 17 WHERE head = 0")
    assert "1 of 2 cells are whole" in str(salvage(path, tmp_path / "2"))
    (noted,) = read_shards(tmp_path / "2")
    assert (str(noted), noted.cells, noted.there) == ("1/2", 2, 1)
    with pytest.raises(StoreError, match="has 1 of its 2 cells"):
        merge([tmp_path / "2"], tmp_path / "all")


def test_a_store_is_of_one_shard_or_of_the_whole(folder: Path, text: Path, tmp_path: Path) -> None:
    part, whole = tmp_path / "1.sqlite", tmp_path / "whole.sqlite"
    run_scan(str(folder), text, lengths=6, out=part, shard="1/3")
    before = contents(part)
    with pytest.raises(StoreError, match="holds shard 1/3 of this scan, not the whole: choose another --out"):
        run_scan(str(folder), text, lengths=6, out=part)
    assert contents(part) == before
    run_scan(str(folder), text, lengths=6, out=whole)
    with pytest.raises(StoreError, match="that are of no shard, not those of shard 1/3"):
        run_scan(str(folder), text, lengths=6, out=whole, shard="1/3")
    run_scan(str(folder), text, lengths=6, out=part, resume=False)
    assert read_shards(part) == []
    assert contents(part) == contents(whole)


@pytest.mark.parametrize("said", ["", "0/4", "5/4", "1", "1/0", "-1/4", "a/b", "1/2/3", "1/99999999"])
def test_what_is_no_shard_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match="a shard is i/N with i from 1 to N, or slurm"):
        parse_shard(said)


@pytest.mark.parametrize(
    ("task", "count", "first", "step", "expected"),
    [
        ("3", "4", "1", "1", "3/4"),
        ("0", "4", "0", "1", "1/4"),
        ("30", "3", "10", "10", "3/3"),
        ("2", "4", "", "", "2/4"),
    ],
)
def test_slurm_says_which_shard(
    task: str, count: str, first: str, step: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ID", "COUNT", "MIN", "STEP")
    for name, value in zip(names, (task, count, first, step), strict=True):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert str(parse_shard("slurm")) == expected


def test_slurm_shards_need_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    with pytest.raises(InvalidInput, match="which are not set: submit a job array"):
        parse_shard("slurm")


def test_a_merge_of_many_cells_reads_them_one_by_one(tmp_path: Path) -> None:
    """The joined store of ten windows has the cells and the count of both."""
    done = merge([kept(tmp_path / "1", windows=10)], tmp_path / "all")
    assert done.cells == 100
