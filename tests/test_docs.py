"""The README and the documentation pages run as written."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import source_tree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "theory", ROOT / "docs" / "guides")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in FOLDERS for page in sorted(folder.glob("*.md"))),
]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow
def test_examples_print_what_the_page_says(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert failed == 0


def test_there_are_examples_to_run() -> None:
    parser = doctest.DocTestParser()
    counts = {page.name: len(parser.get_examples(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert counts["README.md"] >= 4
    assert counts["measuring.md"] > 5


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


INNER = {
    "howsmooth.nn.invertible.flows": "it needs normflows, which is an extra: the package around it must do without.",
}
"""Modules inside a package that a page imports from → why not from the package."""
PAPERS = {module for module in source_tree.modules() if re.match(r"howsmooth\.bounds\.\w+", module)}
"""Modules of theorems, which pages import by name."""


def imported(page: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that the examples of a page import from howsmooth."""
    for example in doctest.DocTestParser().get_examples(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "howsmooth":
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.startswith("howsmooth."))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_import_public_names_of_packages(page: Path) -> None:
    """A deep path is no promise: what a reader copies comes from ``__all__``."""
    public = source_tree.exported()
    for module, name in imported(page):
        if module not in INNER and f"{module}.{name}" not in PAPERS:
            assert name in public.get(module, []), f"{page.name}: from {module} import {name}"


def test_an_import_from_inside_a_package_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(">>> from howsmooth.bounds.l2 import lip_2\n>>> import howsmooth.nn.base\n")
    found = list(imported(page))
    assert found == [("howsmooth.bounds.l2", "lip_2"), ("howsmooth.nn.base", "")]
    assert not any(name in source_tree.exported().get(module, []) for module, name in found)


def test_the_table_of_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Adding something")[1].split("###")[0]
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", table):
        there = any((place / path).exists() for place in (ROOT, ROOT / "src" / "howsmooth"))
        inside = (ROOT / "src" / "howsmooth" / "attention" / path).exists()
        assert there or inside, path
    for kind in ("attention", "mask", "set", "bound", "model", "format", "experiment", "command"):
        assert re.search(rf"^\| an? {kind}\b", table, re.MULTILINE), kind
