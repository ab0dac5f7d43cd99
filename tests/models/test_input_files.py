"""What a scan reads: texts, files, and what is neither."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.models.model_inputs import LARGEST_TEXT, read_input

MODEL = "random:bert[layers=1,width=16]"


def test_a_string_that_names_a_file_is_read_as_one_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "It was the best of times, it was the worst of times"
    Path("novel.txt").write_text(text)
    opened = open_model(MODEL)
    named, by_path, given = (hs.scan(opened, source, lengths=12) for source in ("novel.txt", Path("novel.txt"), text))
    assert [row["value"] for row in named.rows] == [row["value"] for row in by_path.rows]
    assert [row["value"] for row in named.rows] == [row["value"] for row in given.rows]
    assert (named.rows[0]["text"], given.rows[0]["text"]) == ("novel.txt", "given text")
    assert named.notes == ("novel.txt is the name of a file, so what was read is its content",)
    assert by_path.notes == given.notes == ()


@pytest.mark.parametrize("text", ["absent.txt", "a" * 100_000, "one line\nanother", "with a \0 zero"])
def test_other_strings_are_texts(text: str) -> None:
    if "\0" in text:
        with pytest.raises(InvalidInput, match="given text is not a text in UTF-8"):
            read_input(text)
    else:
        assert read_input(text)[:2] == ("given text", text)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)  # a hole: it takes no room


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipe, "is not a plain file but a pipe or device"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a plain file but a pipe or device"),
        (lambda path: path.mkdir(), "is a folder: give a file"),
        (huge, "has 64 MB, but at most 64 are read: cut a part out"),
        (lambda path: path.write_bytes(b"\xff\xfe latin"), "novel.txt is not a text in UTF-8"),
        (lambda path: path.write_bytes(b""), "novel.txt is empty"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_files_that_are_no_texts_are_refused_in_one_line(make: Any, message: str, kind: Any, tmp_path: Path) -> None:
    make(tmp_path / "novel.txt")
    with pytest.raises(InvalidInput, match=message) as caught:
        read_input(kind(tmp_path / "novel.txt"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Path("absent.txt"), r"there is no file absent\.txt"),
        (Path("\0"), "cannot be read"),
        (Path("a" * 5000), "cannot be read"),
        (5, "what a model reads is a text or the path of a file, not int"),
        ("half \ud800 pair", "halves of surrogate pairs"),
    ],
)
def test_what_is_no_text_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_input(source)


def test_a_scan_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        hs.scan(None)  # type: ignore[arg-type]
