"""The process that is connected to a Ray cluster: tasks come in on its standard input, answers go out on its output."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from howsmooth._util.common import first_line

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
            cluster.submit(task, _answer(say, number))
    cluster.leave(True, cancel)
    sys.modules["ray"].shutdown()


def _end_with_daemons() -> None:
    """End this process when a daemon of the node that it has started is dead: tasks would wait for it for minutes."""
    while True:
        time.sleep(_LOOK)
        node = getattr(sys.modules["ray"]._private.worker, "_global_node", None)
        if node is not None and any(kind in _VITAL for kind, _ in node.dead_processes()):
            os._exit(1)


def _answer(say: Callable[[object], None], number: int) -> Done:
    def done(value: bytes | None, error: BaseException | None) -> None:
        say((number, value, None if error is None else first_line(error, kind=True)))

    return done


def _knock(address: str | None, seconds: float = 10.0) -> None:
    """Raise unless somebody listens at ``host:port``, of which Ray would make sure for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
