"""The HTML report: one file with everything in it, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.metadata import metadata
from importlib.resources import files
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from howsmooth._util.common import write_whole
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.findings import ends, gaps, headline, main_kind, place_of, why
from howsmooth.reports.headline_answer import GAUGE, answer, cause, compared, legend, picture
from howsmooth.reports.payload import group_data
from howsmooth.reports.scan_groups import Group, Source, groups
from howsmooth.reports.theory_links import THEORY, theory_links

_SCRIPTS = ("elements.js", "charts.js", "story.js", "table.js", "report.js")
_NOT_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_OPTION = "--reference random"
_TOGETHER = re.compile(r"\d %|n = \d")
"""What no line may break."""
_ESCAPES = re.compile(r"\\(?:u[0-9a-f]{4}|.)")


@validated
def report(source: Source, path: str | PathLike[str], *, documentation: str | None = None) -> Path:
    """Write the report and say where it is.

    Args:
        source: a store file, a `Scan`, or rows of one.
        path: the file to write, ending in .html; its folder must be there.
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


def page(scanned: Sequence[Group], documentation: str | None = None) -> str:
    """The whole page as text."""
    style = asset("report.css")
    script = "\n".join(asset(name) for name in _SCRIPTS)
    links = theory_links(documentation or _documentation())
    data = {"groups": group_data(scanned), "bounds": links.bounds, "pages": links.pages}
    return Template(asset("report.html")).substitute(
        title=html.escape(visible(title(scanned))),
        policy=f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'",
        style=style,
        script=script,
        headlines="\n".join(_headline(number, group) for number, group in enumerate(scanned)),
        gauge=html.escape(GAUGE),
        theory="\n".join(_theory_entry(name, links.pages.get(name)) for name in THEORY),
        data=embedded(data),
    )


def title(scanned: Sequence[Group]) -> str:
    """The question that the report answers."""
    models = list(dict.fromkeys(group.model for group in scanned))
    texts = list(dict.fromkeys(group.text for group in scanned if group.text))
    verb = "is" if len(models) == 1 else "are"
    on = f" on {_listed(texts)}" if texts else ""
    return f"How smooth {verb} {_listed(models)}{on}?"


def embedded(data: Any) -> str:
    """JSON that stays data inside a page: no character of it can end the script element or begin another.

    >>> embedded({"text": "</script><script>alert('x')"})
    '{"text":"\\\\u003c/script\\\\u003e\\\\u003cscript\\\\u003ealert(\\'x\\')"}'
    """
    said = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda letter: _NOT_IN_SCRIPT[letter[0]], _ESCAPES.sub(_shown_escape, visible(said)))


def visible(text: str) -> str:
    """Text with every control and direction mark written out, so that nothing is hidden and nothing turns around.

    The joiners of scripts and emoji stay: they change no order.

    >>> visible("a\u202eb")
    'a⟨U+202E⟩b'
    """
    return _HIDDEN.sub(lambda letter: _named(ord(letter[0])), text)


def _named(code: int) -> str:
    return "⇥" if code == ord("\t") else f"⟨U+{code:04X}⟩"


def _shown_escape(escape: re.Match[str]) -> str:
    """What JSON itself has escaped: controls below a space. Quotes and backslashes stay."""
    said = json.loads(f'"{escape[0]}"')
    return escape[0] if said in '"\\/' else _named(ord(said))


def _headline(number: int, group: Group) -> str:
    worst = group.roughest(main_kind(group))[0]
    reason, said = why(worst, group), headline(group)
    smooth, sure = answer(group), ends(worst)
    sure = f"σ of {place_of(worst)}: {sure}" if smooth and sure else sure
    parts = {
        "sentence": smooth or said.removesuffix(reason).strip(),
        "compared": compared(group),
        "picture": picture(group),
        "legend": legend(group) if smooth else "",
        "reason": cause(group) if smooth else reason,
        "quiet": " · ".join(filter(None, [sure, f"{len(group.rows)} cells measured", group.label, gaps(group)])),
    }
    shown = "".join(_part(name, words) for name, words in parts.items() if words)
    return f'<div class="headline" data-group="{number}">{shown}</div>'


def _part(name: str, words: str) -> str:
    if name == "picture":  # made of escaped elements
        return f'<figure class="answer">{visible(words)}'
    if name == "legend":
        return f'<figcaption class="quiet">{html.escape(words)}</figcaption></figure>'
    whole = _TOGETHER.sub(lambda part: part[0].replace(" ", "\u00a0"), visible(words))
    said = html.escape(whole).replace(_OPTION, f"<code>{_OPTION}</code>")
    return f'<p class="{name}">{said}</p>'


def _theory_entry(name: str, address: str | None) -> str:
    said, about = html.escape(THEORY[name].name), html.escape(THEORY[name].about)
    link = said if address is None else f'<a href="{html.escape(visible(address))}" rel="noreferrer">{said}</a>'
    return f"<li><strong>{link}</strong>: {about}</li>"


def _documentation() -> str | None:
    """The address of the documentation, where the installed package names one."""
    named = dict(entry.split(", ", 1) for entry in metadata("howsmooth").get_all("Project-URL") or [])
    return named.get("Documentation")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def digest(content: str) -> str:
    """How a page's security policy names the one script and the one style it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def asset(name: str) -> str:
    """A file that pages are made of."""
    return (files("howsmooth.reports") / "assets" / name).read_text(encoding="utf-8")
