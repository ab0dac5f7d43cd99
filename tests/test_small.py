"""Files are never written over what is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.small import distinct_files, same_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("mine")
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_lead_to_the_same_file(file: Path, tmp_path: Path, link: object) -> None:
    link(file, tmp_path / "b.csv")  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=r"--export .*b\.csv is also --text, which it would overwrite"):
        distinct_files(read=[("--text", file)], written=[("--export", tmp_path / "b.csv")])


def test_two_names_of_a_file_that_is_not_there_yet_are_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "folder")
    assert same_file(tmp_path / "folder" / "x", tmp_path / "other" / "." / "x")
    with pytest.raises(InvalidInput, match="is also --out"):
        distinct_files([], [("--out", tmp_path / "folder" / "x"), ("--export", tmp_path / "other" / "x")])


def test_a_link_that_leads_nowhere_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert same_file(tmp_path / "link", tmp_path / "x")


def test_different_files_and_missing_ones_pass(file: Path, tmp_path: Path) -> None:
    distinct_files([("--text", file), ("--config", None)], [("--out", tmp_path / "s.sqlite"), ("--export", None)])
