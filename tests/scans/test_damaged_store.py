"""What is whole of a damaged store is kept, what is not is named, and the damaged file stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.scans import Scan, Store, StoreError, salvage
from tests.scans.stores import IDENTITY, TOKENS, batch, change, kept


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return kept(tmp_path / "s.sqlite")


def test_everything_but_the_changed_cell_is_kept_and_the_cell_is_named(path: Path, tmp_path: Path) -> None:
    sound = Scan.open(path)
    change(path, "UPDATE cells SET value = 99 WHERE head = 3 AND window = 1")
    before = path.read_bytes()
    found = salvage(path, tmp_path / "new.sqlite")
    assert (found.kept, found.written) == (19, 20)
    assert found.dropped == ["the head at layer 0, head 3, n = 4, window 1"]
    assert str(found).startswith("19 of 20 cells are whole and are kept in")
    assert path.read_bytes() == before
    new = Scan.open(tmp_path / "new.sqlite")
    assert new.rows == [row for row in sound.rows if (row["head"], row["window"]) != (3, 1)]
    assert new.tokens == sound.tokens
    with Store.writing(tmp_path / "new.sqlite") as store:  # and a scan goes on in it
        store.check()
        number = store.begin(IDENTITY)
        store.add(number, 7, TOKENS, batch(*range(10), window=1))
    assert Scan.open(tmp_path / "new.sqlite").rows == sound.rows


def test_damaged_shares_are_dropped_without_their_cell(path: Path, tmp_path: Path) -> None:
    sound = Scan.open(path)
    change(path, "UPDATE cells SET input_energy = '[1]' WHERE head = 3 AND window = 1")
    found = salvage(path, tmp_path / "new.sqlite")
    assert found.dropped == ["the shares of tokens of the head at layer 0, head 3, n = 4, window 1"]
    new = Scan.open(tmp_path / "new.sqlite")
    assert new.rows == sound.rows
    assert len(new.energies) == len(sound.energies) - 2


def test_a_lost_window_takes_its_cells_with_it(path: Path, tmp_path: Path) -> None:
    change(path, "DELETE FROM windows WHERE window = 1")
    found = salvage(path, tmp_path / "new.sqlite")
    assert (found.kept, found.dropped) == (10, ["window 1 of 4 tokens of scan 1 with its cells"])


def blank(path: Path, page: int) -> None:
    """Write zeros over a page, but not over the header of the file."""
    content = bytearray(path.read_bytes())
    begin, end = 4096 * page + (100 if page == 0 else 0), 4096 * (page + 1)
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def test_a_page_of_zeros_takes_its_own_cells_alone(tmp_path: Path) -> None:
    path = kept(tmp_path / "s.sqlite", windows=12)
    sound, content = Scan.open(path).rows, path.read_bytes()
    pages = [at for at in range(len(content) // 4096) if b"[0.25, 0.75]" in content[4096 * at : 4096 * (at + 1)]]
    blank(path, pages[len(pages) // 2])
    with pytest.raises(StoreError, match="--salvage"):
        Scan.open(path)
    found = salvage(path, tmp_path / "new.sqlite")
    rows = Scan.open(tmp_path / "new.sqlite").rows
    assert len(sound) - 60 < found.kept == len(rows) < len(sound) == found.written
    assert all(row in sound for row in rows)
    assert "pages of cells that cannot be read" in str(found)


@pytest.mark.slow
def test_without_its_first_page_nothing_is_left(path: Path, tmp_path: Path) -> None:
    blank(path, 0)
    with pytest.raises(StoreError, match=r"^[^\n]*$"):
        salvage(path, tmp_path / "new.sqlite")
    assert not (tmp_path / "new.sqlite").exists()


def test_nothing_is_overwritten_and_nothing_whole_is_an_error(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="would overwrite"):
        salvage(path, path)
    (tmp_path / "there.sqlite").write_text("mine")
    with pytest.raises(StoreError, match="is there already"):
        salvage(path, tmp_path / "there.sqlite")
    change(path, "UPDATE scans SET model = 'other'")
    with pytest.raises(StoreError, match=r"nothing in .* is whole"):
        salvage(path, tmp_path / "new.sqlite")
    assert not (tmp_path / "new.sqlite").exists()
