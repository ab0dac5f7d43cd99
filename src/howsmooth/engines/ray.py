"""Ray as an executor: its object references are futures already.

Ray ends the process that is connected to it when the node of that process dies, with an exit code of its own and no
word to Python, and it prints on standard output. So a cluster that is joined for the work is joined by a host, a
process of its own that passes tasks on and whose end is noticed here; see `howsmooth.engines.ray_host`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from howsmooth.engines.dispatch import EngineError, Load
from howsmooth.engines.ray_host import Cluster

_HOST = "from howsmooth.engines.ray_host import serve; serve()"


class Ray(Executor):
    """Tasks of a Ray cluster.

    Ray keeps its worker processes, so that a model that one has opened stays open. A task is not repeated by Ray
    itself: who hands it over counts the attempts.

    Args:
        jobs: tasks at a time; by default as many as the cluster has cores for.
        address: of the cluster, ``host:port`` or ``auto``; None for the one that this process is connected to, or else
            one that is started on this machine.
        threads: cores of a task, and threads of torch.
    """

    def __init__(self, jobs: int | None = None, address: str | None = None, threads: int = 1):
        try:
            import ray
        except ImportError:
            raise EngineError("--engine ray needs Ray: pip install 'howsmooth[ray]'.") from None
        self._pack = ray.cloudpickle.dumps
        self._joined: Cluster | _Host = Cluster(threads) if ray.is_initialized() else _Host(address, threads)
        self.load = Load(jobs or max(1, self._joined.cores // threads))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        self._joined.submit(self._pack((fn, args, kwargs)), lambda value, error: _settle(answer, value, error))
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; what is queued or running is cancelled when it is not wanted any more."""
        self._joined.leave(wait, cancel_futures)


def _settle(answer: Future[Any], value: bytes | None, error: BaseException | None) -> None:
    if error is not None or value is None:
        answer.set_exception(error or EngineError("Ray gave no answer: run the same command again."))
        return
    try:
        answer.set_result(pickle.loads(value))
    except Exception as unread:
        answer.set_exception(unread)


class _Host:
    """The process that is connected to a cluster, as this process sees it.

    Args:
        address: of the cluster; None to start one on this machine.
        threads: cores of a task.
    """

    def __init__(self, address: str | None, threads: int):
        self._where = f"at {address}" if address else "on this machine"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray's own words are in its logs
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout
        self._waiting: dict[int, Callable[[bytes | None, BaseException | None], None]] = {}
        self._lock, self._count, self._over = threading.Lock(), 0, False
        self._tell(address, threads)
        try:
            begun = pickle.load(self._answers)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._ended() from None
        except BaseException:  # Ctrl-C while Ray starts: the host leaves when it has, and finds nobody
            threading.Thread(target=self._close).start()
            raise
        if isinstance(begun, str):
            self._close()
            raise EngineError(begun)
        self.cores: int = begun
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def submit(self, task: bytes, done: Callable[[bytes | None, BaseException | None], None]) -> None:
        with self._lock:
            if self._over:
                raise self._ended()
            self._count += 1
            number = self._count
            self._waiting[number] = done
        self._tell(number, task)

    def leave(self, wait: bool, cancel: bool) -> None:
        with suppress(EngineError):
            self._tell(None, cancel)
        with suppress(OSError):
            self._tasks.close()
        if wait:
            self._listening.join()

    def _tell(self, *message: object) -> None:
        try:
            pickle.dump(message, self._tasks)
            self._tasks.flush()
        except (OSError, ValueError):
            raise self._ended() from None

    def _listen(self) -> None:
        """Pass answers on until the host ends; what it still had is then an error each."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                number, value, said = pickle.load(self._answers)
                with self._lock:
                    done = self._waiting.pop(number)
                done(value, None if said is None else TaskLost(said))
        with self._lock:
            self._over = True
            left, self._waiting = list(self._waiting.values()), {}
        ended = self._ended()
        for done in left:
            done(None, ended)

    def _close(self) -> int:
        """The exit code of the host, which ends when its pipes do."""
        for pipe in (self._tasks, self._answers):
            with suppress(OSError):
                pipe.close()
        return self._process.wait()

    def _ended(self) -> EngineError:
        code = self._close()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineError(
            f"Ray {self._where} has ended with its node or its daemons ({how}): what was done until then is kept; run "
            "the same command again."
        )


class TaskLost(RuntimeError):
    """A task that came back without an answer; its message is what Ray says."""
