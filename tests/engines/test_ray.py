"""Ray's troubles stay Ray's: no word on our output, and an end of its daemons is one sentence."""

from __future__ import annotations

import os
import signal
import time

import pytest

from howsmooth.engines import EngineError
from howsmooth.engines.ray import Ray, TaskLost

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow


def die() -> None:
    """As the memory killer ends a worker."""
    os.kill(os.getpid(), signal.SIGKILL)


def take_the_node_along() -> None:
    """End the daemon that has started this worker, and with it the node."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_a_dead_worker_is_one_error_and_a_dead_node_another(capfd: pytest.CaptureFixture[str]) -> None:
    executor = Ray(jobs=1)
    try:
        assert executor.submit(pow, 2, 10).result(120) == 1024
        with pytest.raises(TaskLost, match="WorkerCrashedError"):
            executor.submit(die).result(120)
        assert executor.submit(sum, [1, 2, 3]).result(120) == 6  # the cluster is still there
        ended = r"^Ray on this machine has ended with its node or its daemons \(.*\): .* run the same command again\.$"
        with pytest.raises(EngineError, match=ended):
            executor.submit(take_the_node_along).result(120)
        with pytest.raises(EngineError, match=ended):
            executor.submit(abs, -1)
    finally:
        executor.shutdown(cancel_futures=True)
    assert capfd.readouterr() == ("", "")


def test_daemons_that_die_while_ray_starts_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import os; os._exit(1)"  # what Ray does to the process that is connected to it
    monkeypatch.setattr("howsmooth.engines.ray._HOST", dying)
    with pytest.raises(EngineError, match=r"Ray on this machine has ended .* \(exit code 1\)"):
        Ray(jobs=1)
