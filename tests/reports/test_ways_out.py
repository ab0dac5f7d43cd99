"""In a real browser: links to a head, rows and pictures to keep, and what the first screen says."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import howsmooth as hs
from howsmooth.reports import report as write_report
from tests.reports.browsing import Visit, visit

pytestmark = pytest.mark.slow
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 6
FIRST, SECOND = "tiny-gpt2", "tiny-bert"
SOURCES = {"random:gpt2[layers=2,width=16,heads=2,seed=3]": FIRST, "random:bert[layers=2,width=16,heads=2]": SECOND}
SVG = "{http://www.w3.org/2000/svg}"
TOP = "document.querySelector('.headline:not([hidden]) {0}').getBoundingClientRect().{1}"


@pytest.fixture(scope="module")
def scan() -> hs.Scan:
    """Two small models, the first with its layers, the whole and random weights beside it."""
    first, second = SOURCES
    both = hs.Scan.joined(
        [
            hs.scan(first, TEXT, lengths=[8, 16], what="head,layer,model", reference="random"),
            hs.scan(second, TEXT, lengths=[8, 16]),
        ]
    )
    return hs.Scan([row | {"model": renamed(row["model"])} for row in both.rows])


def renamed(model: str) -> str:
    """A model by a name as models have, its random twin too."""
    source = model.removesuffix("@random")
    return SOURCES[source] + model.removeprefix(source)


@pytest.fixture(scope="module")
def report(scan: hs.Scan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(scan, tmp_path_factory.mktemp("page") / "report.html")


def saved(seen: Visit, button: Any, folder: Path) -> Path:
    """The file that a click on a button gives."""
    with seen.page.expect_download() as waiting:
        button.click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


@pytest.mark.parametrize(
    ("place", "tab", "title"),
    [
        ("#layer-0-head-1", 0, "Layer 0, head 1"),
        ("#layer-0", 0, "Layer 0"),
        ("#model", 0, "Model"),
        ("#model-2-layer-0-head-1", 1, "Layer 0, head 1"),
    ],
)
def test_a_link_leads_to_its_head(browser: Any, report: Path, place: str, tab: int, title: str) -> None:
    with visit(browser, report) as seen:
        assert seen.text("#story h3") != title
        seen.page.goto("about:blank")
        seen.page.goto(report.as_uri() + place)
        assert seen.text("#story h3") == title
        assert seen.page.get_by_role("tab").nth(tab).get_attribute("aria-selected") == "true"
        assert seen.page.evaluate("document.getElementById('heads').getBoundingClientRect().top") < 900
        assert seen.complaints == []


def test_a_click_writes_the_link_and_a_new_link_is_followed(browser: Any, report: Path) -> None:
    with visit(browser, report) as seen:
        assert "#" not in seen.page.url
        seen.page.locator("#map button").nth(3).click()
        assert seen.page.url == report.as_uri() + "#layer-1-head-1"
        seen.page.evaluate("location.hash = '#layer-0-head-0'")
        seen.page.wait_for_function("document.querySelector('#story h3').textContent === 'Layer 0, head 0'")
        seen.page.get_by_role("tab").nth(1).click()
        seen.page.locator("#map button").nth(2).click()
        assert seen.page.url == report.as_uri() + "#model-2-layer-1-head-0"


@pytest.mark.parametrize("place", ["#layer-7-head-0", "#nothing", "#model-9-layer-0-head-0", "#%E0%A4%A", "#<b>"])
def test_a_link_to_nothing_shows_the_page_as_it_is(browser: Any, report: Path, place: str) -> None:
    with visit(browser, report) as seen:
        usual = seen.text("#story h3")
        seen.page.goto("about:blank")
        seen.page.goto(report.as_uri() + place)
        assert seen.text("#story h3") == usual
        assert seen.page.locator("#table tbody tr").count() > 0
        assert seen.complaints == []


@pytest.mark.parametrize("tab", [0, 1])
def test_the_rows_are_those_of_the_scan(browser: Any, report: Path, scan: hs.Scan, tmp_path: Path, tab: int) -> None:
    with visit(browser, report, accept_downloads=True) as seen:
        seen.page.get_by_role("tab").nth(tab).click()
        path = saved(seen, seen.page.locator("#rows"), tmp_path)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    expected = [row for row in scan.rows if row["model"] == (FIRST, SECOND)[tab]]
    assert path.suffix == ".csv"
    assert len(rows) == len(expected)
    key = ("what", "layer", "head", "length", "window")
    there = {tuple(row[name] for name in key): row for row in rows}
    for row in expected:
        cell = there[tuple("" if row[name] is None else str(row[name]) for name in key)]
        assert cell["model"] == row["model"]
        assert float(cell["value"]) == pytest.approx(row["value"], rel=1e-4)
        assert float(cell["relative"]) == pytest.approx(row["relative"], rel=1e-4)
        assert float(cell["lower"]) <= row["lower"]
        assert float(cell["upper"]) >= row["upper"]


def test_rows_hold_no_formula(browser: Any, scan: hs.Scan, tmp_path: Path) -> None:
    named = [row | {"model": '=HYPERLINK("x"),"'} for row in scan.rows if row["model"] == SECOND]
    report = write_report(named, tmp_path / "report.html")
    with visit(browser, report, accept_downloads=True) as seen:
        path = saved(seen, seen.page.locator("#rows"), tmp_path)
    models = {row["model"] for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())}
    assert models == {'\'=HYPERLINK("x"),"'}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_stand_by_themselves(browser: Any, report: Path, tmp_path: Path, scheme: str) -> None:
    with visit(browser, report, accept_downloads=True, color_scheme=scheme) as seen:
        buttons = seen.page.locator("button.save:visible")
        files = [saved(seen, buttons.nth(number), tmp_path) for number in range(buttons.count())]
        ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        drawn = seen.page.locator(".answer svg:visible circle").count()
        assert seen.complaints == []
    assert len({file.name for file in files}) == 4  # the answer, growth, bounds, layers
    for file in files:
        content = file.read_text(encoding="utf-8")
        picture = ElementTree.fromstring(content)
        assert picture.tag == f"{SVG}svg"
        assert "var(" not in content
        assert picture[0].tag == f"{SVG}rect"
        assert picture[0].get("fill") == ground
        assert any(text.text for text in picture.iter(f"{SVG}text"))
    assert drawn == len(list(ElementTree.fromstring(files[0].read_text()).iter(f"{SVG}circle"))) == 1 + 2 + 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_first_screen_says_how_smooth_compared_with_what_and_why(
    browser: Any, report: Path, width: int, height: int, scheme: str
) -> None:
    with visit(browser, report, width, color_scheme=scheme) as seen:
        said = seen.text(".sentence:visible").replace("\u00a0", " ")
        assert all(part in said for part in ("by 1 %", "the whole model", "a layer by", "an attention head by"))
        assert seen.text(".reason:visible").startswith("Why? In layer ")
        compared = seen.text(".compared:visible")
        assert "Compared with the same architecture with random weights" in compared
        for part in (".sentence", ".answer", ".reason"):
            assert seen.page.evaluate(TOP.format(part, "bottom")) <= height, part
        assert seen.page.evaluate(TOP.format(".compared", "top")) <= height


@pytest.mark.parametrize("width", [390, 320])
def test_long_names_need_no_sideways_scrolling(browser: Any, scan: hs.Scan, tmp_path: Path, width: int) -> None:
    named = [row | {"model": f"{'x' * 70}-{row['model']}", "text": "y" * 70} for row in scan.rows]
    with visit(browser, write_report(named, tmp_path / "report.html"), width) as seen:
        for tab in (0, 1):
            seen.page.get_by_role("tab").nth(tab).click()
            assert seen.page.evaluate("document.documentElement.scrollWidth") == width
