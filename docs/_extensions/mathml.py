"""Formulas as MathML, made when the site is built: no script, no network, and text that can be searched and copied."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

_SIZED_NORM = re.compile(r"(\\[bB]igg?[lr]?)\s*\\(?:\||[lr]?Vert)")
_SIZED_BAR = re.compile(r"(\\[bB]igg?[lr]?)\s*\\[lr]?vert")
_NORM_OR_BAR = re.compile(r"<mo([^>]*)>(&#x02016;|&#x0007C;|‖|\|)</mo>")
_NOT_CONVERTED = re.compile(r"\\|&(?!#?\w+;)")


def mathml(tex: str, display: str) -> str:
    """A formula as a MathML element; what cannot be converted ends the build.

    >>> mathml("x^2", "inline").startswith("<math ")
    True
    """
    try:
        made = convert(_SIZED_BAR.sub(r"\1|", _SIZED_NORM.sub(r"\1‖", tex)), display=display)
    except Exception as error:
        raise SphinxError(f"the formula {tex!r} cannot be read: {type(error).__name__} {error}") from error
    if _NOT_CONVERTED.search(made):
        raise SphinxError(f"the formula {tex!r} has something that cannot be converted: {made}")
    return _NORM_OR_BAR.sub(r'<mo\1 lspace="0" rspace="0">\2</mo>', made)  # else spaced like "a divides b"


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(f'<span class="math">{mathml(node.astext(), "inline")}</span>')
    raise nodes.SkipNode


def visit_display(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
