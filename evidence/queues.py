"""Is the simulation of a queue right? Measured unit times replayed beside the clock, then those of a large model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

import howsmooth as hs
from evidence.tables import table
from howsmooth.engines import Load, submit_all
from howsmooth.engines.dispatch import State
from howsmooth.engines.processes import Processes
from howsmooth.scans import makespan
from howsmooth.scans.plan import ScanOptions
from howsmooth.scans.run import Prepared, prepare
from howsmooth.scans.units import Origin, Unit, measure_unit, open_for, split

TITLE = "A queue of units, replayed"
WORKERS = 2
MODEL, LENGTHS, WINDOWS = "random:llama[layers=8,width=64]", "64,128,256", 3
DRAWS = 200


@dataclass(frozen=True)
class Large:
    """A model that was never run: one window of 32,768 tokens on nodes that multiply ``rate`` times a second."""

    layers: int = 80
    width: int = 8192
    parameters: float = 7e10
    n: int = 32_768
    products: int = 60
    rate: float = 1e12
    start: float = 600.0

    @property
    def layer(self) -> float:
        """Seconds for the heads of one layer: products with the Jacobian of 6·n²·d multiplications each."""
        return self.products * 6 * self.n**2 * self.width / self.rate

    @property
    def reading(self) -> float:
        """Seconds for the model to read the window: two for every weight and token, and the scores of all layers."""
        return (2 * self.parameters * self.n + self.layers * 4 * self.n**2 * self.width) / self.rate

    def units(self, windows: int, layers_each: int) -> list[float]:
        """The seconds of all units; each reads its window again."""
        return [layers_each * self.layer + self.reading] * (windows * self.layers // layers_each)


@dataclass(frozen=True)
class Run:
    """Units that were measured by workers: the seconds of each in the order of the queue, and what a clock says."""

    kinds: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]
    wall: float

    @property
    def replayed(self) -> float:
        """What the simulation makes of the units."""
        return makespan(self.seconds, WORKERS)

    @property
    def spread(self) -> list[float]:
        """The seconds of every unit over the mean of those of its kind: as many tokens and batches."""
        means = {
            kind: mean(s for k, s in zip(self.kinds, self.seconds, strict=True) if k == kind) for kind in self.kinds
        }
        return [s / means[kind] for kind, s in zip(self.kinds, self.seconds, strict=True)]


def measured(model: str = MODEL, lengths: str = LENGTHS, windows: int = WINDOWS) -> Run:
    """A scan by two processes that have the model open."""
    ready = prepare(model, None, ScanOptions(lengths=lengths, windows=windows))
    units = _units(ready)
    seconds = [0.0] * len(units)

    def tell(now: State) -> None:
        if now.place is not None:
            seconds[now.place] = now.seconds

    with Processes(WORKERS, threads=1) as workers:
        nothing = lambda place, rows: None  # noqa: E731
        submit_all(workers, measure_unit, [units[0]] * WORKERS, nothing, load=Load(WORKERS), prepare=open_for)
        began = time.perf_counter()
        submit_all(workers, measure_unit, units, nothing, load=Load(WORKERS), prepare=open_for, tell=tell)
        wall = time.perf_counter() - began
    return Run(tuple((unit.batches[0].length, len(unit.batches)) for unit in units), tuple(seconds), wall)


def _units(ready: Prepared) -> list[Unit]:
    origin = Origin.of(ready.model)
    return [
        Unit(origin, ready.cut[one[0].length][one[0].window].ids.numpy(), one, ready.identity.settings)
        for one in split(ready.plan, WORKERS)
    ]


def measured_rate(n: int = 1024, width: int = 256, heads: int = 4) -> tuple[float, int]:
    """Multiplications a second of one core in products with the Jacobians of all heads, and how many there were."""
    attention = hs.SelfAttention.random(width, heads=heads, seed=0)
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(0))
    began = time.process_time()
    found = hs.measure_heads(attention, x, rtol=1e-3)
    return 6 * n**2 * width * found.products / (time.process_time() - began), found.products


def replayed(units: Sequence[float], spread: Sequence[float], workers: int, start: float) -> list[float]:
    """When a queue ends whose units take longer or shorter as measured ones do, for many orders; sorted."""
    draw = random.Random(0)
    return sorted(makespan([unit * draw.choice(spread) for unit in units], workers, start=start) for _ in range(DRAWS))


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    torch.set_num_threads(1)
    progress("a scan by two processes")
    run = measured()
    progress("the rate of one core")
    rate, products = measured_rate()
    model = Large()
    rows: list[list[object]] = []
    for said, windows, layers_each, nodes in (
        ("1 window, 1 layer a unit", 1, 1, 64),
        ("1 window, 1 layer a unit", 1, 1, 80),
        ("10 windows, 2 layers a unit", 10, 2, 64),
        ("10 windows, 5 layers a unit", 10, 5, 64),
    ):
        units = model.units(windows, layers_each)
        plain, drawn = makespan(units, nodes, start=model.start), replayed(units, run.spread, nodes, model.start)
        range_ = f"{drawn[0] / 3600:.1f} to {drawn[-1] / 3600:.1f}"
        rows.append([said, len(units), nodes, f"{plain / 3600:.1f}", f"{drawn[DRAWS // 2] / 3600:.1f}", range_])
    low, high = min(run.spread), max(run.spread)
    return [
        f"A scan of {MODEL} (heads, lengths {LENGTHS}, {WINDOWS} windows, one thread) is measured by {WORKERS} "
        "processes, and the seconds of its units are put through `makespan`, which lets every worker take the next "
        "unit when it is free.",
        table(
            ["units", "by the clock", "by the simulation", "off by"],
            [
                [
                    len(run.seconds),
                    f"{run.wall:.1f} s",
                    f"{run.replayed:.1f} s",
                    f"{100 * (run.replayed / run.wall - 1):+.1f} %",
                ]
            ],
        ),
        f"Units of one kind (as many tokens and layers) took {low:.2f} to {high:.2f} times their mean. A model of 80 "
        f"layers, width {model.width} and 7·10¹⁰ parameters, one window of {model.n:,} tokens, has units of "
        f"{model.layer / 60:.0f} minutes for the heads of a layer ({model.products} products with the Jacobian of "
        f"6·n²·d multiplications each) and {model.reading / 3600:.2f} hours for reading the window, on nodes that "
        "multiply 10¹² times a second. One core of this machine did "
        f"{rate:.1e} a second in such products, {products} of them at n = 1024, so that such a node has "
        f"about {model.rate / rate:.0f} of these cores. The queue in hours, with units that take equally long, and "
        f"with {DRAWS} draws of units that vary as the measured ones did; workers start within ten minutes:",
        table(["what", "units", "nodes", "equal units", "median of draws", "all draws"], rows),
        "No such model was run: the arithmetic holds as far as its rate does.",
    ]
