"""Ledgers: what was written is read again or refused in one sentence, after kills, damage and full disks."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from evidence.damage import KINDS, damage
from howsmooth._util.ledger import Ledger
from howsmooth._util.sqlite_files import StoreError

RUN = {"network": "a", "norm": "2"}
WRITER = """
import sys
from pathlib import Path
from howsmooth._util.ledger import Ledger
from howsmooth.errors import HowsmoothError
try:
    with Ledger.writing(Path(sys.argv[1]), {"network": "a", "norm": "2"}) as ledger:
        for number in range(int(sys.argv[2]), 10**6):
            ledger.write(f"item {number}", bytes(2000))
            print(number, flush=True)
except HowsmoothError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def written(path: Path, count: int = 3, run: dict[str, str] = RUN) -> list[float]:
    """The numbers of a run, those that are missing computed."""
    with Ledger.writing(path, run) as ledger:
        computed = [ledger.tensors(f"window {i}", lambda i=i: {"x": torch.tensor(i / 7)}) for i in range(count)]
    return [float(one["x"]) for one in computed]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written(path := tmp_path / "run.sqlite")
    return path


def items(path: Path, run: dict[str, str] = RUN) -> list[str]:
    with Ledger.writing(path, run) as ledger:
        return ledger.items()


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize("kind", ["windows", "radii"])
def test_a_damaged_byte_never_changes_a_number(kind: str) -> None:
    found = damage(KINDS[kind], trials=25)
    assert not found.wrong
    assert found.counts["refused"]


def test_rows_that_have_changed_places_are_refused(path: Path) -> None:
    """Every row is what was written, but of another item."""
    swap = [("9", "0"), ("0", "1"), ("1", "9")]
    change(path, *(f"UPDATE items SET item = 'window {new}' WHERE item = 'window {old}'" for new, old in swap))
    with pytest.raises(StoreError, match=r"window 0 in .* is not what was written"):
        written(path)


def test_an_index_that_lacks_rows_is_refused_and_not_filled_for_ever(path: Path) -> None:
    content = path.read_bytes()
    place = content.rindex(b"window 1")  # in the index, which stands behind the table
    path.write_bytes(content[:place] + b"z" + content[place + 1 :])
    with pytest.raises(StoreError, match="is damaged"):
        written(path)


def test_a_ledger_that_is_cut_short_is_refused_or_says_the_same(path: Path) -> None:
    expected = written(path)
    content = path.read_bytes()
    refused = 0
    for length in range(0, len(content), 512):
        path.write_bytes(content[:length])
        try:
            assert written(path) == expected
        except StoreError:
            refused += 1
    assert refused


@pytest.mark.parametrize("version", [0, 2])
def test_ledgers_of_other_versions_are_refused(path: Path, version: int) -> None:
    change(path, f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError, match="was written by another version of howsmooth"):
        written(path)


def test_changed_bytes_and_an_item_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    change(path, "UPDATE items SET content = zeroblob(length(content)) WHERE item = 'window 1'")
    with pytest.raises(StoreError, match=r"window 1 in .* is not what was written: its checksum differs"):
        written(path)
    written(other := tmp_path / "other.sqlite", run={**RUN, "norm": "inf"})
    change(
        path,
        f"ATTACH '{other}' AS other",
        "INSERT OR REPLACE INTO items SELECT * FROM other.items WHERE item = 'window 1'",
    )
    with pytest.raises(StoreError, match="window 1"):
        written(path)


@pytest.mark.parametrize("statement", ["UPDATE run SET key = '{}'", "DELETE FROM run", "UPDATE run SET key = 5"])
def test_a_changed_key_is_refused(path: Path, statement: str) -> None:
    change(path, statement)
    with pytest.raises(StoreError, match=r"the key of the run in .* is not what was written"):
        items(path)


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in ("buy milk", "buy milk\nand bread\n", '{"network": "a", "sha256": "b"}\n', "not a database" * 300):
        path.write_text(content)
        with pytest.raises(StoreError, match="no sound ledger"):
            items(path)
        assert path.read_text() == content
    path.unlink()
    change(path, "CREATE TABLE a (b)")
    with pytest.raises(StoreError, match="no ledger of this version"):
        items(path)


def test_another_run_is_refused_and_a_lock_is_held_meanwhile(path: Path) -> None:
    with pytest.raises(StoreError, match=r"another run .*there ≠ here: norm 2 ≠ inf"):
        items(path, {**RUN, "norm": "inf"})
    with Ledger.writing(path, RUN), pytest.raises(StoreError, match="another run is writing to"):
        items(path)
    with Ledger.writing(path, RUN) as ledger, Ledger.reading(path) as reader:
        assert reader.items() == ledger.items() == ["window 0", "window 1", "window 2"]
        assert reader.run == RUN


def test_a_run_begun_anew_and_one_without_items_are_in_nobodys_way(path: Path) -> None:
    with Ledger.writing(path, {**RUN, "norm": "inf"}, resume=False) as ledger:
        assert ledger.items() == []
    assert items(path) == []


def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file" / "run.sqlite"):
        with pytest.raises(StoreError, match="cannot write") as error:
            items(path)
        assert "\n" not in str(error.value)


def start(path: Path, first: int, most_bytes: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)], text=True, preexec_fn=limit, **pipes)


@pytest.mark.slow
def test_a_killed_run_has_every_item_that_it_reported(tmp_path: Path) -> None:
    path, done = tmp_path / "run.sqlite", 0
    for _ in range(3):
        with start(path, done) as process:
            assert process.stdout is not None
            for _ in range(5):
                done = int(process.stdout.readline()) + 1
            process.send_signal(signal.SIGKILL)
        with Ledger.writing(path, RUN) as ledger:
            assert set(ledger.items()) >= {f"item {number}" for number in range(done)}
            assert all(ledger.read(item) == bytes(2000) for item in ledger.items())


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    out, said = start(path, 0, most_bytes=60_000).communicate(timeout=60)
    (line,) = said.splitlines()
    assert line.startswith(f"cannot write to {path}")
    done = int(out.split()[-1]) + 1
    assert done > 5
    with Ledger.writing(path, RUN) as ledger:
        assert ledger.items() == [f"item {number}" for number in range(done)]
        assert all(ledger.read(item) == bytes(2000) for item in ledger.items())
        ledger.write("more", b"")
