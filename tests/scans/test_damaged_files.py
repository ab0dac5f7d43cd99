"""A store that is not what was written is refused with the row named."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from howsmooth.scans import Scan, Store, StoreError, salvage
from tests.scans.stores import IDENTITY, TOKENS, batch, change, kept


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "scan.sqlite"


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


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TRIGGER t AFTER INSERT ON cells BEGIN DELETE FROM cells; END"],
        [
            "DROP TABLE cells",
            "CREATE VIEW cells AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT * FROM c",
        ],
        ["ALTER TABLE cells DROP COLUMN entropy"],
        ["DROP TABLE windows"],
        ["CREATE INDEX mine ON cells (value)"],
    ],
)
def test_tables_that_are_not_those_of_a_store_are_refused_unread(path: Path, statements: list[str]) -> None:
    change(kept(path), *statements)
    for opened in (Store.reading, Store.writing):
        with pytest.raises(StoreError, match="its tables are not those of a store"), opened(path):
            pass


@pytest.mark.slow
def test_damage_that_sqlite_quotes_in_no_alphabet_is_one_sentence(path: Path, tmp_path: Path) -> None:
    content = kept(path).read_bytes()
    broken = content.replace(b"tablecellscells\x05CREATE TABLE cells", b"tablec\xd3llscells\x05CREATE TABLE ce((s")
    assert broken != content
    path.write_bytes(broken)
    with pytest.raises(StoreError, match="malformed database schema"), Store.reading(path):
        pass
    with pytest.raises(StoreError, match="malformed database schema"), Store.writing(path):
        pass
    with pytest.raises(StoreError):
        salvage(path, tmp_path / "salvaged.sqlite")
    assert path.read_bytes() == broken


@pytest.mark.parametrize("version", [0, 2, 9])
def test_a_store_of_another_version_is_refused_in_one_sentence(path: Path, version: int) -> None:
    change(kept(path), f"PRAGMA user_version = {version}")
    for opened in (Store.reading, Store.writing):
        with pytest.raises(StoreError, match="was written by another version of howsmooth"), opened(path):
            pass


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE cells SET value = 99 WHERE head = 3 AND window = 1", "the head at layer 0, head 3, n = 4, window 1"),
        ("UPDATE cells SET lower = lower + 1e-12 WHERE head = 3 AND window = 1", "head 3, n = 4, window 1"),
        ("UPDATE cells SET bounds = '{' WHERE head = 2 AND window = 0", "head 2, n = 4, window 0"),
        ("UPDATE cells SET dtype = x'ff' WHERE head = 2 AND window = 0", "head 2, n = 4, window 0"),
        ("UPDATE cells SET value = 'x' WHERE head = 2 AND window = 0", "head 2, n = 4, window 0"),
        ("UPDATE windows SET tokens = '[1]' WHERE window = 1", "window 1 of 4 tokens"),
        ("UPDATE scans SET model = 'other'", "scan 1"),
        ("DELETE FROM cells WHERE head = 4 AND window = 1", "there are 19 cells, not the 20"),
        ("DELETE FROM scans", "belongs to no scan"),
        ("DELETE FROM windows WHERE window = 1", "has lost its window"),
    ],
)
def test_what_was_changed_is_found_and_its_row_named(path: Path, statement: str, said: str) -> None:
    change(kept(path), statement)
    with pytest.raises(StoreError, match=said) as refused:
        Scan.open(path)
    assert "--salvage" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_damaged_shares_are_found_when_they_are_read_and_no_sooner(path: Path) -> None:
    change(kept(path), "UPDATE cells SET input_energy = '[0.5, 0.5]' WHERE head = 3 AND window = 1")
    scan = Scan.open(path)
    assert scan.energies["tiny", 0, 2, 4, 1] == [0.25, 0.75]
    assert len(scan.energies) == 40  # by model and text, and by model alone
    with pytest.raises(StoreError, match="head 3, n = 4, window 1 has other shares of tokens"):
        scan.energies["tiny", 0, 3, 4, 1]


def test_shares_that_became_bytes_are_found(path: Path) -> None:
    change(kept(path), "UPDATE cells SET input_energy = x'5b315d' WHERE head = 3 AND window = 1")
    with pytest.raises(StoreError, match="head 3, n = 4, window 1 has other shares of tokens"):
        Scan.open(path).energies["tiny", 0, 3, 4, 1]


def test_a_scan_does_not_go_on_in_a_store_with_a_changed_number(path: Path) -> None:
    change(kept(path), "UPDATE cells SET value = 99 WHERE head = 3 AND window = 1")
    with (
        pytest.raises(StoreError, match="head 3, n = 4, window 1 is not what was written"),
        Store.writing(path) as store,
    ):
        store.begin(IDENTITY)


def test_the_file_of_a_killed_scan_alone_is_a_store(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    with Store.writing(path) as store:
        store.add(store.begin(IDENTITY), 0, TOKENS, batch(0))
        shutil.copyfile(path, copy)
    with Store.reading(copy) as store:
        assert store.rows() == []


def test_the_empty_file_of_an_older_killed_scan_says_where_the_cells_are(tmp_path: Path) -> None:
    path, copy = tmp_path / "s.sqlite", tmp_path / "copy.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE cells (x)")
    shutil.copyfile(path, copy)
    db.close()
    with pytest.raises(StoreError, match=r"its content is in the file copy\.sqlite-wal"), Store.reading(copy):
        pass
