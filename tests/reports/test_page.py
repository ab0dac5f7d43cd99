"""The page in a real browser: what it shows, what a click does, and what it must never do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from howsmooth.reports import report as write_report
from tests.reports.browsing import visit
from tests.reports.measured import Measured, stored

pytestmark = pytest.mark.slow
NASTY = "</script><script>document.title='owned'</script> & \"quotes\" 'single' <img src=x onerror=alert(1)>"
COARSE = "4-bit (Q4_1), dequantised"


@pytest.fixture(scope="module")
def scan() -> Measured:
    return stored()


@pytest.fixture(scope="module")
def report(scan: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(scan, tmp_path_factory.mktemp("page") / "report.html", documentation="https://example.org/d")


@pytest.fixture(scope="module")
def two_models(scan: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows once more under another name and a coarse precision; no address of the documentation is known."""
    other = [row | {"model": "rounded", "model_sha256": "0" * 64, "precision": COARSE} for row in scan.rows]
    path = tmp_path_factory.mktemp("two") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("howsmooth.reports.page._documentation", lambda: None)
        return write_report(Measured(scan.rows + other, scan.tokens, scan.energies), path)


def largest(scan: Measured, layer: int, head: int, length: int = 128) -> dict[str, Any]:
    cell = ("head", layer, head, length)
    rows = [row for row in scan.rows if (row["what"], row["layer"], row["head"], row["length"]) == cell]
    return max(rows, key=lambda row: row["value"])


def test_opens_without_complaint_and_asks_nothing_of_the_network(browser: Any, report: Path) -> None:
    with visit(browser, report) as seen:
        seen.page.locator("#map button").nth(5).click()
        seen.page.locator("#theme").click()
        assert seen.complaints == []
        assert seen.requests == [report.as_uri()]


def test_the_heat_map_has_every_head_at_its_roughest_window(browser: Any, report: Path, scan: Measured) -> None:
    with visit(browser, report) as seen:
        cells = seen.page.locator("#map button")
        found = {cell.get_attribute("data-key"): cell.inner_text() for cell in cells.all()}
    assert len(found) == 72
    for layer in range(6):
        for head in range(12):
            value = largest(scan, layer, head)["value"]
            assert float(found[f"head/{layer}/{head}"]) == pytest.approx(value, rel=6e-3)


def test_a_click_on_a_cell_tells_its_story(browser: Any, report: Path, scan: Measured) -> None:
    shades = "node => [...node.children].map(span => span.style.backgroundColor).join()"
    with visit(browser, report) as seen:
        before = seen.page.locator("#tokens").evaluate(shades), seen.text("#growth-lead")
        seen.page.locator('[data-key="head/5/11"]').first.click()
        row = largest(scan, 5, 11)
        story = seen.text("#story")
        assert "Layer 5, head 11" in story
        assert f"σ ≈ {row['value']:.2f}" in story
        assert f"value path {100 * row['value_share']:.0f} %" in story
        assert "float32" in story
        assert seen.page.locator("#tokens").evaluate(shades) != before[0]
        assert seen.text("#growth-lead") != before[1]
        assert seen.page.locator('#map [aria-selected="true"]').get_attribute("data-key") == "head/5/11"


def test_the_most_influential_token_has_the_strongest_colour(browser: Any, report: Path, scan: Measured) -> None:
    energy = scan.energies["minilm", 5, 11, 128, 0]
    with visit(browser, report) as seen:
        seen.page.locator('[data-key="head/5/11"]').first.click()
        labels = [span.get_attribute("aria-label") for span in seen.page.locator("#tokens span").all()]
        colours = seen.page.locator("#tokens span").evaluate_all("all => all.map(s => s.style.backgroundColor)")
        high = seen.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--high').trim()")
    shares = [float(re.search(r"position \d+: (\S+)", label)[1]) / 100 for label in labels]  # type: ignore[index]
    assert shares == pytest.approx(energy, rel=0.06, abs=1e-4)
    strongest = energy.index(max(energy))
    assert colours[strongest] == "rgb({}, {}, {})".format(*(int(high[i : i + 2], 16) for i in (1, 3, 5)))
    assert colours.count(colours[strongest]) == energy.count(max(energy))


def test_columns_sort_both_ways_and_rows_lead_to_stories(browser: Any, report: Path, scan: Measured) -> None:
    column = "#table tbody td:nth-child(2)"
    values = sorted(row["value"] for row in scan.rows)
    with visit(browser, report) as seen:
        top = [float(said) for said in seen.shown(column)]
        assert top == pytest.approx(values[::-1][: len(top)], rel=1e-3)
        seen.page.locator('th[data-sort="value"] button').click()
        bottom = [float(said) for said in seen.shown(column)]
        assert bottom == pytest.approx(values[: len(bottom)], rel=1e-3)
        assert seen.page.locator('th[data-sort="value"]').get_attribute("aria-sort") == "ascending"
        seen.page.locator('th[data-sort="share"] button').click()
        shares = [float(said.removesuffix(" %")) for said in seen.shown("#table tbody td:nth-child(11)")]
        assert shares == sorted(shares, reverse=True)
        row = seen.page.locator("#table tbody tr").nth(3)
        name = row.locator("td").first.inner_text()
        row.focus()
        seen.page.keyboard.press("Enter")
        assert seen.text("#story h3") == name


def test_words_narrow_the_table(browser: Any, report: Path) -> None:
    with visit(browser, report) as seen:
        seen.page.locator("#only").fill("layer 2, head 7 n=64")
        assert seen.shown("#table tbody td:first-child") == ["Layer 2, head 7"] * 2
        assert seen.text("#cells-lead").startswith("2 of 780 cells of minilm [float32]")


def test_ends_and_bounds_are_rounded_to_the_side_where_they_hold(browser: Any, report: Path, scan: Measured) -> None:
    exact = sorted(scan.rows, key=lambda row: -row["value"])[:20]
    with visit(browser, report) as seen:
        lower, upper, proved = (
            [float(said) for said in seen.shown(f"#table tbody td:nth-child({n})")] for n in (6, 7, 8)
        )
    for row, low, high, bound in zip(exact, lower, upper, proved, strict=True):
        assert 0.9998 * row["lower"] <= low <= row["lower"]
        assert row["upper"] <= high <= 1.0002 * row["upper"]
        assert row["proved"] <= bound <= 1.002 * row["proved"]


def test_a_story_says_how_sure_its_own_upper_end_is(browser: Any, tmp_path: Path, scan: Measured) -> None:
    """Short inputs are solved exactly, long ones with a probability: one cell must not speak for another."""
    rows = [dict(row, confidence=1.0 if row["length"] == 16 else 0.99) for row in scan.rows]
    with visit(browser, write_report(Measured(rows, scan.tokens, scan.energies), tmp_path / "r.html")) as seen:
        assert "with probability 99 %, rounding modelled" in seen.text("#story")
        seen.page.get_by_role("button", name="16", exact=True).click()
        assert "with probability" not in seen.text("#story")
        assert seen.text("#story").count("rounding modelled") == 1


def test_lengths_and_colours_can_be_chosen(browser: Any, report: Path, scan: Measured) -> None:
    with visit(browser, report) as seen:
        seen.page.get_by_role("button", name="16", exact=True).click()
        assert "n = 16" in seen.text("#story")
        seen.page.locator("#metric").select_option("share")
        cell = seen.page.locator('#map [data-key="head/4/8"]')
        assert float(cell.inner_text()) == pytest.approx(largest(scan, 4, 8, 16)["value_share"], abs=6e-3)


def test_arrows_move_through_the_heat_map(browser: Any, report: Path) -> None:
    with visit(browser, report) as seen:
        seen.page.locator('#map [tabindex="0"]').focus()
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            seen.page.keyboard.press(key)
        assert seen.text("#story h3") == "Layer 4, head 4"
        assert seen.page.evaluate("document.activeElement.dataset.key") == "head/4/4"


def test_dark_follows_the_system_and_the_button(browser: Any, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with visit(browser, report, color_scheme="dark") as seen:
        dark = seen.page.evaluate(paper)
        seen.page.locator("#theme").click()
        light = seen.page.evaluate(paper)
    assert sum(map(int, re.findall(r"\d+", dark))) < 100 < 700 < sum(map(int, re.findall(r"\d+", light)))
    with visit(browser, report, color_scheme="light") as seen:
        assert seen.page.evaluate(paper) == light


def test_nothing_moves_for_readers_who_want_no_motion(browser: Any, report: Path) -> None:
    moving = """() => [...document.querySelectorAll("*")].map((node) => getComputedStyle(node)).filter((style) =>
      style.scrollBehavior !== "auto" || parseFloat(style.transitionDuration) || style.animationName !== "none"
    ).length"""
    with visit(browser, report) as seen:
        assert seen.page.evaluate(moving) == 0
        seen.page.locator("#table tbody tr").nth(3).click()
        assert seen.page.evaluate("document.getAnimations().length") == 0
        assert seen.page.evaluate("document.getElementById('heads').getBoundingClientRect().top") == pytest.approx(
            0, abs=1
        )
    with visit(browser, report, reduced_motion="no-preference") as seen:
        assert seen.page.evaluate(moving) == 1  # the page scrolls smoothly, and nothing else moves


CONTRAST = """() => {
  const linear = (x) => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = (c) => .2126 * linear(c[0] / 255) + .7152 * linear(c[1] / 255) + .0722 * linear(c[2] / 255);
  const parse = (said) => said.match(/[\\d.]+/g).map(Number);
  const ground = (node) => { const c = parse(getComputedStyle(node).backgroundColor);
    return c.length === 4 && c[3] === 0 ? ground(node.parentElement) : c; };
  return [...document.querySelectorAll("body *")].filter((n) => n.offsetParent && !n.closest("svg, option") &&
    [...n.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((n) => {
      const [a, b] = [light(parse(getComputedStyle(n).color)), light(ground(n))];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), n.className + " " + n.textContent.slice(0, 30)]; });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_readable_against_its_ground(browser: Any, two_models: Path, scheme: str) -> None:
    with visit(browser, two_models, color_scheme=scheme) as seen:
        seen.page.get_by_role("tab").nth(1).click()
        found = seen.page.evaluate(CONTRAST)
    assert len(found) > 300
    assert min(found)[0] >= 4.5, min(found)


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, two_models: Path, width: int) -> None:
    with visit(browser, two_models, width=width) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        seen.page.get_by_role("tab").nth(1).click()
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width


def test_names_and_text_are_shown_as_text(browser: Any, scan: Measured, tmp_path: Path) -> None:
    rows = [row | {"model": f"model {NASTY}", "text": NASTY} for row in scan.rows if row["length"] == 8]
    tokens = {(f"model {NASTY}", 8, window): [NASTY, *"bcdefgh"] for window in (0, 1)}
    energies = {(f"model {NASTY}", *key[1:]): energy for key, energy in scan.energies.items() if key[3] == 8}
    path = write_report(Measured(rows, tokens, energies), tmp_path / "report.html")
    with visit(browser, path) as seen:
        assert NASTY in seen.text("h1")
        assert NASTY in seen.text(".sentence")
        assert seen.shown("#tokens span")[0] == NASTY
        assert NASTY in seen.shown("#settings dd")
        assert seen.page.title() == f"How smooth is model {NASTY} on {NASTY}?"
        assert seen.page.locator("img").count() == 0
        assert seen.complaints == []
        assert seen.requests == [path.as_uri()]


def test_a_coarse_model_is_labelled_in_every_section(browser: Any, two_models: Path) -> None:
    with visit(browser, two_models) as seen:
        assert seen.shown("[role=tab]") == ["minilm\nfloat32", f"rounded\n{COARSE}"]
        seen.page.get_by_role("tab").nth(1).click()
        titles = seen.page.locator("section:visible:not(#theory) h2").all_inner_texts()
        assert len(titles) == 7
        for said in (*titles, seen.text(".sentence:visible"), seen.text("#story"), seen.text("#settings")):
            assert COARSE in said
        assert COARSE in seen.text("#cells-lead")
        assert f"rounded [{COARSE}]" in seen.page.locator("#growth-chart svg").get_attribute("aria-label")
        seen.page.locator("#map button").first.hover()
        assert COARSE in seen.text("#tip")


def test_bounds_link_to_the_theory_only_where_there_is_an_address(browser: Any, report: Path, two_models: Path) -> None:
    with visit(browser, report) as seen:
        found = seen.page.locator("#theory a").evaluate_all("all => all.map(a => a.href)")
        assert "https://example.org/d/theory/three-path/" in found
        words = seen.page.get_by_role("link", name="What the words mean")
        assert words.evaluate_all("all => all.map(a => a.href)") == ["https://example.org/d/glossary/"] * 2
        assert seen.page.locator("#distances a").count() == 5
    with visit(browser, two_models) as seen:
        assert seen.page.locator("a[href^=http]").count() == 0
        assert "The three-path bound" in seen.text("#theory")


def test_a_scan_without_heads_has_a_page_too(browser: Any, scan: Measured, tmp_path: Path) -> None:
    rows = [row | {"value_share": None, "sink": None} for row in scan.rows if row["what"] == "attention"]
    path = write_report(rows, tmp_path / "report.html")
    with visit(browser, path) as seen:
        assert not seen.page.locator("#map").is_visible()
        assert not seen.page.locator("#text").is_visible()
        assert seen.text("#story h3") == "Attention block, layer 4"
        assert seen.page.locator("#layers-chart circle").count() == 6
        assert seen.complaints == []


@pytest.mark.slow
def test_a_large_scan_is_drawn_and_answers_a_click(browser: Any, tmp_path: Path) -> None:
    fixed = {"model": "large", "what": "head", "confidence": 0.99, "value_path": 1.0, "score_path": 0.5}
    rows = [
        fixed
        | {"layer": layer, "head": head, "length": n, "window": window, "value": 1.0 + (layer * 32 + head) / 100 + n}
        | {"proved": 3.0 * n, "value_share": 0.16, "bounds": {"howsmooth.local": 9.0 * n}}
        for layer in range(32)
        for head in range(32)
        for n in (8, 16, 32, 64)
        for window in range(3)
    ]
    path = write_report(rows, tmp_path / "large.html")
    assert path.stat().st_size < 5_000_000
    with visit(browser, path) as seen:
        assert "Layer 31, head 31" in seen.text("#story")
        seen.page.locator('#map [data-key="head/7/3"]').click()
        story = seen.text("#story")
        assert "Layer 7, head 3" in story
        assert "value path 16 %" in story
        assert "How σ splits in its worst direction" in story
        assert "neither is a share of σ" in story
        assert seen.page.locator("#table tbody tr").count() == 20
        assert seen.complaints == []


def test_a_head_whose_tokens_have_no_room_is_said_to_be_left_out(browser: Any, tmp_path: Path, scan: Measured) -> None:
    roughest = max((key for key in scan.energies if key[3] == 128), key=lambda key: largest(scan, *key[1:3])["value"])
    kept, (layer, head), other = {roughest: scan.energies[roughest]}, roughest[1:3], (0, 0)
    assert (layer, head) != other
    with visit(browser, write_report(Measured(scan.rows, scan.tokens, kept), tmp_path / "r.html")) as seen:
        seen.page.locator(f'#map [data-key="head/{other[0]}/{other[1]}"]').click()
        assert "room for the tokens of the roughest heads only" in seen.text("#text")
        assert seen.page.locator("#tokens span").count() == 0
        seen.page.locator(f'#map [data-key="head/{layer}/{head}"]').click()
        assert "share of the change" in seen.text("#text")
        assert seen.complaints == []


def test_marks_that_turn_text_around_are_written_out(browser: Any, tmp_path: Path) -> None:
    row = {"model": "m\u202em", "what": "head", "layer": 0, "head": 0, "length": 2, "window": 0, "value": 1.0}
    found = Measured([row], {("m\u202em", 2, 0): ["ab", "\u2066cd\x1b"]}, {("m\u202em", 0, 0, 2, 0): [0.5, 0.5]})
    with visit(browser, write_report(found, tmp_path / "r.html")) as seen:
        assert "⟨U+2066⟩cd⟨U+001B⟩" in seen.text("#tokens")
        assert "m⟨U+202E⟩m" in seen.text("h1")
        assert seen.complaints == []
