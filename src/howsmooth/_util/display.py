"""Results in a notebook: a small table, a whole page in a frame, a progress bar.

Texts are escaped; colours are those of the notebook.
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from howsmooth._util.common import printable
from howsmooth._util.templates import render

_SECONDS = 0.2
"""Time between two states of a bar."""
LARGEST_FRAME = 4_000_000
"""Characters of the largest page that is put into a notebook: the file of the notebook stores all of it."""


def card(title: str, facts: Iterable[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """A title, names with their values, and sentences below.

    >>> card("σ < 2", [("method", "dense")])[:32]
    '<div><strong>σ &lt; 2</strong><t'
    """
    return render("card", title=title, facts=facts, notes=notes)


def grid(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table with a header."""
    return render("card", title=title, names=names, facts=rows, notes=notes)


def frame(page: str, height: int = 720) -> str:
    """A whole page inside a notebook."""
    return render("frame", page=page, height=height)


def printed(table: Any, width: int = 140) -> str:
    """A table of rich as plain text without its margins."""
    from rich.console import Console

    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False, markup=False).print(table)
    return "\n".join(line[1:].rstrip() for line in page.getvalue().splitlines() if line.strip())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported for it.

    >>> in_notebook()
    False
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)  # Colab has a kind of its own


def bar() -> Callable[[float, str], None]:
    """A bar of rich under the running cell: call it with the share that is done and a label."""
    from IPython.display import display
    from rich.progress import BarColumn, Progress, TextColumn

    drawn = Progress(BarColumn(), TextColumn("{task.description}", markup=False))
    task = drawn.add_task("", total=1.0)
    handle = display(drawn, display_id=True)  # rich's own way into a notebook would need ipywidgets
    last = -_SECONDS

    def show(share: float, label: str) -> None:
        nonlocal last
        now = time.monotonic()
        if handle is not None and (now - last >= _SECONDS or share >= 1):
            last = now
            drawn.update(task, completed=share, description=printable(label))
            handle.update(drawn)

    return show


def scan_bar() -> Callable[[Any], None] | None:
    """The progress of a scan: a bar in a notebook, None elsewhere."""
    if not in_notebook():
        return None
    show = bar()
    return lambda now: show(now.work, f"{now.cells} of {now.total} cells · {now.label}")


def search_bar() -> Callable[[int, int, float], None] | None:
    """The progress of a search, from its step, the number of steps and the best value so far."""
    if not in_notebook():
        return None
    show = bar()
    return lambda step, steps, best: show(step / max(steps, 1), f"step {step} of {steps} · best so far {best:.4g}")


def step_bar(total: int) -> Callable[[str], None] | None:
    """The progress of work in steps, from the label of each step that begins."""
    if not in_notebook():
        return None
    show, begun = bar(), itertools.count()
    return lambda label: show(min(next(begun) / max(total, 1), 1.0), label)
