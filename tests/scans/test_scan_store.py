"""The store keeps batches whole, knows what it holds, and says clearly what is wrong."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.scans import Scan, Store, StoreError
from howsmooth.scans.plan import ScanCell, ScanSettings
from tests.scans.stores import IDENTITY, TOKENS, batch, kept, numbers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "scan.sqlite"


def test_what_is_kept_is_read_back_bit_by_bit(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        store.add(scan, 7, TOKENS, batch(0, 1, value=1 / 3))
        store.add(scan, 7, TOKENS, [(ScanCell("model", None, None, 4, 0), numbers(0.1))])
    with Store.reading(path) as store:
        store.check()
        rows, (window,) = store.rows(), store.windows()
        assert store.cells(scan) == {
            ScanCell("head", 0, 0, 4, 0),
            ScanCell("head", 0, 1, 4, 0),
            ScanCell("model", None, None, 4, 0),
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
        store.add(scan, 0, TOKENS, [(ScanCell("model", None, None, 4, 0), numbers(1.0))])
        store.add(scan, 0, TOKENS, [(ScanCell("model", None, None, 4, 0), numbers(5.0))])
        assert [row["value"] for row in store.rows()] == [1.0, 2.0, 10.0]


def test_a_batch_that_fails_leaves_nothing_behind(path: Path) -> None:
    with Store.writing(path) as store:
        scan = store.begin(IDENTITY)
        broken = [*batch(0), (ScanCell("head", 0, 1, 4, 0), numbers(1.0) | {"value": None})]
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
        assert store.cells(scan) == {ScanCell("head", 0, 0, 4, 0)}


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
        ({"settings": ScanSettings(rtol=1e-2)}, "rtol 0.001, not 0.01"),
        ({"settings": ScanSettings(windows=3)}, "windows 1, not 3"),
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
        new = store.begin(replace(IDENTITY, settings=ScanSettings(rtol=1e-2)), resume=False)
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


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose another --out"), Store.writing(tmp_path):
        pass


def test_a_finished_store_is_one_file_that_needs_nothing_beside_it(path: Path) -> None:
    kept(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes()[18:20] == b"\x01\x01"  # no -wal is looked for


def test_a_store_is_read_where_nothing_can_be_written(path: Path, tmp_path: Path) -> None:
    place = tmp_path / "medium"
    place.mkdir()
    store = place / "s.sqlite"
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "none", place], check=False).returncode:
        pytest.skip("mounting a medium for reading alone needs root")
    try:
        shutil.copyfile(kept(path), store)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert len(Scan.open(store)) == 20
        with pytest.raises(StoreError, match="choose another --out"), Store.writing(store):
            pass
    finally:
        subprocess.run(["umount", place], check=True)


def test_reading_leaves_the_bytes_of_a_store_and_its_folder_alone(path: Path) -> None:
    before = kept(path).read_bytes()
    assert Scan.open(path).rows
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name]


@pytest.mark.parametrize("event", ["removed", "renamed", "replaced"])
def test_a_store_that_is_taken_away_while_it_is_written_is_noticed(path: Path, tmp_path: Path, event: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(StoreError, match="was removed, renamed or replaced while the scan was"))
        store = stack.enter_context(Store.writing(path))
        scan = store.begin(IDENTITY)
        store.add(scan, 0, TOKENS, batch(0))
        if event == "removed":
            path.unlink()
        else:
            path.rename(tmp_path / "other.sqlite")
        if event == "replaced":
            path.write_bytes(b"something else")
        with pytest.raises(StoreError, match="nothing can be kept there"):
            store.add(scan, 0, TOKENS, batch(1))


def test_a_store_that_is_taken_away_after_the_last_batch_is_noticed(path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(StoreError, match="was removed"))
        store = stack.enter_context(Store.writing(path))
        store.add(store.begin(IDENTITY), 0, TOKENS, batch(0))
        path.unlink()


def test_an_address_is_no_name_of_a_store() -> None:
    with pytest.raises(InvalidInput, match="is an address, not a file"), Store.writing("file:x?mode=memory"):
        pass


def test_a_lock_that_is_none_is_named(path: Path) -> None:
    path.parent.mkdir()
    Path(f"{path}.lock").write_text("no lock, but long enough to be taken for a database " * 20)
    with pytest.raises(StoreError, match=r"scan\.sqlite\.lock is in the way"), Store.writing(path):
        pass
    assert not path.exists()


def values(path: Path) -> list[float]:
    with Store.reading(path) as store:
        return [row["value"] for row in store.rows()]


def test_measuring_anew_keeps_the_old_cells_until_the_new_ones_are_there(path: Path) -> None:
    new = replace(IDENTITY, settings=ScanSettings(rtol=1e-2))
    with Store.writing(path) as store:
        store.add(store.begin(IDENTITY), 0, TOKENS, batch(0, 1))
    with Store.writing(path) as store:
        store.add(store.begin(new, resume=False), 0, TOKENS, batch(0, value=5.0))
    assert values(path) == [2.0, 3.0]  # interrupted: nothing is lost
    with Store.writing(path) as store:
        assert store.cells(store.begin(IDENTITY)) == {ScanCell("head", 0, 0, 4, 0), ScanCell("head", 0, 1, 4, 0)}
        number = store.begin(new, resume=False)
        assert store.cells(number) == {ScanCell("head", 0, 0, 4, 0)}  # goes on where it was
        store.add(number, 0, TOKENS, batch(1, value=5.0))
        store.finish(number)
        store.check()
    assert values(path) == [5.0, 6.0]
    with Store.reading(path) as store:
        assert [scan["settings"]["rtol"] for scan in store.scans()] == [1e-2]


class Interrupting:
    """A connection on which Ctrl-C is pressed before or after the k-th statement."""

    def __init__(self, db: sqlite3.Connection, k: int, before: bool):
        self.db, self.left, self.before = db, k, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.before:
            raise KeyboardInterrupt
        done = self.db.execute(*args)
        if self.left == 0:
            raise KeyboardInterrupt
        return done


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_an_interruption_at_any_statement_leaves_whole_batches(tmp_path: Path, before: bool) -> None:
    for k in range(1, 40):
        path = tmp_path / f"{k}.sqlite"
        kept(path, windows=1)
        done = False
        with suppress(KeyboardInterrupt), Store.writing(path) as store:
            store._db = Interrupting(store._db, k, before)  # type: ignore[assignment]
            scan = store.begin(replace(IDENTITY, settings=ScanSettings(rtol=0.1)), resume=False)
            store.add(scan, 0, TOKENS, batch(0, 1, value=50.0))
            store.finish(scan)
            done = True
        with Store.writing(path) as store:
            store.check()
        found = values(path)
        assert found in ([float(2 + head) for head in range(10)], [50.0, 51.0])
        if done:
            assert found == [50.0, 51.0]
            break
    assert done
