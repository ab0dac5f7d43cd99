"""The HTML report: one file with everything in it, which opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import metadata
from os import PathLike
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from howsmooth._util.common import FORMATS, write_whole
from howsmooth._util.display import render, visible, written_out
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.findings import ends, gaps, group_headline, place_of, why
from howsmooth.reports.headline_answer import GAUGE, answer, cause, compared, legend, picture
from howsmooth.reports.payload import group_data
from howsmooth.reports.scan_groups import Group, Source, groups
from howsmooth.reports.theory_links import THEORY, theory_links

_OPTION = "--reference random"
_UNBROKEN = re.compile(r"\d %|n = \d")
"""Words that stay on one line."""
_ESCAPES = re.compile(r"\\(?:u[0-9a-f]{4}|.)")


@validated
def report(source: Source, path: str | PathLike[str], *, documentation: str | None = None) -> Path:
    """Write the report and return its path.

    Args:
        source: a store file, a `Scan`, or rows of one.
        path: the file to write, ending in .html, in a folder that exists.
        documentation: address of the documentation site, for links to the theory; by default the package's own.

    >>> import tempfile
    >>> row = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report([row], Path(folder, "report.html")).name
    'report.html'
    """
    path = Path(path)
    check_report_path(path)
    write_whole(path, page(groups(source), documentation).encode())
    return path


def check_report_path(path: Path) -> None:
    """Refuse a file name that no report can be written to, before any work is done."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"{path} does not end like a page: use .html.")
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder of {path} does not exist: create it first.")


def check_formats(formats: Sequence[str]) -> list[str]:
    """The formats as file endings; raises `InvalidInput` for an unknown one.

    >>> check_formats(["pdf", ".png"])
    ['.pdf', '.png']
    """
    endings = ["." + kind.strip().lower().removeprefix(".") for kind in formats]
    if wrong := [kind for kind in endings if kind not in FORMATS]:
        raise InvalidInput(f"{wrong[0]!r} is no format for figures: choose from {', '.join(FORMATS)}.")
    return endings


def page(scanned: Sequence[Group], documentation: str | None = None) -> str:
    """The whole page as text."""
    links = theory_links(documentation or _documentation())
    data = {"groups": group_data(scanned), "bounds": links.bounds, "pages": links.pages}
    return render(
        "report",
        title=title(scanned),
        headlines=[_headline(group) for group in scanned],
        gauge=GAUGE,
        glossary=links.pages.get("glossary"),
        theory=[(links.pages.get(path), *entry) for path, entry in THEORY.items()],
        data=embedded(data),
    )


def title(scanned: Sequence[Group]) -> str:
    """The question that the report answers."""
    models = list(dict.fromkeys(group.model for group in scanned))
    texts = list(dict.fromkeys(group.text for group in scanned if group.text))
    verb = "is" if len(models) == 1 else "are"
    on = f" on {_listed(texts)}" if texts else ""
    return f"How smooth {verb} {_listed(models)}{on}?"


def embedded(data: Any) -> Markup:
    """JSON that stays data inside a page: no character of it can end the script element or begin another.

    >>> print(embedded({"text": "</script><script>alert('x')"}))
    {"text":"\\u003c/script\\u003e\\u003cscript\\u003ealert(\\u0027x\\u0027)"}
    """
    return htmlsafe_json_dumps(data, _visible_json, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _visible_json(data: Any, **options: Any) -> str:
    return _ESCAPES.sub(_visible_escape, visible(json.dumps(data, **options)))


def _visible_escape(escape: re.Match[str]) -> str:
    """The escape of a control character written out; quotes and backslashes stay escaped."""
    letter = json.loads(f'"{escape[0]}"')
    return escape[0] if letter in '"\\/' else written_out(letter)


def _headline(group: Group) -> dict[str, Markup]:
    """The first lines of a group: class of a paragraph, or part of the figure → its text."""
    worst = group.roughest()[0]
    smooth, reason, sure = answer(group), why(worst, group), ends(worst)
    sure = f"σ of {place_of(worst)}: {sure}" if smooth and sure else sure
    words = {
        "sentence": smooth or group_headline(group).removesuffix(reason).strip(),
        "compared": compared(group),
        "legend": legend(group) if smooth else "",
        "reason": cause(group) if smooth else reason,
        "quiet": " · ".join(filter(None, [sure, f"{len(group.rows)} cells measured", group.label, gaps(group)])),
    }
    return {name: _prose(text) for name, text in words.items()} | {"picture": picture(group)}


def _prose(words: str) -> Markup:
    """A text whose numbers stay with their units, and in which the option of the command is code."""
    unbroken = _UNBROKEN.sub(lambda part: part[0].replace(" ", "\u00a0"), visible(words))
    return escape(unbroken).replace(_OPTION, Markup(f"<code>{_OPTION}</code>"))


def _documentation() -> str | None:
    """The address of the documentation, where the installed package names one."""
    named = dict(entry.split(", ", 1) for entry in metadata("howsmooth").get_all("Project-URL") or [])
    return named.get("Documentation")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
