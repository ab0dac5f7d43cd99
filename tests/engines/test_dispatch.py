"""Items handed to an executor: every answer once, every failure with its reasons, never too many at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from howsmooth.engines import EngineError, Load, submit_all
from howsmooth.engines.dispatch import Failure, State, WorkerMisconfigured
from howsmooth.engines.processes import Processes


def twice(number: int) -> int:
    return 2 * number


class Inline(Executor):
    """Works at once; tasks with a deadly item end without an answer, the first ``deaths`` times."""

    def __init__(self, deadly: int | None = None, deaths: int = 10**9):
        self.deadly, self.deaths, self.tasks = deadly, deaths, list[list[int]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(list(args[1]))
        future: Future[Any] = Future()
        if self.deadly in args[1] and self.deaths:
            self.deaths -= 1
            future.set_exception(BrokenExecutor("killed"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize(("width", "share"), [(1, 1), (3, 1), (2, 4), (5, 100)])
def test_every_item_is_answered_once(width: int, share: int) -> None:
    kept: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as threads:
        failures = submit_all(threads, twice, range(20), lambda *one: kept.append(one), load=Load(width, share))
    assert sorted(kept) == [(place, 2 * place) for place in range(20)]
    assert failures == []


def test_no_more_than_the_width_are_with_the_executor() -> None:
    running, most = 0, 0

    class Counting(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            return super().submit(fn, *args, **kwargs)

    def keep(place: int, value: int) -> None:
        nonlocal running
        running -= 1

    with Counting(8) as threads:
        submit_all(threads, twice, range(50), keep, load=Load(3))
    assert most == 3


def test_an_item_that_always_fails_is_tried_twice_and_reported_and_the_others_are_there() -> None:
    kept: dict[int, float] = {}
    again: list[tuple[int, str]] = []
    with ThreadPoolExecutor(2) as threads:
        failures = submit_all(
            threads, _inverse, [1, 0, 2], kept.__setitem__, load=Load(2), retry=lambda *one: again.append(one)
        )
    assert kept == {0: 1.0, 2: 0.5}
    assert failures == [Failure(1, ("ZeroDivisionError: float division by zero",) * 2)]
    assert again == [(1, "ZeroDivisionError: float division by zero")]


def _inverse(number: float) -> float:
    return 1.0 / float(number)


def test_a_death_is_blamed_on_the_item_that_was_alone_with_the_worker() -> None:
    kept: dict[int, int] = {}
    engine = Inline(deadly=5)
    again: list[tuple[int, str]] = []
    (failure,) = submit_all(
        engine, twice, range(8), kept.__setitem__, load=Load(2, 8), limit=3.0, retry=lambda *one: again.append(one)
    )
    assert [place for place, _ in again] == [0, 4, 4, 5]
    assert again[0][1].endswith("(BrokenExecutor: killed), with 7 more; in two halves")
    assert kept == {place: 2 * place for place in range(8) if place != 5}
    assert failure.place == 5
    assert failure.reasons[0].startswith("its worker died, or did not end within 3 s and was stopped (BrokenExecutor")
    assert engine.tasks == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [6, 7], [4], [5], [5]]


def test_a_worker_that_dies_once_costs_nothing() -> None:
    kept: dict[int, int] = {}
    assert submit_all(Inline(deadly=1, deaths=1), twice, range(3), kept.__setitem__, load=Load(1)) == []
    assert kept == {0: 0, 1: 2, 2: 4}


def test_progress_counts_what_is_done_running_and_waiting() -> None:
    told: list[State] = []
    submit_all(Inline(), twice, range(4), lambda *one: None, load=Load(2), tell=told.append)
    assert [(now.done, now.running, now.waiting) for now in told] == [
        *((0, 0, 4), (1, 1, 2), (2, 0, 2), (3, 1, 0), (4, 0, 0))
    ]


def test_what_keeping_raises_cancels_what_waits() -> None:
    futures: list[Future[Any]] = []

    class Slow(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            futures.append(super().submit(fn, *args, **kwargs))
            return futures[-1]

    def full(place: int, value: object) -> None:
        raise OSError("disk full")

    with Slow(1) as threads, pytest.raises(OSError, match="disk full"):
        submit_all(threads, time.sleep, [0.0, 0.2, 0.2, 0.2], full, load=Load(4))
    assert futures[-1].cancelled()


def test_a_broken_executor_is_said_in_one_sentence() -> None:
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    with pytest.raises(EngineError, match=r"takes no more work .*: finished items are stored"):
        submit_all(threads, twice, [1], lambda *one: None, load=Load(1))


def test_a_worker_that_is_unfit_stops_all() -> None:
    def unfit(item: int) -> int:
        raise WorkerMisconfigured("the worker has another version: install the same there.")

    with ThreadPoolExecutor(1) as threads, pytest.raises(WorkerMisconfigured, match="another version"):
        submit_all(threads, unfit, range(9), lambda *one: None, load=Load(1))


@pytest.mark.slow
def test_a_process_that_is_killed_or_hangs_is_replaced_and_its_item_tried_again(tmp_path: Path) -> None:
    kept: dict[int, int] = {}
    again: dict[int, str] = {}
    with Processes(1, threads=1) as workers:
        items = [(number, tmp_path) for number in range(5)]
        failures = submit_all(
            workers, _troubled, items, kept.__setitem__, load=workers.load, limit=2.0, retry=again.__setitem__
        )
    assert failures == []
    assert kept == {place: place for place in range(5)}
    assert set(again) == {1, 3}
    assert all(reason.startswith("its worker died, or did not end within 2 s") for reason in again.values())


def _troubled(item: tuple[int, Path]) -> int:
    """Item 1 kills its process and item 3 hangs, each the first time."""
    number, folder = item
    mark = folder / str(number)
    if number in (1, 3) and not mark.exists():
        mark.touch()
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return number


def test_a_script_whose_work_is_not_under_main_is_told_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from howsmooth.engines import Load, submit_all\n"
        "from howsmooth.engines.processes import Processes\n"
        "submit_all(Processes(2, threads=1), abs, range(50), print, load=Load(2))\n"
    )
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode
    assert "EngineError: no worker process begins" in said.stderr.splitlines()[-1]
    assert '`if __name__ == "__main__":`' in said.stderr.splitlines()[-1]


def test_what_a_worker_needs_imports_no_torch() -> None:
    code = "import sys, howsmooth.engines.dispatch, howsmooth.engines.processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_driver_that_is_killed_leaves_nothing_on_the_screen(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import os, signal\n"
        "from howsmooth.engines.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    pool = Processes(1, threads=1)\n"
        "    pool.submit(abs, -1).result()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")
