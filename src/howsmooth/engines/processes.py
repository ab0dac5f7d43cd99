"""Worker processes on this machine, each of which may die without taking the others along."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from typing import Any

from howsmooth.engines.dispatch import EngineError, Load

_NEVER_BEGAN = (
    "no worker process begins: it imports the script that was started, whose work must stand under "
    '`if __name__ == "__main__":`.'
)


class Processes(Executor):
    """Spawned processes, one pool of one each.

    A pool of several breaks as a whole when one of its processes is killed; here only the item that was being worked on
    is lost, and a new process takes the place of the old.

    Args:
        jobs: how many processes.
        threads: of torch in each; by default those of this process, divided among them.
    """

    def __init__(self, jobs: int, threads: int | None = None):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise EngineError(_NEVER_BEGAN)
        if multiprocessing.current_process().daemon:
            raise EngineError("a worker of multiprocessing cannot start processes of its own: pass an executor.")
        self.load = Load(jobs)
        if threads is None:
            import torch

            threads = max(1, torch.get_num_threads() // jobs)
        self._threads = threads
        _track_quietly()
        self._spawning = multiprocessing.get_context("spawn")
        self._begun = self._spawning.Event()
        self._pools: list[ProcessPoolExecutor | None] = [None] * jobs
        self._pending: list[set[Future[Any]]] = [set() for _ in range(jobs)]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`: to the process with the least to do."""
        worker = min(range(self.load.width), key=lambda worker: sum(not one.done() for one in self._pending[worker]))
        try:
            future = self._pool(worker).submit(fn, *args, **kwargs)
        except BrokenProcessPool:
            if not self._begun.is_set():
                raise EngineError(_NEVER_BEGAN) from None
            self._pools[worker] = None
            future = self._pool(worker).submit(fn, *args, **kwargs)
        self._pending[worker] = {one for one in self._pending[worker] if not one.done()} | {future}
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; at once when what they work on is not wanted any more."""
        for pool in filter(None, self._pools):
            if cancel_futures:
                for process in list((pool._processes or {}).values()):
                    process.kill()
            pool.shutdown(wait, cancel_futures=cancel_futures)
        self._pools = [None] * self.load.width

    def _pool(self, worker: int) -> ProcessPoolExecutor:
        pool = self._pools[worker]
        if pool is None:
            asked = (self._threads, self._begun)
            pool = ProcessPoolExecutor(1, mp_context=self._spawning, initializer=_begin, initargs=asked)
            self._pools[worker] = pool
        return pool


def _track_quietly() -> None:
    """Start what frees the semaphores of a driver that is killed, without its warning that it had to.

    It is a process of Python's own that outlives the driver, and takes its warning filters from the environment.
    """
    if os.name != "posix":  # semaphores have no names there
        return
    usual = os.environ.get("PYTHONWARNINGS")
    filters = ",".join(filter(None, [usual, "ignore::UserWarning:multiprocessing.resource_tracker"]))
    os.environ["PYTHONWARNINGS"] = filters
    try:
        resource_tracker.ensure_running()
    finally:
        if usual is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = usual


def _begin(threads: int, begun: Event) -> None:
    """Say so, share the cores, leave Ctrl-C to the driver, and end when it does."""
    begun.set()
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_threads(threads)
    threading.Thread(target=_end_with_driver, daemon=True).start()


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os._exit(1)


def _set_threads(threads: int) -> None:
    """Of torch, which takes seconds to import: where that has not happened it reads a variable when it does."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    else:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
