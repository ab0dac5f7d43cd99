"""Formulas as MathML, made when the site is built: no script, no network, and text that can be searched and copied."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

_SPACE = "http://www.w3.org/1998/Math/MathML"
_PLAINER = (
    (re.compile(r"\\[bB]igg?l(?![a-z])"), r"\\left"),  # so that an exponent after the closing one is the whole group's
    (re.compile(r"\\[bB]igg?r(?![a-z])"), r"\\right"),
    (re.compile(r"(\\[bB]igg?)\s*\\\|"), r"\1‖"),  # what the converter leaves as it is
)
_LIMITS = {"inf", "lim", "max", "min", "sup", "∑", "∏"}
ElementTree.register_namespace("", _SPACE)


def mathml(tex: str, display: str) -> str:
    """A formula as a MathML element; what cannot be converted ends the build.

    >>> mathml("x^2", "inline").startswith("<math ")
    True
    """
    plain = reduce(lambda text, change: change[0].sub(change[1], text), _PLAINER, tex)
    try:
        formula = ElementTree.fromstring(convert(plain, display=display))
    except Exception as error:
        raise SphinxError(f"the formula {tex!r} cannot be read: {type(error).__name__} {error}") from error
    if "\\" in "".join(formula.itertext()) or tex.count("{") != tex.count("}"):
        raise SphinxError(f"the formula {tex!r} has a command that is not known, or an open brace.")
    for node in formula.iter():
        name = node.tag.removeprefix(f"{{{_SPACE}}}")
        if name == "mo" and node.text in ("|", "‖"):  # else spaced like "a divides b"
            sized = node.get("stretchy") == "true" or "minsize" in node.attrib
            node.attrib |= {"lspace": "0", "rspace": "0"} | ({} if sized else {"stretchy": "false"})
        elif name == "msub" and node[0].text in _LIMITS:
            node.tag = f"{{{_SPACE}}}munder"
            node[0].set("movablelimits", "true")  # below in a displayed formula, beside in a line of text
    return ElementTree.tostring(formula, encoding="unicode")


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(f'<span class="math">{mathml(node.astext(), "inline")}</span>')
    raise nodes.SkipNode


def visit_display(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
