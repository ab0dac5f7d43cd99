"""Measured ≤ worst found ≤ certified in the report: the numbers of the library, escaped, once per map."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth._util.common import rounded
from howsmooth.certificates.ball.on_ball import SHARES, Ladder, ladder, ladder_radii
from howsmooth.errors import InvalidInput
from howsmooth.reports import report as write_report
from howsmooth.reports.sections import certificates_section, write_certificates
from tests.reports.browsing import visit

ROW = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}
EVIL = "</title><script>alert(1)</script>\u202e<img src=x onerror=alert(2)>"


def draw() -> tuple[hs.SelfAttention, torch.Tensor]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).double()
    return hs.SelfAttention.random(8, heads=2, mask="causal").in_dtype(torch.float64), x


@pytest.fixture(scope="module")
def found() -> Ladder:
    attention, x = draw()
    return ladder(attention, x, ladder_radii(x, 0.1))


def test_every_rung_is_what_the_library_says(found: Ladder) -> None:
    attention, x = draw()
    assert found.measured == hs.certify(attention, x, per_head=True).lower.tolist()
    assert found.radii == tuple(0.1 * share for share in SHARES)
    for radius, worst, upper in zip(found.radii, found.worst, found.certified, strict=True):
        assert upper == hs.certify(attention, hs.sets.Around(x, radius), per_head=True).upper.tolist()
        assert all(low <= most <= top for low, most, top in zip(found.measured, worst, upper, strict=True))
    assert all(small <= large for small, large in zip(found.worst[0], found.worst[-1], strict=True))
    assert max(found.worst[-1]) > 1.001 * max(found.measured)  # the search has moved


def test_radii_end_at_a_per_cent_of_the_token_norm() -> None:
    _, x = draw()
    assert ladder_radii(x)[-1] == pytest.approx(0.01 * float(x.norm(dim=-1).mean()))


def test_every_head_and_radius_has_a_row_and_two_marks_rounded_to_the_safe_side(found: Ladder) -> None:
    page = certificates_section(found, "a map", "")
    assert page.count("<tr><td>") == 2 * len(SHARES)
    assert page.count("<circle") == 1 + 2 * 2 * len(SHARES)
    for worst, upper in zip(found.worst, found.certified, strict=True):
        for head in range(2):
            cells = (rounded(worst[head], ROUND_FLOOR, 4), rounded(upper[head], ROUND_CEILING, 4))
            assert f"<td>{cells[0]}</td><td>{cells[1]}</td>" in page


def test_a_head_that_does_nothing_has_a_row_and_no_mark() -> None:
    still = Ladder((0.1,), 1.0, 4, [0.0, 1.0], [[0.0, 1.0]], [[0.0, 2.0]])
    page = certificates_section(still, "a map", "")
    assert page.count("<tr><td>") == 2
    assert page.count("<circle") == 3
    assert "<svg" in certificates_section(replace(still, measured=[0.0, 0.0]), "a map", "")


def test_a_section_takes_the_place_of_the_one_before_and_joins_a_report(found: Ladder, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report([ROW], path)
    for name in ("a map", "a map", "another"):
        write_certificates(found, path, name, "six tokens")
    assert path.read_text(encoding="utf-8").count("<h2>What is proved about") == 2


def test_a_file_that_is_no_report_is_left_alone(found: Ladder, tmp_path: Path) -> None:
    (path := tmp_path / "page.html").write_text("mine")
    with pytest.raises(InvalidInput, match="no report of howsmooth"):
        write_certificates(found, path, "a map", "")
    assert path.read_text() == "mine"


def test_a_browser_shows_it_offline_and_runs_nothing_of_it(found: Ladder, tmp_path: Path, browser: Any) -> None:
    write_certificates(found, path := tmp_path / "proved.html", EVIL, EVIL)
    with visit(browser, path) as page:
        assert page.complaints == []
        assert page.requests == [path.as_uri()]
        assert "<script>alert(1)</script>⟨U+202E⟩<img" in page.shown(".certificates h2")[0]
        assert page.page.locator(".certificates img, .certificates script").count() == 0
        assert page.page.locator(".certificates circle:visible").count() == 17
    with visit(browser, path, width=390) as page:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
