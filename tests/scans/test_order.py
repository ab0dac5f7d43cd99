"""Scans know nothing of the pages that are made from them."""

from __future__ import annotations

import ast
from pathlib import Path

import howsmooth as hs
from howsmooth import scans as scanning


def test_no_module_of_scans_imports_reports() -> None:
    for file in Path(scanning.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("howsmooth.reports") for name in names), file.name


def test_a_scan_still_writes_its_report(tmp_path: Path) -> None:
    hs.scan("random:bert[layers=1,width=16,heads=2]", "Drink me", lengths=5).report(tmp_path / "r.html")
    assert "How smooth is random:bert" in (tmp_path / "r.html").read_text(encoding="utf-8")
