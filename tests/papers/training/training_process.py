"""A training run in a process of its own that reports every step and can be killed, interrupted or given a full disk.

Processes are forked from a server that has imported the library once.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from howsmooth.errors import HowsmoothError
from howsmooth.papers.training import Corpus, Intervals, TrainingSettings, train

EVERY_STEP = Intervals(1, 20, 200, 10)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "howsmooth.papers.training.loop"])


class TrainingProcess:
    """A run that goes on in ``folder``; what it writes to stderr is in the file ``errors``."""

    def __init__(
        self, corpus: Corpus, settings: TrainingSettings, folder: Path, pause: float = 0, most_bytes: int | None = None
    ):
        self.errors = folder.with_name(f"{folder.name}.stderr")
        self._steps, there = CONTEXT.Pipe(duplex=False)
        given = there, corpus, settings, folder, self.errors, pause, most_bytes
        self.process = CONTEXT.Process(target=_run, args=given)
        self.process.start()
        there.close()

    def wait_for(self, step: int) -> None:
        """Wait until so many steps are done."""
        while self._steps.recv() < step:
            pass

    def end(self) -> tuple[int | None, str]:
        """Wait for the end, and return the exit code and all of stderr."""
        self.process.join(120)
        return self.process.exitcode, self.errors.read_text()


def _run(
    steps: Connection,
    corpus: Corpus,
    settings: TrainingSettings,
    folder: Path,
    errors: Path,
    pause: float,
    most_bytes: int | None,
) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    torch.set_num_threads(1)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    try:
        train(
            corpus,
            settings,
            folder,
            resume=True,
            intervals=EVERY_STEP,
            progress=lambda status: (steps.send(status.step), time.sleep(pause)),
        )
    except KeyboardInterrupt as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
    except HowsmoothError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
