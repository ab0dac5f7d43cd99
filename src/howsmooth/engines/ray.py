"""Ray as an executor: its object references are futures already."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from howsmooth.engines.handing import EngineError, Load
from howsmooth.small import first_line


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
        self._ray, self._refs = ray, dict[Future[Any], Any]()
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                _knock(address)
                ours = {} if address else {"include_dashboard": False}
                ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **ours)
            except Exception as error:
                where = address or "this machine"
                raise EngineError(
                    f"there is no Ray cluster at {where} ({first_line(error)}): ask `ray status`."
                ) from None
        cores = int(ray.cluster_resources().get("CPU", 1))
        self.load = Load(jobs or max(1, cores // threads))
        self._options = {"num_cpus": threads, "max_retries": 0}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`."""
        ref = self._ray.remote(**self._options)(fn).remote(*args, **kwargs)
        future: Future[Any] = ref.future()
        self._refs = {one: kept for one, kept in self._refs.items() if not one.done()} | {future: ref}
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; what is queued or running is cancelled when it is not wanted any more."""
        for ref in self._refs.values() if cancel_futures else ():
            with suppress(Exception):
                self._ray.cancel(ref, force=True)
        if self._ours:
            self._ray.shutdown()


def _knock(address: str | None, seconds: float = 10.0) -> None:
    """Raise unless somebody listens at ``host:port``, of which Ray would make sure for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
