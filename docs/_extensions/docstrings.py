"""Docstrings write norms as |x|, which reStructuredText would take for a substitution."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_EXAMPLE = r"(?s:^[ ]*>>>.*?(?=\n[ ]*\n|\Z))"
_FORMULA = r"^([ ]*)\.\. math::.*(?:\n(?:\1[ ]+\S.*|[ ]*))*"
_CODE = r"``[^`]+``|`[^`]*`"
_KEPT_OR_BAR = re.compile(f"{_EXAMPLE}|{_FORMULA}|{_CODE}|\\|", re.MULTILINE)


def with_bars(text: str) -> str:
    """A docstring in which bars are bars, outside examples, formulas and code.

    >>> print(with_bars("|x| of ``a|b`` and :math:`|y|`"))
    \\|x\\| of ``a|b`` and :math:`|y|`
    """
    return _KEPT_OR_BAR.sub(lambda found: r"\|" if found[0] == "|" else found[0], text)


def escape_bars(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = with_bars("\n".join(lines)).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", escape_bars, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
