"""What all commands share: where output goes, how errors and progress look, and how numbers are written."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from math import isfinite
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.norms import Measurement
from howsmooth.norms.measurement import rounded

NOT_CONVERGED, USER_ERROR, INTERRUPTED = 1, 2, 130
_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024), ("", 1024))
}


class OneLineErrors(TyperGroup):
    """A command group whose errors are one readable line on stderr; the traceback follows only with ``--debug``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        args = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Exception as error:
            if "--debug" in args:
                traceback.print_exception(error)
            code = _report(error)
        if code == INTERRUPTED:
            _complain("interrupted")
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    usage = getattr(error, "format_message", None)  # what typer raises for a wrong option or argument
    if usage is not None:
        message = usage()
        if message:  # empty after the help that is shown when no command is given
            _complain(message)
        return USER_ERROR
    if isinstance(error, HowsmoothError):
        _complain(str(error))
        return USER_ERROR
    if isinstance(error, OSError):
        _complain(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
        return USER_ERROR
    _complain(f"unexpected {type(error).__name__}: {error} (--debug shows where)")
    return NOT_CONVERGED


def _complain(message: str) -> None:
    typer.echo("howsmooth: " + " ".join(message.split()), err=True)


def stdout() -> Console:
    """The console for results: as wide as the terminal, and wide enough for tables when there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=130)


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def solver_progress(label: str) -> Iterator[Callable[[int, float], None] | None]:
    """A line on stderr that follows the solver, or None when nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label)

        def show(steps: int, value: float) -> None:
            bar.update(task, description=f"{label}: step {steps}, largest norm ≥ {written(value, ROUND_FLOOR)}")

        yield show


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr over ``total`` named steps; call it when a step begins. Silent when nobody watches."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(label: str) -> None:
            nonlocal begun
            bar.update(task, description=label, advance=1 if begun else 0)
            begun = True

        yield begin


def set_threads(threads: int | None) -> None:
    """Let torch use this many threads."""
    if threads is not None:
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
    """A number in four digits, or as many as told."""
    return rounded(value, rounding, digits)


def lower_bound(m: Measurement, index: tuple[int, ...] = ()) -> str:
    """The lower end of one map in words, rounded down so that it stays true.

    >>> from howsmooth.jacobians import MatrixOperator
    >>> from howsmooth.norms import operator_norm
    >>> m = operator_norm(MatrixOperator(torch.tensor([[2.0]])))
    >>> lower_bound(m), upper_bound(m)
    ('≥ 1.9999 always', '≤ 2.0001 always')
    """
    return f"≥ {written(float(m.lower[index]), ROUND_FLOOR, 5)} always"


def upper_bound(m: Measurement, index: tuple[int, ...] = ()) -> str:
    """The upper end of one map in words, rounded up so that it stays true."""
    if m.confidence == 0 or not isfinite(float(m.upper[index])):
        return "none"
    return f"≤ {written(float(m.upper[index]), ROUND_CEILING, 5)} {_chance(m.confidence)}"


def _chance(confidence: float) -> str:
    return "always" if confidence == 1 else f"with {100 * confidence:.6g} %"
