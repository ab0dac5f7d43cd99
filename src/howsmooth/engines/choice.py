"""The choice of an engine by name and options, and its executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth._util.validation import check_count, check_fields, check_one_of
from howsmooth.engines.dispatch import EngineError, Item, Load, submit_all
from howsmooth.engines.processes import Processes

ENGINES = ("processes", "slurm", "ray")
_MOST = {"memory": 100_000_000, "time": 1_000_000}


@dataclass(frozen=True)
class Engine:
    """An engine and its options.

    Attributes:
        kind: "processes", "slurm" or "ray".
        jobs: how many workers: processes, tasks of a SLURM array at a time, or tasks on Ray at a time; None for one per
            core, of Ray all that the cluster has.
        threads: of torch in every worker; None divides those of this process (processes), or takes one.
        address: of a Ray cluster; None starts one on this machine.
        partition, time, memory: of SLURM jobs: its name, minutes, and megabytes.
        folder: for the files of SLURM jobs, on a disk that all nodes see.
    """

    kind: str = "processes"
    jobs: int | None = None
    threads: int | None = None
    address: str | None = None
    partition: str | None = None
    time: int = 60
    memory: int = 4000
    folder: Path = Path("howsmooth-output/slurm")

    def __post_init__(self) -> None:
        check_fields(self)
        check_one_of(self.kind, ENGINES, "engine")
        for name in ("jobs", "threads", "time", "memory"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, most=_MOST.get(name, 10_000))


@contextmanager
def open_engine(engine: Engine | Executor) -> Iterator[Executor]:
    """The executor of an engine; when the block ends by an error or Ctrl-C, all that is queued is cancelled.

    An executor is returned as it is; its owner shuts it down.
    """
    if not isinstance(engine, Engine):
        yield engine
        return
    executor = _executor(engine)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _executor(engine: Engine) -> Executor:
    """Make the executor; its package is imported only now, for the extras are large."""
    threads, jobs = engine.threads or 1, engine.jobs or os.cpu_count() or 1
    if engine.kind == "slurm":
        from howsmooth.engines.slurm import Slurm

        return Slurm(jobs, engine.folder, engine.partition, engine.time, engine.memory, threads)
    if engine.kind == "ray":
        from howsmooth.engines.ray import Ray

        return Ray(engine.jobs, engine.address, threads)
    return Processes(jobs, engine.threads)


def complete(
    engine: Engine | Executor,
    work: Callable[[Item], Any],
    items: Mapping[str, Item],
    keep: Callable[[str, Any], object],
) -> None:
    """`submit_all` for work that must be complete: items by name, and an error at the end for those that failed.

    Raises:
        EngineError: it names the first, with its reason; the others are done by then.
    """
    names = list(items)
    with open_engine(engine) as executor:
        failures = submit_all(
            executor,
            work,
            list(items.values()),
            lambda index, answer: keep(names[index], answer),
            load=load_of(executor),
        )
    if failures:
        first = failures[0]
        raise EngineError(
            f"{len(failures)} of {len(items)} could not be done, first {names[first.place]} ({first.reasons[-1]}): the "
            "others are stored; run the same again for these."
        )


def load_of(executor: Executor, jobs: int | None = None) -> Load:
    """The load of an executor: its own ``load``, or ``jobs`` single items at a time.

    By default it is two items for every worker of the executor, so that none waits for the driver.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> load_of(ThreadPoolExecutor(3)), load_of(ThreadPoolExecutor(3), jobs=5)
    (Load(width=6, share=1), Load(width=5, share=1))
    """
    workers = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
    return getattr(executor, "load", None) or Load(int(jobs or 2 * workers))
