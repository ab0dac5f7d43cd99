"""Lines of a run under seals: what was written is read again, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.damage import KINDS, damage
from howsmooth._util.checksummed import resumed
from howsmooth.errors import InvalidInput

RUN = {"network": "a", "norm": "2"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "radii.jsonl"
    with resumed(path, RUN) as lines:
        for image in range(3):
            lines.add({"image": image, "radius": 0.1 + image})
    return path


def images(path: Path, run: dict[str, str] = RUN) -> list[int]:
    with resumed(path, run) as lines:
        return [row["image"] for row in lines.rows]


def test_a_damaged_byte_is_refused() -> None:
    assert damage(KINDS["radii"], trials=25).counts == {"refused": 25}


def test_a_line_cut_anywhere_is_done_again_and_the_others_are_kept(path: Path) -> None:
    content = path.read_bytes()
    second, third = (content.rindex(b"\n", 0, end) + 1 for end in (content.rindex(b"\n", 0, len(content) - 1), -1))
    for end in range(third, len(content)):
        path.write_bytes(content[:end])
        assert images(path) == [0, 1]
        assert path.read_bytes() == content[:third]
    assert second < third


def test_a_file_cut_in_its_first_line_begins_anew(path: Path) -> None:
    content = path.read_bytes()
    for end in (0, 1, 40):
        path.write_bytes(content[:end])
        assert images(path) == []


def test_a_changed_digit_and_a_line_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_text()
    path.write_text(content.replace("1.1", "9.1"))
    with pytest.raises(InvalidInput, match=r"line 3 of .* is not what was written: remove it"):
        images(path)
    with resumed(tmp_path / "other.jsonl", {**RUN, "norm": "inf"}) as lines:
        lines.add({"image": 7})
    foreign = (tmp_path / "other.jsonl").read_text().splitlines()[1]
    path.write_text(f"{content}{foreign}\n")
    with pytest.raises(InvalidInput, match="line 5"):
        images(path)


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """A text of one line without an end was taken for a first line cut short, and overwritten."""
    path = tmp_path / "notes.txt"
    for content in ("buy milk", "buy milk\nand bread\n", "{}\n", "[]\n"):
        path.write_text(content)
        with pytest.raises(InvalidInput, match="cannot be resumed"):
            images(path)
        assert path.read_text() == content


def test_another_run_is_refused_and_a_lock_is_held_meanwhile(path: Path) -> None:
    with pytest.raises(InvalidInput, match="another network, norm"):
        images(path, {**RUN, "norm": "inf"})
    with resumed(path, RUN), pytest.raises(InvalidInput, match="held by another process"):
        images(path)


def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot write"):
        images(tmp_path)  # a folder
