"""Templates of pages: no text that enters one can become markup, and no character of it is hidden."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import UndefinedError

from howsmooth._util.display import render
from howsmooth.reports.drawings import Axis, Chart, heat_map

NASTY = "</title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>\" ' onload='x' & {{ 7 * 7 }}"
TURNED = "a\u202eb\x1b"
SECTION = {"name": ..., "headline": ..., "about": ..., "short": str, "down": str, "up": str}
CHART = Chart(Axis(1.0, 10.0, "x"), Axis(1.0, 10.0, "y"))
VALUES: dict[str, dict[str, Any]] = {
    "answer": {
        "label": ...,
        "scales": [SimpleNamespace(name=..., values=[1.0, 2.0], reference=[1.0], reference_middle=1.0, middle=1.5)],
        "ticks": [1, 2],
        "across": str,
        "few_digits": lambda value, digits=3: str(value),
    },
    "card": {"title": ..., "facts": [[..., ...]], "notes": [...]},
    "certificates": SECTION
    | {
        **dict.fromkeys(("chart", "below", "found", "proved"), ...),
        "ladder": SimpleNamespace(
            measured=[...], radii=[...], worst=[[...]], certified=[[...]], ratios=[[...]], steps=...
        ),
    },
    "chart": {"chart": CHART, "label": ...}
    | {
        "marks": [
            {"points": ..., "class": ...},
            {"x": ..., "y": ..., "text": ...},
            dict.fromkeys(("x", "y", "radius", "class", "opacity", "title"), ...),
        ]
    },
    "comparison": {
        "title": ...,
        "picture": ...,
        "beyond": [...],
        "comparison": {
            "headline": str,
            "missing": ...,
            "names": [..., ...],
            "changes": [
                SimpleNamespace(place=..., length=..., values=[1.0, 2.0], ratio=2.0, least=1.5, most=2.5),
                SimpleNamespace(place=1, length=..., values=[1.0, 2.0], ratio=2.0, least=1.5, most=2.5),
            ],
        },
    },
    "frame": {"page": ..., "height": ...},
    "heat_map": {"title": ..., "cells": [[(..., ...)] * 2]},
    "report": {
        "title": ...,
        "headlines": [dict.fromkeys(("sentence", "compared", "picture", "legend", "reason", "quiet"), ...)],
        "gauge": ...,
        "glossary": ...,
        "theory": [(..., ..., ...)],
        "data": ...,
    },
    "rounding": SECTION
    | {"damage": ..., "not_drawn": [..., ...], "changes": ..., "frontier": ...}
    | {"totals": [dict.fromkeys(("format", "what", "proved", "predicted", "kl", "kl_error"), ...) | {"bits": 4}]}
    | {"checks": [dict.fromkeys(("name", "mean", "error"), ...) | {"allocation": None, "perplexity": None}]}
    | {"changes_shown": 1, "changes_measured": 2, "layers": [([...], [..., ...])]}
    | {"maps": [{"format": ..., "figures": [..., ...], "low": ..., "high": ...}]},
    "sections": {"title": ...},
}
"""Template → its values; the dots are texts from elsewhere."""


class Tags(HTMLParser):
    """Opened elements with their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))
        self.texts += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def filled(values: Any, text: str) -> Any:
    """The values with a text in place of the dots."""
    if isinstance(values, SimpleNamespace):
        return SimpleNamespace(**filled(vars(values), text))
    if isinstance(values, dict):
        return {name: filled(value, text) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(filled(value, text) for value in values)
    return text if values is ... else values


def test_every_template_is_tested() -> None:
    names = {path.name for path in (files("howsmooth") / "reports" / "assets").iterdir()}
    found = {name.removesuffix(".html.jinja") for name in names if name.endswith(".html.jinja")}
    assert found - VALUES.keys() == {"base", "macros"}  # parts of the others


@pytest.mark.parametrize("name", VALUES)
def test_hostile_text_stays_text(name: str) -> None:
    plain, hostile = (Tags(render(name, **filled(VALUES[name], text))) for text in ("SAMPLE", NASTY))
    assert hostile.found == plain.found
    if name != "report":  # of the data of a report the parser does not undo escapes, as a browser does not
        count = sum(text.count("SAMPLE") for text in plain.texts)
        assert sum(text.count(NASTY) for text in hostile.texts) == count > 0


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"frame"}))  # a page in a frame is text of this package
def test_hidden_characters_are_written_out(name: str) -> None:
    page = render(name, **filled(VALUES[name], TURNED))
    assert "a⟨U+202E⟩b⟨U+001B⟩" in page
    assert not re.search("[\u202e\x1b]", page)


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="notes"):
        render("card", title="", facts=[])


def test_hostile_text_in_a_drawing_stays_text() -> None:
    chart = Chart(Axis(1.0, 10.0, NASTY), Axis(1.0, 10.0, NASTY))
    marks = [chart.line([(1.0, 2.0)], NASTY), chart.dot(1.0, 2.0, NASTY, 3, NASTY), chart.words(1.0, 2.0, NASTY)]
    tags = Tags(chart.drawn(NASTY, marks))
    assert {tag for tag, _ in tags.found} == {"svg", "line", "text", "polyline", "circle", "title"}
    assert tags.texts.count(NASTY) == 7
    cells = Tags(heat_map([[1.0, 2.0]], NASTY, NASTY, 1.0, 2.0))
    assert {tag for tag, _ in cells.found} == {"svg", "text", "rect", "title"}
    assert sum(text.count(NASTY) for text in cells.texts) == 2 + 2 * 2
