"""Output and progress of all commands, and how they write numbers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN
from functools import partial
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table

from howsmooth._util.common import printable, rounded
from howsmooth.cli.exit_codes import end_on_broken_pipe
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    pass

MAXIMUM_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""More never help, and at some number the system refuses to make them."""
MAXIMUM_SEED = 2**63 - 1
"""Random generators and stores hold no larger seed."""
_PARAGRAPH = 200
"""Letters of a text that is broken into lines; shorter ones, such as paths, stay whole."""
_HIDDEN = re.compile(r"[^\x20-\x7e\n]")
_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024), ("", 1024))
}


class SafeConsole(Console):
    """A console on which no text can be obeyed as a command to the terminal, whoever wrote it.

    Names of models, texts and files come from elsewhere: escapes, other controls and direction marks in them are shown
    as �. Styles and the cursor, which rich controls itself, pass.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control or text == "\n" else _lines(text), style, control)

    def on_broken_pipe(self) -> None:
        end_on_broken_pipe()


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def stdout() -> Console:
    """The console for results: as wide as the terminal, and wide enough for tables when there is none."""
    console = SafeConsole(highlight=False)
    return console if console.is_terminal else SafeConsole(highlight=False, width=130)


def stderr() -> Console:
    """The console for progress."""
    return SafeConsole(stderr=True)


def show(*items: RenderableType, style: str | None = None) -> None:
    """Print results: texts as they are (on a terminal long ones in lines), tables as wide as the console."""
    console = stdout()
    for item in items:
        whole = isinstance(item, str) and (len(item) < _PARAGRAPH or not console.is_terminal)
        console.print(item, markup=False, soft_wrap=whole, style=style)


def right_table(*columns: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table whose columns are aligned to the right, but for those named."""
    return Table(*(Column(name, justify="left" if name in left else "right") for name in columns), title=title)


def print_line(text: str) -> None:
    """Plain text on stdout, without anything that a terminal would obey."""
    typer.echo(_lines(text))


def print_json(content: Any) -> None:
    """A JSON text on stdout; paths become texts."""
    typer.echo(terminal_json(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, default=str)))


def terminal_json(text: str) -> str:
    """The same JSON with all that a terminal would obey written as escapes.

    >>> terminal_json('{"model": "a\x9b2Jb"}')
    '{"model": "a\\\\u009b2Jb"}'
    """
    return _HIDDEN.sub(lambda one: one[0] if printable(one[0]) == one[0] else json.dumps(one[0])[1:-1], text)


@contextmanager
def progress_line(
    label: str, *columns: ProgressColumn, total: float | None = None, **shown: Any
) -> Iterator[Callable[..., None]]:
    """A line on stderr with a label and columns; call it with what is new. Silent when nobody watches."""
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *columns)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as line:
        yield partial(line.update, line.add_task(label, total=total, **shown))


@contextmanager
def solver_progress(label: str) -> Iterator[Callable[[int, float], None] | None]:
    """A line that follows the solver, or None when nobody watches."""
    with progress_line(label, TimeElapsedColumn()) as update:

        def show(steps: int, value: float) -> None:
            update(description=f"{label}: step {steps}, largest norm ≥ {written(value, ROUND_FLOOR)}")

        yield show if stderr().is_terminal else None


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over ``total`` named steps; call it when a step begins."""
    begun = count()
    with progress_line("", BarColumn(), TimeElapsedColumn(), total=total) as update:
        yield lambda label: update(description=label, completed=next(begun))


def set_threads(threads: int | None) -> None:
    """Let torch use this many threads."""
    if threads is not None:
        if not 1 <= threads <= MAXIMUM_THREADS:
            raise InvalidInput(f"--threads is at most {MAXIMUM_THREADS} on this machine, got {threads}: choose fewer.")
        import torch

        torch.set_num_threads(threads)


def parse_bytes(text: str) -> int:
    """A size such as 512MB, 2GiB or 1000000 in bytes.

    >>> parse_bytes("512MB"), parse_bytes("1.5 GiB")
    (512000000, 1610612736)
    """
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = -1.0
    if not (isfinite(size) and size >= 1):
        raise InvalidInput(f"{text!r} is not an amount of memory: write for example 512MB or 2GiB.")
    return int(size)


def written(value: float, rounding: str = ROUND_HALF_EVEN, digits: int = 4) -> str:
    """A number in four digits, or in ``digits``."""
    return rounded(value, rounding, digits)
