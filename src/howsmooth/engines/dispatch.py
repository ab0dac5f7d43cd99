"""Submitting items to an executor: a bounded number at a time, each tried again once, results to one callback.

A worker answers its items one after the other, each with a value or the reason for its failure. A worker that dies
loses its task without naming the item that killed it. So items that were submitted together and came back without
answers are submitted again in two halves, down to single items: only an item that was alone with a worker is blamed for
its death.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from howsmooth._util.common import first_line
from howsmooth.errors import HowsmoothError, InvalidInput

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
        answers.append(replace(answer, seconds=time.perf_counter() - begun))
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


ATTEMPTS = 2
"""The number of attempts for an item."""


class EngineError(HowsmoothError, RuntimeError):
    """An engine that cannot be reached, or that takes no more work; the message names a remedy."""


@dataclass(frozen=True)
class Load:
    """The number of tasks of an executor at a time, and the number of items in a task; 0: all are dealt out at once."""

    width: int
    share: int = 1


@dataclass(frozen=True)
class Failure:
    """An item without an answer: its place in the list, and why, once for every attempt."""

    place: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """The state of the work: items finished or abandoned, items with workers, items that wait; the last answer's place
    and how many seconds it took, None at the beginning."""

    done: int
    running: int
    waiting: int
    place: int | None = None
    seconds: float = 0.0


def submit_all(
    executor: Executor,
    work: Callable[[Item], Any],
    items: Sequence[Item],
    keep: Callable[[int, Any], object],
    *,
    load: Load,
    limit: float | None = None,
    prepare: Callable[[Item], object] = nothing,
    tell: Callable[[State], object] = lambda state: None,
    retry: Callable[[int, str], object] = lambda index, reason: None,
) -> list[Failure]:
    """Submit every item, and return those that failed.

    Args:
        executor: any; it is not shut down.
        work: a function of one item that can be pickled by name.
        keep: called here, in this thread, with the place of an item and its answer, in the order in which they come.
        load: how much is with the executor at a time, so that neither items nor answers pile up.
        limit: seconds for one item; its worker is ended after that.
        prepare: called in the worker before an item, outside the limit: to open what stays open.
        tell: called whenever something has changed.
        retry: called with a place and a reason before an item is tried again.

    Raises:
        EngineError: the executor takes no more work.
        WorkerMisconfigured: a worker lacks the model or has other software.
        KeyboardInterrupt, and whatever ``keep`` raises: what has not begun is cancelled.
    """
    return _Submission(executor, work, items, keep, load, limit, prepare, tell, retry).run()


@dataclass
class _Submission(Generic[Item]):
    """The arguments of `submit_all`, and the state of the work."""

    executor: Executor
    work: Callable[[Item], Any]
    items: Sequence[Item]
    keep: Callable[[int, Any], object]
    load: Load
    limit: float | None
    prepare: Callable[[Item], object]
    tell: Callable[[State], object]
    retry: Callable[[int, str], object]
    waiting: deque[list[int]] = field(default_factory=deque)
    running: dict[Future[list[Answer]], list[int]] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    done: int = 0

    def run(self) -> list[Failure]:
        places = range(len(self.items))
        share = self.load.share or -(-len(self.items) // self.load.width) or 1
        self.waiting.extend(list(places[first : first + share]) for first in places[::share])
        try:
            self._report()
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.load.width:
                    task = self.waiting.popleft()
                    self.running[self._submitted(task)] = task
                finished, _ = wait(self.running, return_when=FIRST_COMPLETED)
                for future in finished:
                    self._settle(future, self.running.pop(future))
        finally:
            for future in self.running:
                future.cancel()
        return [Failure(place, tuple(all_)) for place, all_ in sorted(self.reasons.items()) if len(all_) == ATTEMPTS]

    def _submitted(self, task: list[int]) -> Future[list[Answer]]:
        chosen = [self.items[index] for index in task]
        try:
            return self.executor.submit(answer_all, self.work, chosen, self.limit, here(), self.prepare)
        except RuntimeError as error:  # broken pools, and those that were shut down
            if isinstance(error, HowsmoothError):
                raise
            raise EngineError(
                f"the executor takes no more work ({first_line(error)}): finished items are stored; run the same again "
                "with a new one."
            ) from error

    def _settle(self, future: Future[list[Answer]], task: list[int]) -> None:
        try:
            answers = future.result()
        except EngineError:
            raise
        except (CancelledError, Exception) as error:
            self._worker_died(task, error)
            return
        for index, answer in zip(task, answers, strict=False):
            if answer.hopeless:
                raise WorkerMisconfigured(answer.error)
            if answer.error:
                self._failed(index, answer.error)
            else:
                self.keep(index, answer.value)
                self.done += 1
            self._report(index, answer.seconds)

    def _worker_died(self, task: list[int], error: BaseException) -> None:
        limit = "" if self.limit is None else f", or did not end within {self.limit:g} s and was stopped"
        reason = f"its worker died{limit} ({first_line(error, kind=True)})"
        if len(task) > 1:
            self.retry(task[0], f"{reason}, with {len(task) - 1} more; in two halves")
            half = len(task) // 2
            self.waiting.extendleft([task[half:], task[:half]])
            return
        self._failed(task[0], reason)
        self._report(task[0])

    def _failed(self, index: int, reason: str) -> None:
        reasons = self.reasons.setdefault(index, [])
        reasons.append(reason)
        if len(reasons) < ATTEMPTS:
            self.retry(index, reason)
            self.waiting.append([index])
            return
        self.done += 1

    def _report(self, index: int | None = None, seconds: float = 0.0) -> None:
        waiting = sum(map(len, self.waiting))
        self.tell(State(self.done, len(self.items) - waiting - self.done, waiting, index, seconds))
