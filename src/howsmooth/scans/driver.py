"""The driver of a scan: it finds the cells that are requested, stored and missing, and has the missing ones measured.

The process of the driver alone writes to the store: batch by batch when it measures itself, unit by unit when workers
measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from howsmooth.engines.dispatch import Load, State, submit_all
from howsmooth.models import Targets, Window
from howsmooth.scans import units
from howsmooth.scans.cell_values import CellValues, measure_batch
from howsmooth.scans.memory_checks import fitting
from howsmooth.scans.plan import OF_SOFTMAX, CellBatch, ScanCell
from howsmooth.scans.prepare import Prepared
from howsmooth.scans.scan_options import ScanProgress
from howsmooth.scans.scan_store import Store
from howsmooth.scans.units import Origin, Unit, open_for, split, window_ids


@dataclass(frozen=True)
class Outcome:
    """The end of a run: units without values with their reasons, notes on retries, and the seconds of workers."""

    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


class ScanDriver:
    """A plan and its store.

    Args:
        ready: the prepared scan.
        plan: the batches of it that are requested.
        store, number: where rows are written, and the number of the scan there.
        report: called with the progress.
    """

    def __init__(
        self,
        ready: Prepared,
        plan: Sequence[CellBatch],
        store: Store,
        number: int,
        report: Callable[[ScanProgress], object],
    ):
        self.ready, self.plan, self.store, self.number, self.report = ready, plan, store, number, report
        self.requested = {cell for batch in plan for cell in batch.cells()}
        self.stored = self.requested & store.cells(number)
        self.missing = [batch for batch in plan if not self.stored.issuperset(batch.cells())]
        self.work = 0.0

    def measure_here(self) -> Outcome:
        """Measure every missing batch in this process. A window is read once; an error ends the scan."""
        with self._interruptible():
            for (length, index), group in groupby(self.missing, key=lambda batch: (batch.length, batch.window)):
                self._tell(f"n = {length}, window {index}: reading")
                window, batches = self.ready.cut[length][index], list(group)
                with fitting(length):
                    targets = self.ready.at_hand.pop((length, index), None) or Targets(self.ready.model, window)
                    targets.read(maps=any(batch.what in OF_SOFTMAX for batch in batches))
                for batch in batches:
                    self._tell(_label(batch))
                    with fitting(length):
                        rows = measure_batch(targets, batch, self.ready.settings)
                    self._add(window, rows)
                    self.work += batch.work
        self.work = self._total_work()
        self._tell("done")
        return Outcome()

    def measure_on(self, executor: Executor, load: Load, timeout: float | None = None) -> Outcome:
        """Measure every missing batch on an executor, in units; a unit that fails twice is reported."""
        origin, settings, cut = Origin.of(self.ready.model), self.ready.settings, self.ready.cut
        windows = [(cut[one[0].length][one[0].window], one) for one in split(self.missing, load.width)]
        every = [Unit(origin, window_ids(window), batches, settings) for window, batches in windows]
        retries: list[str] = []
        seconds = 0.0

        def tell(state: State) -> None:
            nonlocal seconds
            if state.place is not None:
                self.work += every[state.place].work
                seconds += state.seconds
            self._tell(f"{state.done} of {len(every)} units done, {state.running} running")

        units.WORKER.use(origin, self.ready.model)
        with self._interruptible():
            failures = submit_all(
                executor,
                units.measure_unit,
                every,
                lambda index, rows: self._add(windows[index][0], rows),
                load=load,
                limit=timeout,
                prepare=open_for,
                tell=tell,
                retry=lambda index, reason: retries.append(f"tried again: {every[index]}: {reason}"),
            )
        reasons = (f"{every[one.place]}: {' — then: '.join(dict.fromkeys(one.reasons))}" for one in failures)
        return Outcome(tuple(reasons), tuple(retries), seconds)

    def _add(self, window: Window, rows: list[tuple[ScanCell, CellValues]]) -> None:
        self.store.add(self.number, window.start, window.tokens, rows)
        self.stored.update(cell for cell, _ in rows)

    def _tell(self, label: str) -> None:
        work = min(1.0, self.work / self._total_work())
        self.report(ScanProgress(len(self.stored), len(self.requested), work, label))

    def _total_work(self) -> float:
        return sum(batch.work for batch in self.missing) or 1.0

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """After Ctrl-C, report the cells that are stored."""
        try:
            yield
        except KeyboardInterrupt:
            self.stored = self.requested & self.store.cells(self.number)  # the last batch may have been stored just now
            self._tell("interrupted")
            raise


def _label(batch: CellBatch) -> str:
    layer = "" if batch.layer is None else f" of layer {batch.layer}"
    return f"n = {batch.length}, window {batch.window}: {'heads' if batch.what == 'head' else batch.what}{layer}"
