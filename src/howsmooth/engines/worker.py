"""The loop of a worker: items one after the other, each with its answer or the reason for its failure."""

from __future__ import annotations

import faulthandler
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from howsmooth._util.common import first_line
from howsmooth.errors import InvalidInput

Item = TypeVar("Item")
Home = tuple[str, int]
"""Machine and process of the driver."""


class WorkerMisconfigured(InvalidInput):
    """A worker with another version of the software, or without the model: every item would fail."""


@dataclass(frozen=True)
class Answer:
    """The answer to an item: its value, or an error in one line; ``hopeless`` when every other item would share it."""

    value: Any = None
    error: str = ""
    hopeless: bool = False
    seconds: float = 0.0


def here() -> Home:
    """The machine and process that this runs in."""
    return platform.node(), os.getpid()


def nothing(item: object) -> None:
    """No preparation."""


def answer_all(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    limit: float | None,
    home: Home,
    prepare: Callable[[Item], object] = nothing,
) -> list[Answer]:
    """The answers to items in their order; what one of them raises is the answer to that one alone.

    Args:
        limit: seconds after which an item is given up, and the process with it: what hangs may hold every lock of the
            interpreter, so that nothing gentler is sure. In the driver's own process there is no limit.
        home: where the driver is.
        prepare: called before an item, outside the limit: to open what stays open.

    >>> [answer.value or answer.error for answer in answer_all(abs, [-2, "x"], None, here())]
    [2, "TypeError: bad operand type for abs(): 'str'"]
    """
    answers = []
    for item in items:
        begun = time.perf_counter()
        try:
            prepare(item)
            with _given_up_after(limit if here() != home else None):
                answer = Answer(work(item))
        except WorkerMisconfigured as error:
            answer = Answer(error=str(error), hopeless=True)
        except Exception as error:
            answer = Answer(error=first_line(error, kind=not isinstance(error, InvalidInput)))
        answers.append(Answer(answer.value, answer.error, answer.hopeless, time.perf_counter() - begun))
        if answer.hopeless:
            break
    return answers


@contextmanager
def _given_up_after(seconds: float | None) -> Iterator[None]:
    """End the process, from a thread that needs no lock of the interpreter, when the block takes longer."""
    if seconds is None:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
