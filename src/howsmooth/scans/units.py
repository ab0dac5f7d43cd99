"""Units of work: some layers of a model in one window, so that one forward pass serves many cells.

A unit holds all that a worker needs, in a few kilobytes. A worker opens the model of its first unit and keeps it
open, and it keeps the targets of the last window.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby

import numpy as np
import torch

from howsmooth._util.common import first_line
from howsmooth.engines.worker import WorkerMisconfigured
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.scans.cell_values import CellValues, measure_batch
from howsmooth.scans.memory_checks import fitting
from howsmooth.scans.plan import OF_SOFTMAX, CellBatch, ScanCell
from howsmooth.scans.scan_options import ScanSettings

_SPLIT = 4
"""Units for every worker where windows are few: enough to share evenly, few enough that passes are not all repeated."""


@dataclass(frozen=True)
class Origin:
    """The name and options of a model, and the software that must be the same everywhere."""

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
    batches: tuple[CellBatch, ...]
    settings: ScanSettings

    def __str__(self) -> str:
        """The measured maps and their place, in words."""
        first = self.batches[0]
        layers = sorted({batch.layer for batch in self.batches if batch.layer is not None})
        whats = ", ".join(dict.fromkeys(batch.what for batch in self.batches))
        places = f" of layer{'s' * (len(layers) > 1)} {_ranges(layers)}" if layers else ""
        return f"n = {first.length}, window {first.window}: {whats}{places}"

    @property
    def work(self) -> float:
        """That of its batches."""
        return sum(batch.work for batch in self.batches)


def split(batches: Sequence[CellBatch], workers: int) -> list[tuple[CellBatch, ...]]:
    """Batches in the order of a plan as units for some workers: whole windows, or parts of them where those are few.

    >>> from howsmooth.scans.plan import CellBatch
    >>> plan = [CellBatch("head", layer, (0, 1), 8, window) for window in range(2) for layer in range(8)]
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


class Worker:
    """The state of a process that measures units: one open model, and the window that the model has read last."""

    def __init__(self) -> None:
        self._open: tuple[Origin, OpenModel] | None = None
        self._read: tuple[Origin, bytes, Targets] | None = None

    def use(self, origin: Origin, model: OpenModel) -> None:
        """Replace the open model."""
        self._open, self._read = (origin, model), None

    def model(self, origin: Origin) -> OpenModel:
        """The model of an origin, opened unless it is open."""
        if self._open is None or self._open[0] != origin:
            self.use(origin, _opened(origin))
        assert self._open is not None
        return self._open[1]

    def measure(self, unit: Unit) -> list[tuple[ScanCell, CellValues]]:
        """The cells of a unit with their values."""
        targets = self._targets(unit)
        with fitting(unit.batches[0].length):
            return [row for batch in unit.batches for row in measure_batch(targets, batch, unit.settings)]

    def _targets(self, unit: Unit) -> Targets:
        key, read = (unit.origin, unit.ids.tobytes()), self._read
        if read is not None and read[:2] == key:
            return read[2]
        model = self.model(unit.origin)
        with fitting(unit.batches[0].length):
            self._read = None
            targets = Targets(model, Window(torch.from_numpy(unit.ids.copy()), [], 0))
            targets.read(maps=any(batch.what in OF_SOFTMAX for batch in unit.batches))
        self._read = (*key, targets)
        return targets


WORKER = Worker()
"""The worker of this process; units reach it by functions, which every engine can pickle by name."""


def measure_unit(unit: Unit) -> list[tuple[ScanCell, CellValues]]:
    """The cells of a unit with their values, in whatever process this runs."""
    return WORKER.measure(unit)


def open_for(unit: Unit) -> OpenModel:
    """The model of a unit, opened unless it is open."""
    return WORKER.model(unit.origin)


def _opened(origin: Origin) -> OpenModel:
    where = f"the worker on {platform.node()}"
    if _software() != origin.software:
        raise WorkerMisconfigured(
            f"{where} has {_software()}, but the driver {origin.software}: install the same versions there."
        )
    try:
        model = open_model(origin.model, head=origin.head, device=origin.device, dtype=origin.dtype)
    except Exception as error:
        raise WorkerMisconfigured(
            f"{where} cannot open {origin.model} on {origin.device} ({first_line(error)}): give it the same files; a "
            "model in memory is measured by threads or in this process."
        ) from error
    if model.sha256 != origin.sha256:
        raise WorkerMisconfigured(
            f"{where} finds another model under {origin.model} (sha256 {model.sha256[:12]}…, not "
            f"{origin.sha256[:12]}…): give it the same files, or a model that can be opened by its name."
        )
    return model


def _software() -> str:
    return f"howsmooth {version('howsmooth')} with torch {torch.__version__}"


def window_ids(window: Window) -> np.ndarray:
    """The tokens of a window as an array."""
    return window.ids.detach().cpu().numpy()


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in few characters.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
