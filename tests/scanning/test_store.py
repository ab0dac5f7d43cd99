"""The store keeps batches whole, knows what it holds, and says clearly what is wrong."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from howsmooth.scanning.plan import Cell, Settings
from howsmooth.scanning.store import Identity, Store, StoreError

IDENTITY = Identity("tiny", "m" * 64, "float32", "words.txt", "t" * 64, Settings(), "0.1.0")
TOKENS = ["[CLS]", "it's", '"<script>"', "☃"]


def numbers(value: float) -> dict[str, Any]:
    rest = dict.fromkeys(["proved", "value_path", "score_path", "value_share", "sink", "sink_token", "entropy"])
    return {
        "value": value,
        "lower": value,
        "upper": None,
        "confidence": 0.0,
        "converged": True,
        "bounds": "{}",
        "radius": 1.0,
        "dtype": "float32",
        "seconds": 0.5,
        "input_energy": "[0.25, 0.75]",
        **rest,
    }


def batch(*heads: int, window: int = 0, value: float = 2.0) -> list[tuple[Cell, dict[str, Any]]]:
    return [(Cell("head", 0, head, 4, window), numbers(value + head)) for head in heads]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "scan.sqlite"


def test_what_is_kept_is_read_back_bit_by_bit(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        store.add(scan, 7, TOKENS, batch(0, 1, value=1 / 3))
        store.add(scan, 7, TOKENS, [(Cell("model", None, None, 4, 0), numbers(0.1))])
    with Store.reading(path) as store:
        store.check()
        rows, (window,) = store.rows(), store.windows()
        assert store.cells(scan) == {
            Cell("head", 0, 0, 4, 0),
            Cell("head", 0, 1, 4, 0),
            Cell("model", None, None, 4, 0),
        }
    assert [(row["what"], row["head"], row["value"]) for row in rows] == [
        ("model", None, 0.1),
        ("head", 0, 1 / 3),
        ("head", 1, 1 / 3 + 1),
    ]
    assert rows[1]["input_energy"] == [0.25, 0.75]
    assert (rows[1]["seed"], rows[1]["rtol"], rows[1]["window_start"]) == (0, 1e-3, 7)
    assert window["tokens"] == TOKENS


def test_a_cell_that_is_there_is_never_written_again(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        store.add(scan, 0, TOKENS, batch(0))
        store.add(scan, 0, TOKENS, batch(0, 1, value=9.0))
        store.add(scan, 0, TOKENS, [(Cell("model", None, None, 4, 0), numbers(1.0))])
        store.add(scan, 0, TOKENS, [(Cell("model", None, None, 4, 0), numbers(5.0))])
        assert [row["value"] for row in store.rows()] == [1.0, 2.0, 10.0]


def test_a_batch_that_fails_leaves_nothing_behind(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        broken = [*batch(0), (Cell("head", 0, 1, 4, 0), numbers(1.0) | {"value": None})]
        with pytest.raises(sqlite3.IntegrityError):
            store.add(scan, 0, TOKENS, broken)
        assert store.rows() == []
        assert store.windows() == []


@pytest.mark.parametrize(("start", "tokens"), [(8, TOKENS), (7, TOKENS[::-1])])
def test_cells_of_another_window_never_join_those_of_the_window_kept(path: Path, start: int, tokens: list[str]) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        store.add(scan, 7, TOKENS, batch(0))
        with pytest.raises(StoreError, match="window 0 of 4 tokens is another one"):
            store.add(scan, start, tokens, batch(1))
        assert store.cells(scan) == {Cell("head", 0, 0, 4, 0)}


def test_the_same_scan_is_taken_up_again_and_others_get_a_number_of_their_own(path: Path) -> None:
    with Store.writing(path) as store:
        first, again = store.begin(IDENTITY), store.begin(replace(IDENTITY, model="other name, same weights"))
        other_text = store.begin(replace(IDENTITY, text_sha256="u" * 64))
        other_model = store.begin(replace(IDENTITY, model_sha256="n" * 64))
    assert first == again
    assert len({first, other_text, other_model}) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": Settings(rtol=1e-2)}, "rtol 0.001, not 0.01"),
        ({"settings": Settings(windows=3)}, "windows 1, not 3"),
        ({"howsmooth": "9.9"}, "howsmooth 0.1.0, not 9.9"),
    ],
)
def test_other_settings_for_the_same_model_and_text_are_refused(path: Path, change: dict[str, Any], said: str) -> None:
    with Store.writing(path) as store:
        store.begin(IDENTITY)
        with pytest.raises(StoreError, match=said):
            store.begin(replace(IDENTITY, **change))


def test_measuring_anew_removes_the_old_cells_of_that_scan_alone(path: Path) -> None:
    with Store.writing(path) as store:
        kept, old = store.begin(replace(IDENTITY, model_sha256="n" * 64)), store.begin(IDENTITY)
        for scan in (kept, old):
            store.add(scan, 0, TOKENS, batch(0, 1))
        new = store.begin(replace(IDENTITY, settings=Settings(rtol=1e-2)), resume=False)
        assert store.cells(new) == set()
        assert len(store.cells(kept)) == 2
        store.check()


def test_a_second_writer_is_refused_while_readers_are_welcome(path: Path) -> None:
    with Store.writing(path) as store:
        store.add(store.begin(IDENTITY), 0, TOKENS, batch(0))
        with pytest.raises(StoreError, match="another scan is writing to"), Store.writing(path):
            pass
        with Store.reading(path) as reader:
            assert len(reader.rows()) == 1
    with Store.writing(path):
        pass
    assert [file.name for file in path.parent.iterdir()] == ["scan.sqlite"]


def test_a_missing_store_is_an_error_that_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(StoreError, match="howsmooth scan MODEL --out"), Store.reading(path):
        pass


def test_files_that_are_no_stores_are_refused_and_left_alone(tmp_path: Path) -> None:
    note, other = tmp_path / "note.txt", tmp_path / "other.sqlite"
    note.write_text("a note, long enough to be no header of a database " * 10)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    for path, said in ((note, "no sound store"), (other, "no store of this version")):
        before = path.read_bytes()
        for opened in (Store.writing, Store.reading):
            with pytest.raises(StoreError, match=said), opened(path):
                pass
        if path is note:
            assert path.read_bytes() == before
    with sqlite3.connect(other) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    db.close()


def test_a_damaged_store_is_noticed(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        for window in range(40):
            store.add(scan, 0, TOKENS * 20, batch(*range(12), window=window))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8192] = bytes(8192)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|no sound store"), Store.reading(path) as store:
        store.check()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose another --out"), Store.writing(tmp_path):
        pass
