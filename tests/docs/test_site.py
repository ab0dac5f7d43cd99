"""The built site: complete, without a word to the network, and legible in a browser."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import howsmooth
from howsmooth.reports.theory_links import THEORY, theory_links
from tests.docs.building import ROOT, build
from tests.reports.browsing import visit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FORMULAS = "[...document.querySelectorAll('math')].map(formula => formula.textContent).join()"
FONT = "document.fonts.ready.then(all => [...all].find(font => font.family.includes('STIX Two Math')).status)"
WITH_FORMULAS = ("index", "theory/dot-product", "theory/three-path", "theory/l2-attention", "reference/catalogue")
WITH_FORMULAS += tuple(f"theory/certificates-{page}" for page in ("point", "ball", "network", "classifier"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, whichever of several workers comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "documentation"
    with FileLock(f"{folder}.lock"):
        return folder / "site" if (folder / "site" / "objects.inv").is_file() else build(folder)


def inventory(site: Path) -> set[str]:
    """The Python names in the index of the site, read without Sphinx."""
    content = (site / "objects.inv").read_bytes()
    entries = zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()
    return {entry.split(" ")[0] for entry in entries if entry.split(" ")[1].startswith("py:")}


def public_names() -> set[str]:
    """All names of all `__all__` lists of packages, the command line's apart."""
    packages = [howsmooth]
    for found in pkgutil.walk_packages(howsmooth.__path__, "howsmooth."):
        if found.ispkg and found.name != "howsmooth.cli":
            packages.append(importlib.import_module(found.name))
    return {f"{package.__name__}.{name}" for package in packages for name in getattr(package, "__all__", ())}


def test_every_public_name_has_an_entry(site: Path) -> None:
    names = public_names()
    assert len(names) > 200
    assert names <= inventory(site), sorted(names - inventory(site))


def test_entries_are_made_from_docstrings(site: Path) -> None:
    told = (site / "reference" / "howsmooth.html").read_text(encoding="utf-8")
    first = inspect.getdoc(howsmooth.measure_heads).splitlines()[0]  # type: ignore[union-attr]
    assert first.split(" x ↦")[0] in told


def test_every_bound_is_stated_as_a_formula(site: Path) -> None:
    told = (site / "reference" / "catalogue.html").read_text(encoding="utf-8")
    assert told.count('<div class="math"><math ') == len(howsmooth.bounds.CATALOGUE)
    assert all(name in told for name in howsmooth.bounds.CATALOGUE)


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        assert fetched.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for target in re.findall(r"(?:href|src)=\"([^\"#?]+)", page.read_text(encoding="utf-8")):
            if not re.match(r"\w+:|//", target):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_links_of_reports_lead_to_pages(site: Path) -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Documentation"]
    addresses = theory_links(named).pages
    assert addresses.keys() == THEORY.keys()
    for address in addresses.values():
        stub = site / address.removeprefix(named).strip("/") / "index.html"
        [target] = re.findall(r"url=([^\"]+)\"", stub.read_text(encoding="utf-8"))
        assert (stub.parent / target).is_file()


def test_the_menu_is_in_groups(site: Path) -> None:
    whole = (site / "index.html").read_text(encoding="utf-8")
    menu = whole.partition('<div class="sidebar-tree">')[2].partition("</div>")[0]
    groups = re.split(r'<p class="caption"', menu)[1:]
    sizes = [group.count('class="toctree-l1') for group in groups]
    assert len(groups) == 4
    assert all(2 <= size <= 8 for size in sizes), sizes
    for entry in ("Theory", "Gallery", "Reproduced", "Evidence", "Reference", "FAQ", "How to cite", "Changelog"):
        assert f">{entry}</a>" in menu


@pytest.mark.parametrize("width", [1280, 390])
def test_formulas_are_shown_without_a_network(browser: Any, site: Path, width: int) -> None:
    for name in WITH_FORMULAS:
        with visit(browser, site / f"{name}.html", width) as seen:
            assert seen.complaints == []
            assert all(request.startswith("file:") for request in seen.requests)
            boxes = seen.page.locator("div.math math").evaluate_all(
                "all => all.map(m => [m.getBoundingClientRect().width, m.getBoundingClientRect().height])"
            )
            assert boxes
            assert all(wide > 20 and high > 10 for wide, high in boxes), name
            assert "\\" not in seen.page.evaluate(FORMULAS)
            assert seen.page.evaluate(FONT) == "loaded"
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.parametrize(("word", "page"), [("sink", "sink"), ("RoPE", "RoPE"), ("certificate", "certificate")])
def test_search_works_from_disk(browser: Any, site: Path, word: str, page: str) -> None:
    with visit(browser, site / "search.html") as seen:
        seen.page.goto(f"{(site / 'search.html').as_uri()}?q={word}")
        seen.page.locator("ul.search li a").first.wait_for()
        titles = seen.shown("ul.search li a")
        assert page.lower() in titles[0].lower()
        assert len(titles) >= 3
        seen.page.locator("ul.search li a").first.click()
        seen.page.wait_for_load_state()  # a click returns once the other page has begun to arrive
        assert word.lower() in seen.text("article").lower()
        assert seen.complaints == []
