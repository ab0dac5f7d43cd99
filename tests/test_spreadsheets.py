"""Cells of tables that spreadsheets would run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from howsmooth._util.common import spreadsheet_safe
from howsmooth.scans import Scan


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r"])
def test_a_text_that_begins_like_a_formula_is_exported_as_text(begin: str, tmp_path: Path) -> None:
    name = f"{begin}cmd().txt"
    row = {"model": name, "text": "plain", "layer": 0, "value": -1.5, "bounds": {}}
    Scan([row]).to_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        (found,) = csv.DictReader(file)
    assert found == {"model": f"'{name}", "text": "plain", "layer": "0", "value": "-1.5", "bounds": "{}"}


def test_numbers_and_harmless_texts_stay() -> None:
    assert [spreadsheet_safe(cell) for cell in (-1.5, 3, None, True, "a=b", "")] == [-1.5, 3, None, True, "a=b", ""]
