"""Sections that commands add to a page: to a report of `howsmooth report`, or to a page of their own.

A section is HTML without a script. It replaces an earlier section of its kind about the same map or model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from howsmooth._util.common import write_whole
from howsmooth._util.display import render
from howsmooth.errors import InvalidInput
from howsmooth.reports.page import check_report_path

MARK = "<!-- more sections -->"


def write_section(section: str, path: Path, *, kind: str, about: str, title: str) -> Path:
    """Add a section to the report at a path, or write a new page when there is none.

    Args:
        kind, about: kind and subject of the section, which replaces an earlier one. title: of a new page.
    """
    check_section_path(path)
    name = hashlib.sha256(about.encode()).hexdigest()[:12]
    begin, end = f"<!-- {kind} {name} -->", f"<!-- end of {kind} {name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else render("sections", title=title)
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        page = before + rest.split(end, 1)[1].removeprefix("\n")
    write_whole(path, page.replace(MARK, f"{begin}\n{section}\n{end}\n{MARK}", 1).encode())
    return path


def check_section_path(path: Path) -> None:
    """Refuse a path that no section can be written to, before any work is done."""
    check_report_path(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise InvalidInput(f"{path} is there and is no report of howsmooth: name another, or remove it.")
