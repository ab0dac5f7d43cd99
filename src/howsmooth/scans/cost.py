"""The cost of a scan, predicted from n, d and heads and from a few batches that calibrate the machine.

A batch at n tokens of width d works on its projections, n·d² multiplications, and on its scores, n²·d, in as many
products as the solver asks for; there is a cost per call beside. So its time is

    t(n) = a + b·n·d² + c·n²·d,   a, b, c ≥ 0,

for every kind of map with constants of its own, found by least squares from two or three short lengths. Reading a
window is modelled in the same way. The number of products that a head takes is unknown to the formula and averaged over
the layers that are tried.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

from howsmooth._util.validation import Count, check_numbers, validated
from howsmooth.models import Window
from howsmooth.models.own_networks import OwnNetwork, targets_at
from howsmooth.scans.cell_values import ModelSizes, least_bytes, measure_batch
from howsmooth.scans.plan import OF_SOFTMAX, CellBatch
from howsmooth.scans.units import split

if TYPE_CHECKING:
    from howsmooth.scans.run import Prepared

_LONGEST = 256
"""Tokens up to which lengths are tried; longer ones are extrapolated."""
_LAYERS = 3
_READ = "reading"


@dataclass(frozen=True)
class CostLaw:
    """Seconds as a function of n: t(n) = a + b·n·d² + c·n²·d.

    >>> law = CostLaw.fitted([(n, 0.001 + n * 1e-4) for n in (8, 16, 32)], width=10)
    >>> round(law(64), 4)
    0.0074
    """

    constants: tuple[float, float, float]
    width: int

    @classmethod
    def fitted(cls, samples: Sequence[tuple[int, float]], width: int) -> CostLaw:
        """The law of lengths and their seconds that fits relative to each time, so that short lengths count too."""
        times = np.array([seconds for _, seconds in samples]).clip(1e-9)
        features = np.array([_features(n, width) for n, _ in samples]) / times[:, None]
        scale = np.linalg.norm(features, axis=0)
        constants, _ = nnls(features / scale, np.ones(len(times)))
        return cls(tuple((constants / scale).tolist()), width)

    def __call__(self, n: int) -> float:
        return float(np.dot(self.constants, _features(n, self.width)))


def _features(n: int, width: int) -> tuple[float, float, float]:
    return 1.0, float(n) * width**2, float(n) ** 2 * width


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a plan.

    Attributes:
        cells, units: how many numbers, in how many pieces of work.
        seconds: of one worker for all of it; measuring and reading, without starting Python and opening the model.
        longest: the seconds of the longest unit, below which no number of workers gets.
        memory: bytes of one worker.
        workers: for how many the units were cut.
    """

    cells: int
    units: int
    seconds: float
    longest: float
    memory: int
    workers: int

    @property
    def wall(self) -> float:
        """Seconds with all workers at work, at the least."""
        return max(self.longest, self.seconds / self.workers)

    def __str__(self) -> str:
        with_all = f", {duration_text(self.wall)} with {self.workers} workers" if self.workers > 1 else ""
        return (
            f"{self.cells} cells in {self.units} units; predicted {duration_text(self.seconds)} of one worker"
            f"{with_all}, {self.memory / 1e9:.2g} GB of memory each"
        )

    def against(self, seconds: float) -> str:
        """The prediction beside the measured time."""
        return (
            f"predicted {duration_text(self.seconds)}, took {duration_text(seconds)} of workers' time "
            f"({100 * (self.seconds / max(seconds, 1e-9) - 1):+.0f} %)"
        )


def predict(
    ready: Prepared, plan: Sequence[CellBatch], workers: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Prediction:
    """Predict the cost of batches on this machine, after a short calibration on some of them."""
    laws = _calibrated(ready, plan, clock)
    units = split(plan, workers)
    times = [laws[_READ](unit[0].length) + sum(laws[batch.what](batch.length) for batch in unit) for unit in units]
    longest = max((batch.length for batch in plan), default=1)
    memory = peak_bytes() + 3 * least_bytes(longest, ModelSizes.of(ready.model)) // 2
    cells = sum(len(batch.heads) for batch in plan)
    return Prediction(cells, len(units), math.fsum(times), max(times, default=0.0), memory, workers)


def _calibrated(ready: Prepared, plan: Sequence[CellBatch], clock: Callable[[], float]) -> dict[str, CostLaw]:
    """The law of every kind of map in a plan, and that of reading a window."""
    width, cut = ModelSizes.of(ready.model).width, ready.cut
    planned = sorted({batch.length for batch in plan})
    short = [n for n in planned if n <= _LONGEST]
    others = () if isinstance(ready.model, OwnNetwork) else (16, 64, 128)
    lengths = sorted({*short[:1], *short[-1:], *planned[:1]} | {n for n in others if n < planned[-1]})
    times: dict[str, list[tuple[int, float]]] = {}
    for n in [lengths[0], *lengths]:  # the first is a warm-up and is not counted
        window = cut[n][0] if n in cut else _cut_short(cut[planned[-1]][0], n)
        begun = clock()
        targets = targets_at(ready.model, window)
        targets.read(maps=any(batch.what in OF_SOFTMAX for batch in plan))
        seen = {_READ: [clock() - begun]}
        for batch in _samples(plan):
            begun = clock()
            measure_batch(targets, batch, ready.identity.settings)
            seen.setdefault(batch.what, []).append(clock() - begun)
        times |= {what: [*times.get(what, []), (n, sum(all_) / len(all_))] for what, all_ in seen.items()}
    return {what: CostLaw.fitted(samples[1:], width) for what, samples in times.items()}


@validated
def makespan(seconds: Sequence[float], workers: Count, start: float = 0.0) -> float:
    """When the last of some workers is done that take units from one queue, each as soon as it is free.

    Graham (1969): at most (2 − 1/m) times what the best order would give.

    Args:
        seconds: of the units, in the order of the queue.
        start: what every worker takes before its first unit: Python, and the model.

    >>> makespan([3, 3, 2, 2, 2], workers=2)
    7.0
    """
    check_numbers(list(seconds), "seconds")
    free = [start] * min(workers, max(1, len(seconds)))
    for unit in seconds:
        heapq.heapreplace(free, free[0] + unit)
    return float(max(free))


def _samples(plan: Sequence[CellBatch]) -> list[CellBatch]:
    """A few batches of every kind, from the first layer to the last."""
    chosen: list[CellBatch] = []
    for what in dict.fromkeys(batch.what for batch in plan):
        first = plan[0] if plan[0].what == what else next(batch for batch in plan if batch.what == what)
        same = [batch for batch in plan if (batch.what, batch.length, batch.window) == (what, first.length, 0)]
        step = max(1, -(-len(same) // _LAYERS))
        chosen += same[::step]
    return chosen


def _cut_short(window: Window, length: int) -> Window:
    """The beginning of a window of tokens."""
    return Window(window.ids[:, :length], window.tokens[:length], window.start)


def peak_bytes() -> int:
    """The peak memory of this process; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def duration_text(seconds: float) -> str:
    """A time in a unit that suits it.

    >>> duration_text(0.25), duration_text(75), duration_text(7300), duration_text(400_000)
    ('0.25 s', '1.2 min', '2 h', '4.6 days')
    """
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size * (2 if unit == "days" else 1):
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def sbatch_script(command: Sequence[str], prediction: Prediction, shards: int, threads: int, out: str) -> str:
    """A script for SLURM: one task of an array for every shard, and the command that joins them.

    The requested time is twice the prediction and ten minutes: a stopped task has to be run again.
    """
    from shlex import join, quote

    minutes = 10 + math.ceil(2 * prediction.seconds / shards / 60)
    parts = out.removesuffix(".sqlite")
    scan = join([*command, "--threads", str(threads), "--shard", "slurm"])
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=howsmooth",
            f"#SBATCH --array=1-{shards}",
            f"#SBATCH --cpus-per-task={threads}",
            f"#SBATCH --mem={math.ceil(1.25 * prediction.memory / 2**20)}M",
            f"#SBATCH --time={minutes}",
            f"{scan} --out {quote(parts)}-$SLURM_ARRAY_TASK_ID.sqlite",
            f"# when all have ended: howsmooth merge {quote(parts)}-*.sqlite --out {quote(parts)}.sqlite",
        ]
    )
