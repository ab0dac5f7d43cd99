"""What may be rounded in the report: the numbers of the library, escaped, drawn without a script, once per model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.reports import report as write_report
from howsmooth.reports import sections
from howsmooth.reports.findings import few_digits
from howsmooth.reports.sections import rounding_section, write_rounding
from howsmooth.rounding import Quantisation, quantise
from howsmooth.rounding.allocation import frontier
from tests.reports.browsing import visit

ROW = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}
EVIL = "</title><script>alert(1)</script>\u202e<img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def found() -> Quantisation:
    name = "random:llama[layers=3,width=32,heads=4,kv_heads=2]"
    return quantise(name, formats="int8,int4,int2", budget=6.5, length=12, windows=2, samples=3)


def test_every_head_is_a_cell_that_says_its_number(found: Quantisation) -> None:
    page = rounding_section(found, "")
    assert page.count("<rect") == 3 * 3 * 2 * 4
    for row in found.rows():
        place = f"layer {row['layer']}, head {row['head']}, {row['what']}s in {row['format']}"
        assert f"{place}: KL {few_digits(row['kl'])}<" in page
    assert page.count("<details open>") == 1  # the coarsest format


def test_tables_say_what_the_library_found(found: Quantisation) -> None:
    page = rounding_section(found, "")
    for row in found.totals():
        assert f"<td>{few_digits(row['kl'])}</td><td>{few_digits(row['kl_error'])}</td>" in page
    for check in found.checks:
        assert f"<td>{check.name}</td>" in page
        assert f"<td>{few_digits(check.mean)}</td>" in page
    assert page.count("<tr><td>") == 6 + 4 + 3


def test_without_a_budget_nothing_is_chosen(found: Quantisation) -> None:
    assert "The choice" not in rounding_section(replace(found, checks=()), "")


def test_formats_without_room_are_named(found: Quantisation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "_CELLS", 2 * 24)
    monkeypatch.setattr(sections, "_POINTS", 10)
    page = rounding_section(found, "")
    assert page.count("<rect") == 2 * 24
    assert "too large: int8." in page
    assert "of 72 shown" in page


def test_the_frontier_never_costs_more_than_one_format_everywhere(found: Quantisation) -> None:
    best = frontier(found.scores.by_cache, found.formats, found.bits)
    for bits, damage in zip(found.bits, found.scores.by_cache.sum((0, 1, 3)).tolist(), strict=True):
        assert min(one.damage for one in best if one.bits <= bits + 1e-9) <= damage * (1 + 1e-9)


def test_a_section_joins_a_report_and_takes_the_place_of_its_former_self(found: Quantisation, tmp_path: Path) -> None:
    path = write_report([ROW], tmp_path / "report.html")
    alone = path.read_text()
    write_rounding(found, path, "the first")
    once = path.read_text()
    assert once.replace(once[once.index("<!-- rounding") : once.index("<!-- more sections")], "") == alone
    write_rounding(found, path, "the second")
    write_rounding(replace(found, model="other"), path, "another")
    page = path.read_text()
    assert page.count('<section class="rounding">') == 2
    assert ("the first" in page, "the second" in page, "another" in page) == (False, True, True)


def test_other_pages_are_left_alone(found: Quantisation, tmp_path: Path) -> None:
    path = tmp_path / "diary.html"
    path.write_text("<p>Dear diary")
    with pytest.raises(InvalidInput, match="is no report of howsmooth"):
        write_rounding(found, path, "")
    assert path.read_text() == "<p>Dear diary"
    with pytest.raises(InvalidInput, match=r"use \.html"):
        write_rounding(found, tmp_path / "kv.txt", "")


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_a_browser_shows_it_offline_and_runs_nothing_of_it(
    found: Quantisation, tmp_path: Path, browser: Any, joined: bool
) -> None:
    path = tmp_path / "report.html"
    if joined:
        write_report([ROW], path)
    write_rounding(replace(found, model=EVIL), path, EVIL)
    write_rounding(found, path, "")  # a name of one long word
    with visit(browser, path) as page:
        assert page.complaints == []
        assert page.requests == [path.as_uri()]
        assert "<script>alert(1)</script>⟨U+202E⟩<img" in page.shown(".rounding h2")[0]
        assert page.page.locator(".rounding img, .rounding script").count() == 0
        assert page.page.locator(".rounding rect:visible").count() == 2 * 24
        page.page.locator(".rounding summary", has_text="int8").first.click()
        assert page.page.locator(".rounding rect:visible").count() == 3 * 24
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 1280
    with visit(browser, path, width=390) as page:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
