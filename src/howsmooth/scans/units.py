"""Units of work: some layers of a model in one window, so that one forward pass serves many cells; and shards.

A unit holds all that a worker needs, in a few kilobytes. A worker opens the model of its first unit and keeps it
open, and it keeps the targets of the last window.

A scan in N independent parts has N shards, each with a store of its own: part i has the units i, i + N, i + 2N, … of
the whole plan, whatever is stored already, so that the parts are disjoint and together the whole. A store records its
part in a table of its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from howsmooth._util.common import first_line
from howsmooth._util.sqlite_files import StoreError
from howsmooth._util.validation import shown
from howsmooth.engines.dispatch import WorkerMisconfigured
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.models.network_parts import NetworkTargets
from howsmooth.models.own_networks import OwnNetwork, is_own, own_network, targets_at
from howsmooth.scans.cell_values import CellValues, fitting, measure_batch
from howsmooth.scans.plan import OF_SOFTMAX, CellBatch, ScanCell, ScanSettings
from howsmooth.scans.scan_store import Store

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
        if isinstance(model, OwnNetwork):
            return cls(model.name, False, model.sha256, _software(), "cpu", model.dtype)
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
        self._read: tuple[Origin, bytes, Targets | NetworkTargets] | None = None

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
        key, model = (unit.origin, unit.ids.tobytes()), self.model(unit.origin)
        with fitting(unit.batches[0].length):
            if self._read is None or self._read[:2] != key:
                self._read = None
                targets = targets_at(model, Window(torch.from_numpy(unit.ids.copy()), [], 0))
                targets.read(maps=any(batch.what in OF_SOFTMAX for batch in unit.batches))
                self._read = (*key, targets)
            targets = self._read[2]
            return [row for batch in unit.batches for row in measure_batch(targets, batch, unit.settings)]


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
        if is_own(origin.model):
            model: OpenModel = own_network(origin.model).in_dtype(origin.dtype)
        else:
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


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in few characters.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_MOST = 1_000_000


@dataclass(frozen=True)
class Shard:
    """One part of a scan.

    Attributes:
        number, count: part number 1 … count.
        model_sha256, text_sha256, plan: which scan; ``plan`` is a digest of all cells that were asked for.
        cells, there: how many it has when it is done, and how many it has.
    """

    number: int
    count: int
    model_sha256: str = ""
    text_sha256: str = ""
    plan: str = ""
    cells: int = 0
    there: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def whole(self) -> Shard:
        """The shard without the fields in which parts of one scan differ."""
        return replace(self, number=0, cells=0, there=0)

    def part(self, plan: Sequence[CellBatch]) -> list[CellBatch]:
        """The batches of this shard.

        >>> plan = [CellBatch("head", layer, (0,), 8, window) for window in range(3) for layer in range(4)]
        >>> parts = [Shard(number, 3).part(plan) for number in (1, 2, 3)]
        >>> sum(map(len, parts)), set(plan) == {batch for batches in parts for batch in batches}
        (12, True)
        """
        units = split(plan, self.count)
        return [batch for unit in units[self.number - 1 :: self.count] for batch in unit]

    def of(self, plan: Sequence[CellBatch]) -> Shard:
        """This part of a plan, with the fields that the store records."""
        digest = hashlib.sha256(repr(list(plan)).encode()).hexdigest()
        return replace(self, plan=digest, cells=sum(len(batch.heads) for batch in self.part(plan)))


def parse_shard(text: str) -> Shard:
    """``2/8``, or ``slurm``: the task of a job array that this runs in.

    >>> str(parse_shard("2/8"))
    '2/8'
    """
    if text.strip().lower() == "slurm":
        return _of_slurm()
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*/\s*([0-9]{1,7})\s*", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count <= _MOST:
        raise InvalidInput(f"a shard is i/N with i from 1 to N, or slurm, got {shown(text)}.")
    return Shard(number, count)


def _of_slurm() -> Shard:
    """From the variables that SLURM sets in the tasks of a job array, whatever number its tasks begin at."""
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN")
    texts = [os.environ.get(name, "") for name in names]
    if not all(re.fullmatch("[0-9]{1,9}", one) for one in texts[:2]):
        raise InvalidInput(
            "--shard slurm reads SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, which are not set: submit a job array "
            "(sbatch --array=1-N), or write i/N."
        )
    number, count, first = int(texts[0]), int(texts[1]), int(texts[2]) if texts[2].isdigit() else 1
    step = os.environ.get("SLURM_ARRAY_TASK_STEP", "1")
    number = (number - first) // (int(step) if step.isdigit() and int(step) else 1) + 1
    if not 1 <= number <= count:
        raise InvalidInput(f"task {texts[0]} of a SLURM array of {count} is none of its shards: use --array=1-{count}.")
    return Shard(number, count)


def note_shard(store: Store, scan: int, shard: Shard | None) -> None:
    """Record in a store its part of a scan, None for the whole; a store of another part is refused."""
    with store._transaction():
        there = store.shards().get(scan)
        if shard is None:
            if there is not None:
                raise StoreError(
                    f"{store.path} holds shard {there[0]}/{there[1]} of this scan, not the whole: choose another "
                    "--out, or --no-resume to measure the whole anew."
                )
        elif there is None:
            if store._scan(scan)["cells"]:
                raise StoreError(
                    f"{store.path} holds cells of this scan that are of no shard, not those of shard {shard}: give "
                    "every shard a store of its own."
                )
            store.note_shard(scan, (shard.number, shard.count, shard.plan, shard.cells))
        elif there[:3] != (shard.number, shard.count, shard.plan):
            other = "" if there[:2] == (shard.number, shard.count) else f" {there[0]}/{there[1]}"
            raise StoreError(
                f"{store.path} holds shard{other} of another plan, not shard {shard} of this scan: give every shard a "
                "store of its own."
            )


def read_shards(path: Path) -> list[Shard]:
    """The parts that a store records; none for a store that was not made from shards."""
    with Store.reading(path) as store:
        of = {row["id"]: row for row in store.identities()}
        return [
            Shard(number, count, of[scan]["model_sha256"], of[scan]["text_sha256"], plan, cells, of[scan]["cells"])
            for scan, (number, count, plan, cells) in store.shards().items()
        ]
