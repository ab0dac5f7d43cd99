"""Units of work: some layers of a model in one window, so that one forward pass serves many cells.

A unit says all that a worker needs, in a few kilobytes. The worker opens the model when the first unit names it and
keeps it, and so it does with what the model did in the last window.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from typing import Any

import numpy as np
import torch

from howsmooth._util.common import first_line
from howsmooth.engines import Failure, Load, State, Unfit, hand_over
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.scans.cell_values import Numbers, measure_batch
from howsmooth.scans.memory_checks import fitting
from howsmooth.scans.plan import Batch, Cell, Settings
from howsmooth.scans.scan_store import Store

_SPLIT = 4
"""Units for every worker where windows are few: enough to share evenly, few enough that passes are not all repeated."""


@dataclass(frozen=True)
class Origin:
    """Which model, how it was opened, and the software that must be the same everywhere."""

    model: str
    head: bool
    sha256: str
    software: str
    device: str = "cpu"
    dtype: str = "auto"

    @classmethod
    def of(cls, model: OpenModel) -> Origin:
        """That of an open model, and of this process."""
        head = model.model.base_model is not model.model
        return cls(model.name, head, model.sha256, _software(), str(model.model.device), model.dtype)


@dataclass(frozen=True)
class Unit:
    """Batches of one window; ``ids`` is what the model reads, as an array, which every engine can carry."""

    origin: Origin
    ids: np.ndarray
    batches: tuple[Batch, ...]
    settings: Settings

    def __str__(self) -> str:
        """What is measured where, in words."""
        first = self.batches[0]
        layers = sorted({batch.layer for batch in self.batches if batch.layer is not None})
        whats = ", ".join(dict.fromkeys(batch.what for batch in self.batches))
        places = f" of layer{'s' * (len(layers) > 1)} {_ranges(layers)}" if layers else ""
        return f"n = {first.length}, window {first.window}: {whats}{places}"

    @property
    def work(self) -> float:
        """That of its batches."""
        return sum(batch.work for batch in self.batches)


def split(batches: Sequence[Batch], workers: int) -> list[tuple[Batch, ...]]:
    """Batches in the order of a plan as units for some workers: whole windows, or parts of them where those are few.

    >>> from howsmooth.scans.plan import Batch
    >>> plan = [Batch("head", layer, (0, 1), 8, window) for window in range(2) for layer in range(8)]
    >>> [len(unit) for unit in split(plan, 1)], len(split(plan, 3))
    ([4, 4, 4, 4], 8)
    """
    windows = [list(group) for _, group in groupby(batches, key=lambda batch: (batch.length, batch.window))]
    pieces = max(1, -(-_SPLIT * workers // max(1, len(windows))))
    units = []
    for window in windows:
        layers = [tuple(group) for _, group in groupby(window, key=lambda batch: batch.layer)]
        size = -(-len(layers) // min(pieces, len(layers)))
        units += [
            tuple(batch for layer in layers[first : first + size] for batch in layer)
            for first in range(0, len(layers), size)
        ]
    return units


def measure_unit(unit: Unit) -> list[tuple[Cell, Numbers]]:
    """The cells of a unit with their numbers, in whatever process this runs."""
    targets = _targets(unit)
    with fitting(unit.batches[0].length):
        return [row for batch in unit.batches for row in measure_batch(targets, batch, unit.settings)]


@dataclass(frozen=True)
class Outcome:
    """What became of units: those without numbers and those tried again, each with its reasons, and the seconds
    that workers spent."""

    failures: tuple[str, ...]
    again: tuple[str, ...]
    seconds: float


def run_units(
    executor: Executor,
    model: OpenModel,
    plan: Sequence[Batch],
    cut: dict[int, list[Window]],
    settings: Settings,
    store: Store,
    number: int,
    progress: Callable[[int, int, float, str], object],
    load: Load,
    limit: float | None = None,
    work: Callable[[Unit], Any] | None = None,
) -> Outcome:
    """Measure every batch of which a cell is missing on an executor; this process alone writes what comes back."""
    asked = {cell for batch in plan for cell in batch.cells()}
    kept = asked & store.cells(number)
    missing = [batch for batch in plan if not kept.issuperset(batch.cells())]
    origin = Origin.of(model)
    units = [
        Unit(origin, _array(cut[batches[0].length][batches[0].window]), batches, settings)
        for batches in split(missing, load.width)
    ]
    all_work = sum(unit.work for unit in units) or 1.0
    state = {"cells": len(kept), "work": 0.0, "seconds": 0.0}
    again: list[str] = []

    def keep(index: int, rows: list[tuple[Cell, Numbers]]) -> None:
        unit = units[index]
        window = cut[unit.batches[0].length][unit.batches[0].window]
        store.add(number, window.start, window.tokens, rows)
        state["cells"] += len({cell for cell, _ in rows} - kept)

    def tell(now: State) -> None:
        if now.place is not None:
            state["work"] += units[now.place].work
            state["seconds"] += now.seconds
        label = f"{now.done} of {len(units)} units done, {now.running} running"
        progress(int(state["cells"]), len(asked), min(1.0, state["work"] / all_work), label)

    _remember(origin, model)
    failures: list[Failure] = hand_over(
        executor,
        work or measure_unit,
        units,
        keep,
        load=load,
        limit=limit,
        prepare=open_for,
        tell=tell,
        again=lambda index, reason: again.append(f"{units[index]}: {reason}"),
    )
    said = (f"{units[one.place]}: {' — then: '.join(dict.fromkeys(one.reasons))}" for one in failures)
    return Outcome(tuple(said), tuple(again), state["seconds"])


_models: dict[Origin, OpenModel] = {}
_read: dict[tuple[Origin, bytes], Targets] = {}
"""What this process has open: one model, and what it did in one window."""


def _remember(origin: Origin, model: OpenModel) -> None:
    _models.clear()
    _read.clear()
    _models[origin] = model


def open_for(unit: Unit) -> OpenModel:
    """The model of a unit, opened unless it is open."""
    return _models.get(unit.origin) or _opened(unit.origin)


def _targets(unit: Unit) -> Targets:
    key = (unit.origin, unit.ids.tobytes())
    targets = _read.get(key)
    if targets is None:
        model = open_for(unit)
        with fitting(unit.batches[0].length):
            _read.clear()
            targets = Targets(model, Window(torch.from_numpy(unit.ids.copy()), [], 0))
            targets.read(maps=any(batch.what in ("head", "attention") for batch in unit.batches))
        _read[key] = targets
    return targets


def _opened(origin: Origin) -> OpenModel:
    where = f"the worker on {platform.node()}"
    if _software() != origin.software:
        raise Unfit(f"{where} has {_software()}, but the driver {origin.software}: install the same versions there.")
    try:
        model = open_model(origin.model, head=origin.head, device=origin.device, dtype=origin.dtype)
    except Exception as error:
        raise Unfit(
            f"{where} cannot open {origin.model} on {origin.device} ({first_line(error)}): give it the same files; a "
            "model in memory is measured by threads or in this process."
        ) from error
    if model.sha256 != origin.sha256:
        raise Unfit(
            f"{where} finds another model under {origin.model} (sha256 {model.sha256[:12]}…, not "
            f"{origin.sha256[:12]}…): give it the same files, or a model that can be opened by its name."
        )
    _remember(origin, model)
    return model


def _software() -> str:
    return f"howsmooth {version('howsmooth')} with torch {torch.__version__}"


def _array(window: Window) -> np.ndarray:
    return window.ids.detach().cpu().numpy()


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in few characters.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
