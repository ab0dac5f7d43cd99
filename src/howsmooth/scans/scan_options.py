"""The options of a scan: settings that decide every number, and everything else that a caller may choose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from howsmooth._util.sqlite_files import MEMORY
from howsmooth._util.validation import Device, Seed, check_count, check_fields, check_positive, shown
from howsmooth.engines import Engine
from howsmooth.errors import InvalidInput
from howsmooth.models.open_source import DeviceMap, Dtype
from howsmooth.scans.plan import Numbers as Places

BoundsWanted = Literal["none", "proved", "cheap", "all"]
_MAX_WINDOWS = 10**6


@dataclass(frozen=True)
class ScanProgress:
    """The progress of a scan: cells stored, cells requested, and a label for the next step; ``work`` weighs cells by
    their length."""

    cells: int
    total: int
    work: float
    label: str


@dataclass(frozen=True)
class ScanSettings:
    """All that decides the numbers of a scan beside model, text and cell.

    Attributes:
        rtol, confidence: as in `howsmooth.measure`.
        seed: of the solver's start in every cell, and of the windows.
        windows: the number of windows of each length that are cut from the text; it decides where they begin.
        explain: also the value and score paths.
        bounds: "none", "proved" (the three-path bound alone), "cheap" or "all".
    """

    rtol: float = 1e-3
    confidence: float = 0.99
    seed: Seed = 0
    windows: int = 1
    explain: bool = True
    bounds: BoundsWanted = "cheap"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rtol < 1:
            raise InvalidInput(f"rtol is a relative accuracy between 0 and 1, got {self.rtol}.")
        if not 0 <= self.confidence < 1:
            raise InvalidInput(f"confidence is a probability below 1, got {self.confidence}.")
        if not 1 <= self.windows <= _MAX_WINDOWS:
            limits = f"from 1 to {_MAX_WINDOWS} windows of each length, got {shown(self.windows)}"
            raise InvalidInput(f"a scan needs at least one window and has {limits}.")

    def to_json(self) -> str:
        """Equal settings give equal texts."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ScanOptions(ScanSettings):
    """The keyword arguments of `howsmooth.scan`: those of `ScanSettings`, and these.

    Attributes:
        lengths: numbers of tokens, special ones included: 128 (the default), [64, 128] or "8,16,…,512".
        layers: "0,2-4" or a list; None for all.
        what: "head", "attention", "residual", "mlp", "layer", "prefix", "model" or "logits", one or several, each with
            an optional choice: "head[layers=0-5,heads=3]".
        out: a store file, in which a stopped scan is resumed; None to store nothing.
        resume: use the cells of this scan in the store; otherwise measure them anew.
        tokenizer: of a model in memory, where transformers does not find it by the model's name.
        device: where to measure, for example "cuda"; by default the device of the model.
        dtype: "auto" (weights as they are stored, computed upon in float32), "float64" for the arithmetic, or
            "bfloat16" or "float16" to round the weights first.
        device_map: of a model that is opened by name: passed to ``from_pretrained`` of transformers ("auto", or module
            → device), which needs accelerate. Measured modules must not be offloaded.
        column: the column of a dataset, "text" by default.
        reference: "random" to measure the same architecture with random weights as well, in the same store, as a
            baseline for training. Its rows are those of MODEL@random, and a report shows them beside the others.
        progress: called before every batch and at the end; with workers, whenever one has answered. A notebook shows a
            bar without it.
        executor: any `concurrent.futures.Executor` that measures instead of this process, which alone writes; or a
            `howsmooth.engines.Engine` of one.
        jobs: the number of units that are measured at a time; without an executor, by as many processes (1: by this
            one).
        timeout: seconds after which a unit is abandoned with its worker; not in this process.
        shard: "i/N" for part i of N of this scan, in a store of its own, or "slurm" for that of a task of a job array;
            `howsmooth.scans.merge` joins them.
    """

    lengths: Places | None = None
    layers: Places | None = None
    what: str | Sequence[str] = "head"
    out: Path | str | None = None
    resume: bool = True
    tokenizer: Any = None
    device: Device | None = None
    dtype: Dtype | None = None
    device_map: DeviceMap | None = None
    column: str | None = None
    reference: Literal["random"] | None = None
    progress: Callable[[ScanProgress], object] | None = None
    executor: Executor | Engine | None = None
    jobs: int | None = None
    timeout: float | None = 3600.0
    shard: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        out = str(self.out)
        if self.out is not None and (not out.strip() or out == MEMORY or out.startswith("file:")):
            raise InvalidInput(f"out is the name of a file, got {out!r}: leave it out to store nothing.")
        if self.timeout is not None:
            check_positive(self.timeout, "timeout")
        if self.executor is None and self.jobs is not None:
            check_count(self.jobs, "jobs", most=1024)

    @property
    def settings(self) -> ScanSettings:
        """The options that decide the numbers."""
        return ScanSettings(**{field.name: getattr(self, field.name) for field in fields(ScanSettings)})

    @property
    def engine(self) -> Executor | Engine | None:
        """The engine or executor that measures; None for this process."""
        return Engine(jobs=self.jobs) if self.executor is None and (self.jobs or 1) > 1 else self.executor
