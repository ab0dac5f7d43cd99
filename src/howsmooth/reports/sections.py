"""Sections that other commands put into a page: a report that `howsmooth report` has written, or a page of their own.

A section is text without a script. It takes the place of an earlier one about the same thing.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from pathlib import Path
from string import Template

from howsmooth._util.common import write_whole
from howsmooth.errors import InvalidInput
from howsmooth.reports.drawings import element
from howsmooth.reports.page import asset, check_report_path, digest, visible

MARK = "<!-- more sections -->"


def write_section(section: str, path: Path, *, kind: str, about: str, title: str) -> Path:
    """Put a section into the report at a path, or write a page of its own when there is none.

    Args:
        kind, about: which section it replaces: of this kind, about this. title: of a page of its own.
    """
    check_section_path(path)
    name = hashlib.sha256(about.encode()).hexdigest()[:12]
    begin, end = f"<!-- {kind} {name} -->", f"<!-- end of {kind} {name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else _empty(title)
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


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML.

    >>> html_table(["head"], [["<0>"]])
    '<div class="scroll"><table><thead><tr><th>head</th></tr></thead><tbody><tr><td>&lt;0&gt;</td></tr></tbody>...'
    """
    top = "".join(element("th", cell) for cell in head)
    body = "".join("<tr>" + "".join(element("td", visible(cell)) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def escaped(text: str) -> str:
    """Text as it may stand in a page."""
    return html.escape(visible(text))


def _empty(title: str) -> str:
    """A page with room for sections, which begins as a report does."""
    style = asset("report.css")
    head = Template(asset("report.html").partition("<body>")[0]).substitute(
        title=escaped(title),
        policy=f"default-src 'none'; img-src data:; style-src '{digest(style)}'",
        style=style,
    )
    top = '<header class="top"><div class="bar"><span class="brand">howsmooth</span></div></header>'
    return f"{head}<body>\n{top}\n<main>\n{MARK}\n</main>\n</body>\n</html>\n"
