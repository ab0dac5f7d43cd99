"""Results in a notebook: a small table, a whole page in a frame, a progress bar.

Whatever is shown comes as text and is escaped; colours are those of the notebook.
"""

from __future__ import annotations

import html
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_CELL = "padding:2px 12px 2px 0;text-align:left;border:0"
_OFTEN = 0.2
"""Seconds between two states of a bar."""
LARGEST_FRAME = 4_000_000
"""Characters of the largest page that is put into a notebook, which keeps all of it in its file."""


def card(title: str, facts: Iterable[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """A title, names with their values, and sentences below.

    >>> card("σ < 2", [("method", "dense")])[:32]
    '<div><strong>σ &lt; 2</strong><t'
    """
    return f"<div><strong>{_e(title)}</strong><table>{_rows(facts)}</table>{_below(notes)}</div>"


def grid(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table with a header."""
    head = "".join(f"<th style='{_CELL}'>{_e(name)}</th>" for name in names)
    body = f"<thead><tr>{head}</tr></thead><tbody>{_rows(rows)}</tbody>"
    return f"<div><strong>{_e(title)}</strong><table>{body}</table>{_below(notes)}</div>"


def frame(page: str, height: int = 720) -> str:
    """A whole page inside a notebook."""
    style = "border:1px solid #8884;border-radius:8px"
    return f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{height}" style="{style}"></iframe>'


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td style='{_CELL}'>{_e(said)}</td>" for said in row) + "</tr>" for row in rows)


def _below(notes: Sequence[str]) -> str:
    return "".join(f"<p style='margin:4px 0;opacity:.75'>{_e(note)}</p>" for note in notes)


def _e(text: str) -> str:
    return html.escape(str(text))


def in_notebook() -> bool:
    """True in the kernel of a notebook; nothing is imported to find out.

    >>> in_notebook()
    False
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)  # Colab has a kind of its own


def bar() -> Callable[[float, str], None]:
    """A bar under the running cell: call it with the share that is done and a label."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    last = -_OFTEN

    def show(share: float, label: str) -> None:
        nonlocal last
        now = time.monotonic()
        if handle is not None and (now - last >= _OFTEN or share >= 1):
            last = now
            handle.update(HTML(f"<progress value='{share:.4f}' max='1'></progress> {_e(label)}"))

    return show


def scan_bar() -> Callable[[Any], None] | None:
    """The default progress of a scan: a bar in a notebook, nothing elsewhere."""
    if not in_notebook():
        return None
    show = bar()
    return lambda now: show(now.work, f"{now.cells} of {now.total} cells · {now.label}")


def search_bar() -> Callable[[int, int, float], None] | None:
    """The default progress of a search: its step, the number of steps, and the best value so far."""
    if not in_notebook():
        return None
    show = bar()
    return lambda step, steps, best: show(step / max(steps, 1), f"step {step} of {steps} · best so far {best:.4g}")


def step_bar(total: int) -> Callable[[str], None] | None:
    """The default progress of work that reports only its next step."""
    if not in_notebook():
        return None
    show, begun = bar(), itertools.count()
    return lambda label: show(min(next(begun) / max(total, 1), 1.0), label)
