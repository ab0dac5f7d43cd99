"""SLURM as an executor: tasks become jobs of an array, by submitit, and their files tell what became of them.

What is submitted within a moment becomes one array. A job is done when its answer is there, and lost when the scheduler
says that it has ended, or knows nothing of it any more, and there is no answer. `squeue` is asked for that, which every
cluster has; accounting (`sacct`), which submitit asks, is often switched off.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import redirect_stderr
from pathlib import Path
from secrets import token_hex
from typing import Any

from howsmooth._util.common import first_line
from howsmooth.engines.dispatch import EngineError, Load

_GATHER, _POLL, _ASK = 0.3, 0.5, 3.0
"""Seconds in which submissions become one array, between looks at the files, and between questions to the scheduler."""
_ALIVE = [
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "SUSPENDED",
    "RESIZING",
    "STAGE_OUT",
    "STOPPED",
]
_PATIENCE = 4
"""The number of reports that a job is over before a missing answer counts as a failure: disks may lag behind."""


class JobLost(RuntimeError):
    """A job that has ended without an answer."""


class Slurm(Executor):
    """Jobs of SLURM.

    Args:
        jobs: tasks at a time. Each is a job that starts Python anew, so that all items are dealt out at once.
        folder: for the files of the jobs, on a disk that all nodes see.
        partition, minutes, megabytes, threads: of every job.
    """

    def __init__(
        self,
        jobs: int,
        folder: Path,
        partition: str | None = None,
        minutes: int = 60,
        megabytes: int = 4000,
        threads: int = 1,
    ):
        try:
            from submitit import SlurmExecutor
        except ImportError:
            raise EngineError("--engine slurm needs submitit: pip install 'howsmooth[slurm]'.") from None
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise EngineError("there is no SLURM here (no sbatch): run this on a login node, or use --jobs.")
        _check_scheduler()
        self.load = Load(jobs, share=0)
        self._folder = folder.absolute() / token_hex(6)
        self._folder.mkdir(parents=True)
        self._engine = SlurmExecutor(self._folder, max_num_timeout=0)
        self._engine.update_parameters(
            job_name="howsmooth",
            partition=partition,
            time=minutes,
            mem=f"{megabytes}M",
            cpus_per_task=threads,
            array_parallelism=jobs,
            setup=[f"export OMP_NUM_THREADS={threads}"],
            additional_parameters={"no_requeue": True},  # who hands over counts the attempts, also after a lost node
        )
        self._lock = threading.Lock()
        self._new: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._jobs: dict[Future[Any], Any] = {}
        self._over: dict[str, int] = {}
        self._open = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`."""
        from submitit.core.utils import DelayedSubmission

        future: Future[Any] = Future()
        with self._lock:
            self._new.append((future, DelayedSubmission(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the jobs that are not wanted any more, or wait for them; the files of finished jobs are removed."""
        if cancel_futures:
            with self._lock:
                jobs, self._new = list(self._jobs.values()), []
            if jobs:
                subprocess.run(["scancel", *(job.job_id for job in jobs)], capture_output=True, check=False)
        while wait and not cancel_futures and (self._new or self._jobs):
            time.sleep(_POLL)
        self._open = False
        if not self._jobs:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        asked = 0.0
        while self._open:
            time.sleep(_GATHER)
            self._submit_new()
            for future, job in list(self._jobs.items()):
                if job.paths.result_pickle.exists():
                    self._answer(future, job)
                elif future.cancelled():
                    job.cancel()
                    self._jobs.pop(future)
            if self._jobs and time.monotonic() - asked > _ASK:
                self._give_up_lost()
                asked = time.monotonic()
            time.sleep(_POLL - _GATHER)

    def _submit_new(self) -> None:
        with self._lock:
            new, self._new = [pair for pair in self._new if not pair[0].cancelled()], []
        if not new:
            return
        try:
            with redirect_stderr(io.StringIO()):  # what sbatch says is quoted below
                jobs = self._engine._internal_process_submissions([call for _, call in new])
        except Exception as error:
            reason = " ".join(str(getattr(error, "stderr", None) or first_line(error)).split())[:200]
            wrong = EngineError(f"SLURM takes no jobs ({reason}): ask `sinfo`, or use --jobs.")
            for future, _ in new:
                future.set_exception(wrong)
            return
        with self._lock:
            self._jobs |= {future: job for (future, _), job in zip(new, jobs, strict=True)}

    def _answer(self, future: Future[Any], job: Any) -> None:
        try:
            outcome, value = job._get_outcome_and_result()
        except Exception as error:  # half-written, or made by another version
            outcome, value = "error", first_line(error)
        self._jobs.pop(future)
        if future.set_running_or_notify_cancel():
            if outcome == "success":
                future.set_result(value)
            else:
                last = str(value).strip().splitlines()
                future.set_exception(JobLost(f"job {job.job_id}: {last[-1] if last else 'no answer'}"))

    def _give_up_lost(self) -> None:
        states = _states({job.job_id.split("_")[0] for job in self._jobs.values()})
        if states is None:
            return
        for future, job in list(self._jobs.items()):
            state = states.get(job.job_id, "gone")
            over = 0 if state in _ALIVE else self._over.get(job.job_id, 0) + 1
            self._over[job.job_id] = over
            if over >= _PATIENCE and not job.paths.result_pickle.exists():
                self._jobs.pop(future)
                if future.set_running_or_notify_cancel():
                    future.set_exception(JobLost(f"SLURM ended job {job.job_id} as {state} and there is no answer"))


def _check_scheduler() -> None:
    """Raise unless one answers."""
    try:
        answer = _run("sinfo")
        why = " ".join(answer.stderr.split())[:200] if answer.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = first_line(error)
    if why:
        raise EngineError(f"SLURM is installed here, but no scheduler answers ({why}): start it, or use --jobs.")


def _states(arrays: set[str]) -> dict[str, str] | None:
    """Job → what the scheduler says of it; None when it does not answer."""
    try:
        answer = _run("squeue", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(sorted(arrays))}")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    pairs = (line.split(maxsplit=1) for line in answer.stdout.splitlines() if " " in line)
    return {job: state.strip() for job, state in pairs}


def _run(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, "--noheader", *options], capture_output=True, text=True, timeout=60, check=False)
