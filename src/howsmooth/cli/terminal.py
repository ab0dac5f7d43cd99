"""Output, progress and errors of a command on the terminal, its exit codes (`CODES`), and the signals that stop it.

A closed terminal (SIGHUP) and SIGTERM stop a command as Ctrl-C does: measurements until then are stored. Nothing but
a measurement that did not converge ever ends with 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import traceback
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN
from functools import partial
from itertools import count
from math import isfinite
from types import CodeType, FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from typer.core import TyperGroup

from howsmooth._util.common import out_of_memory, printable, rounded
from howsmooth.errors import HowsmoothError, InvalidInput

NOT_CONVERGED, USER_ERROR, BEYOND, BROKEN, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 70, 130, 141
CODES = (
    "Exit codes: 0 done; 1 done, but something did not converge; 2 the request was wrong or too large; 3 done, and "
    "something is rougher than --limit allows; 70 an "
    "unexpected error of howsmooth itself; 129 terminal closed; 130 interrupted; 141 broken pipe; "
    "143 terminated."
)
_LONGEST = 1000
_STOPS = {"SIGTERM": "terminated", "SIGHUP": "terminal closed"}
_NO_SIZE = re.compile(
    r"storage size calculation overflowed|integer multiplication overflow|overflow when unpacking long|"
    r"too large to convert|exceeds the limit \(\d+ digits\)|invalid shape dimension|array is too big|"
    r"maximum allowed (dimension|size)|maximum supported dimension",
    re.I,
)
_NO_NAME = {
    "null byte": "a file name holds a NUL character: write it without.",
    "null character": "a file name holds a NUL character: write it without.",
    "has an empty name": "a name that must be that of a file is empty or a folder: name the file.",
}
"""Part of a message of Python about a name that no file can have → the advice."""
_SIZES = ("--batch-tokens", "--length", "--width", "--depth", "--starts", "--count", "--memory")
"""Options that make a request smaller."""
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


class OneLineErrors(TyperGroup):
    """A command group whose errors are one readable line on stderr; the traceback follows only with ``--debug``."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> NoReturn:
        args = list(sys.argv[1:] if args is None else args)
        explained = False
        with _stoppable():
            try:
                code = super().main(args, *more, **options | {"standalone_mode": False})
            except (KeyboardInterrupt, typer.Abort):
                code = INTERRUPTED
            except (
                SystemExit
            ) as ended:  # the command has given the reason; typer itself leaves with 1 when a pipe is closed
                code, explained = BROKEN_PIPE if ended.code == 1 else ended.code, True
            except BaseException as error:  # the panics of libraries written in Rust are no `Exception`
                if "--debug" in args:
                    for line in "".join(traceback.format_exception(error)).splitlines():
                        _to_stderr(printable(line))
                code = _report(error, lambda: self._sizes(args))
        if code == INTERRUPTED:
            if not explained:
                complain(_stop_word())
            code = INTERRUPTED if _stopped_by is None else 128 + _stopped_by
        sys.exit(code if isinstance(code, int) else 0)

    def _sizes(self, args: Sequence[str]) -> list[str]:
        """The options by which the request of a command becomes smaller."""
        command = self.commands.get(next((word for word in args if not word.startswith("-")), ""))
        flags = {flag for param in (command.params if command else []) for flag in param.opts}
        return [flag for flag in _SIZES if flag in flags]


@contextmanager
def stored(content: Callable[[Any], str], stop: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """After Ctrl-C, or another stop, one line that names what is stored."""
    try:
        yield
    except stop as stopped:
        complain(f"{_stop_word()}: {content(stopped)}.")
        raise SystemExit(INTERRUPTED) from None


_stopped_by: int | None = None
"""The signal that stopped the command, unless it was Ctrl-C; a process runs one command at a time."""


def _stop_word() -> str:
    """The cause of the stop, for the line that names what is stored."""
    return "interrupted" if _stopped_by is None else _STOPS[signal.Signals(_stopped_by).name]


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does at that moment; where they are ignored (nohup) they stay so."""
    global _stopped_by
    _stopped_by = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        global _stopped_by
        _stopped_by = number
        press = signal.getsignal(signal.SIGINT)
        if not callable(press):  # background jobs of a shell ignore Ctrl-C
            raise KeyboardInterrupt
        press(number, frame)

    wanted = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
    taken = [number for number in wanted if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        with _heard():
            yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


_AGAIN = 0.01
"""Seconds after which a dropped stop is repeated."""


@contextmanager
def _heard() -> Iterator[None]:
    """Repeat a stop that came while Python ran a finaliser or the callback of a weak reference.

    Python passes an exception there to `sys.unraisablehook` and continues, so the command would neither stop nor be
    quiet. The new stop comes from another thread, a moment later and after the hook has returned: the hook itself would
    drop it again.
    """
    usual = sys.unraisablehook
    over = threading.Event()

    def hook(dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            threading.Thread(target=stop_again, daemon=True).start()
        else:
            usual(dropped)

    def stop_again() -> None:
        while not over.wait(_AGAIN):
            if not _runs_in_main_thread(hook.__code__):
                interrupt_main(signal.SIGINT if _stopped_by is None else signal.Signals(_stopped_by))
                return

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        over.set()


def _runs_in_main_thread(code: CodeType) -> bool:
    """Whether the main thread is in a call of the function with this code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _report(error: BaseException, sizes: Callable[[], list[str]]) -> int:
    """Print one line about the error and return its exit code."""
    message = _fault_of_the_request(error, sizes)
    if message is None:
        first = next(iter(str(error).splitlines()), "")  # torch appends kilobytes of C++ frames
        complain(f"unexpected {type(error).__name__}: {first} (a fault of howsmooth; --debug shows where)")
        return BROKEN
    if message:  # empty after the help that is shown when no command is given
        complain(message)
    return USER_ERROR


def _fault_of_the_request(error: BaseException, sizes: Callable[[], list[str]]) -> str | None:
    """The fault of the request; None for a fault of howsmooth."""
    if hasattr(error, "format_message"):  # what typer raises for a wrong option or argument
        return str(error.format_message())
    if isinstance(error, HowsmoothError):
        return str(error)
    if (too_large := _too_large(error)) is not None:
        return f"{too_large}: lower {' or '.join(sizes()) or 'the request'}, or take a smaller model."
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    names = [advice for part, advice in _NO_NAME.items() if part in str(error)]
    return names[0] if names and isinstance(error, ValueError) else None


def _too_large(error: BaseException) -> str | None:
    """Whether the machine lacks the memory, or numbers of 64 bits the range, in words."""
    message = str(error)
    if out_of_memory(error):
        size = re.search(r"allocate ([\d.]+ ?[KMGTPE]i?B|\d+ bytes)", message)
        return "this does not fit in memory" + (f" ({_amount(size[1])} more were asked for)" if size else "")
    if isinstance(error, RuntimeError | OverflowError | ValueError | TypeError) and _NO_SIZE.search(message):
        return "a size or number of this request is beyond what any machine can hold"
    return None


def _amount(size: str) -> str:
    number, _, unit = size.partition(" ")
    return f"{int(number) / 1e9:.3g} GB" if unit == "bytes" and number.isdigit() else size


def complain(message: str) -> None:
    """One line on stderr: no controls, no line breaks, no more than a screenful."""
    line = "howsmooth: " + printable(" ".join(message.split()))
    _to_stderr(line if len(line) <= _LONGEST else line[: _LONGEST - 2] + " …")


def _to_stderr(line: str) -> None:
    with suppress(OSError):  # a closed terminal
        typer.echo(line, err=True)


class SafeConsole(Console):
    """A console on which no text can be obeyed as a command to the terminal, whoever wrote it.

    Names of models, texts and files come from elsewhere: escapes, other controls and direction marks in them are shown
    as �. Styles and the cursor, which rich controls itself, pass.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control or text == "\n" else _lines(text), style, control)

    def on_broken_pipe(self) -> None:
        """End quietly after a write into a closed pipe."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)


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
