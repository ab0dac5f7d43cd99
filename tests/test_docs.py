"""The README and the documentation pages run as written."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "theory").glob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow
def test_examples_print_what_the_page_says(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert failed == 0


def test_there_are_examples_to_run() -> None:
    parser = doctest.DocTestParser()
    counts = {page.name: len(parser.get_examples(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert counts["README.md"] > 5
    assert counts["measuring.md"] > 5


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
