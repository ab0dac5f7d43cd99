"""Ray as an executor: its object references are futures already.

Ray ends the process that is connected to it when the node of that process dies, with an exit code of its own and no
word to Python, and it prints on standard output. So a cluster that is joined for the work is joined by a host, a
process of its own that passes tasks on and whose end is noticed here: tasks come in on its standard input, answers go
out on its output (`serve`).
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any

from howsmooth._util.common import first_line
from howsmooth.engines.dispatch import EngineError, Load

_LOOK = 0.5
"""Seconds between two looks at the daemons."""
_VITAL = ("raylet", "gcs_server")
Done = Callable[[bytes | None, BaseException | None], None]


def call(task: bytes) -> bytes:
    """Unpickle a function with its arguments, call it, and pickle its result; runs in a worker."""
    from ray import cloudpickle

    function, args, kwargs = pickle.loads(task)
    return bytes(cloudpickle.dumps(function(*args, **kwargs)))


class Cluster:
    """The cluster that this process is connected to.

    Args:
        threads: cores of a task.
    """

    def __init__(self, threads: int):
        import ray

        self._ray, self._refs = ray, dict[Any, None]()
        self._task = ray.remote(num_cpus=threads, max_retries=0)(call)
        self.cores = int(ray.cluster_resources().get("CPU", 1))

    def submit(self, task: bytes, done: Done) -> None:
        """Hand a task over; ``done`` gets its answer or the error."""
        ref = self._task.remote(task)
        self._refs[ref] = None

        def settle(future: Any) -> None:
            self._refs.pop(ref, None)
            error = future.exception()
            done(None if error else future.result(), error)

        ref.future().add_done_callback(settle)

    def leave(self, wait: bool, cancel: bool) -> None:
        """Cancel what is queued or running, when it is not wanted any more."""
        for ref in list(self._refs) if cancel else ():
            with suppress(Exception):
                self._ray.cancel(ref, force=True)


def join(address: str | None) -> str:
    """Connect this process to a cluster, or start one on this machine; why that cannot be done, or nothing."""
    import ray

    try:
        _knock(address)
        ours = {} if address else {"include_dashboard": False}
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **ours)
    except Exception as error:
        if address:
            return f"there is no Ray cluster at {address} ({first_line(error)}): ask `ray status`."
        return f"Ray does not start on this machine ({first_line(error)}): run the same command again."
    return ""


def serve() -> None:
    """Pass tasks on until the input ends or says that no more will come, and then leave the cluster."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)  # nothing that Ray prints is taken for an answer
    speaking = threading.Lock()

    def say(message: object) -> None:
        with speaking, suppress(BrokenPipeError):
            pickle.dump(message, answers)
            answers.flush()

    address, threads = pickle.load(tasks)
    if refused := join(address):
        say(refused)
        return
    threading.Thread(target=_end_with_daemons, daemon=True).start()
    cluster, cancel = Cluster(threads), True
    say(cluster.cores)
    with suppress(EOFError):
        while True:
            number, task = pickle.load(tasks)
            if number is None:
                cancel = task
                break
            cluster.submit(task, partial(_answer, say, number))
    cluster.leave(True, cancel)
    sys.modules["ray"].shutdown()


def _end_with_daemons() -> None:
    """End this process when a daemon of the node that it has started is dead: tasks would wait for it for minutes."""
    while True:
        time.sleep(_LOOK)
        node = getattr(sys.modules["ray"]._private.worker, "_global_node", None)
        if node is not None and any(kind in _VITAL for kind, _ in node.dead_processes()):
            os._exit(1)


def _answer(say: Callable[[object], None], number: int, value: bytes | None, error: BaseException | None) -> None:
    say((number, value, None if error is None else first_line(error, kind=True)))


def _knock(address: str | None, seconds: float = 10.0) -> None:
    """Raise unless somebody listens at ``host:port``, of which Ray would make sure for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()


_HOST = "from howsmooth.engines.ray import serve; serve()"


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
        self._joined.submit(self._pack((fn, args, kwargs)), partial(_settle, answer))
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
        self._waiting: dict[int, Done] = {}
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

    def submit(self, task: bytes, done: Done) -> None:
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
