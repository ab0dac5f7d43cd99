"""From a model and a text to measured cells, stored one batch at a time.

`prepare` opens the model, cuts the windows and lists every batch; `ScanDriver` finds the cells that are requested,
stored and missing, and has the missing ones measured. Its process alone writes to the store: batch by batch when it
measures itself, unit by unit when workers measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from howsmooth._util.display import scan_bar
from howsmooth._util.sqlite_files import MEMORY
from howsmooth._util.validation import check_options, validated
from howsmooth.engines.choice import load_of, open_engine
from howsmooth.engines.dispatch import Load, State, submit_all
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.models.in_memory import model_in_memory
from howsmooth.models.model_inputs import file_named, joined_texts, read_input
from howsmooth.models.network_parts import NetworkTargets
from howsmooth.models.open_source import twin_of
from howsmooth.models.own_networks import OwnNetwork, is_own, own_network, read_inputs, targets_at
from howsmooth.scans import units
from howsmooth.scans.cell_values import CellValues, check_fits, fitting, measure_batch
from howsmooth.scans.cost import predict
from howsmooth.scans.plan import (
    OF_SOFTMAX,
    CellBatch,
    ScanCell,
    ScanOptions,
    ScanProgress,
    Selection,
    make_plan,
    parse_lengths,
    parse_numbers,
    parse_what,
)
from howsmooth.scans.scan_result import Scan
from howsmooth.scans.scan_store import Identity, Store
from howsmooth.scans.units import Origin, Shard, Unit, note_shard, open_for, parse_shard, split


@dataclass(frozen=True)
class Prepared:
    """A scan before its first number.

    Attributes:
        model: the open one.
        plan: every batch.
        cut: length → the windows of the text.
        at_hand: (length, window) → the targets of windows that the model has read already.
        identity: the key of a store, with the settings that decide the numbers.
        notes: on the options.
    """

    model: OpenModel
    plan: list[CellBatch]
    cut: dict[int, list[Window]]
    at_hand: dict[tuple[int, int], Targets | NetworkTargets]
    identity: Identity
    notes: tuple[str, ...]


def prepare(model: Any, text: Any, options: ScanOptions) -> Prepared:
    """Open the model and cut the text; arguments as of `howsmooth.scan`."""
    settings, selections = options.settings, parse_what(options.what)
    layers = None if options.layers is None else parse_numbers(options.layers)
    common = None if options.lengths is None else parse_lengths(options.lengths)
    model = _opened(model, options, head=any(selection.what == "logits" for selection in selections))
    own, dataset, notes = isinstance(model, OwnNetwork), None, tuple[str, ...]()
    if text is not None and not isinstance(text, str | Path) and not own:
        dataset, text = joined_texts(text, options.column)
    elif options.column is not None:
        raise InvalidInput("a column is chosen from a dataset: leave it out for a text or a file.")
    if not dataset and not own:
        text, notes = file_named(text)
    name, content, digest = read_inputs(text) if own else read_input(text, model.modality)
    common = common or (model.usual_length(content),)
    needed = sorted({length for selection in selections for length in selection.lengths or common})
    cut = {length: model.windows(content, length, settings.windows, settings.seed) for length in needed}
    for length in needed:
        check_fits(model, length)
    with fitting(needed[0]):
        first = targets_at(model, cut[needed[0]][0])
        heads = _heads(first, selections)
    without = first.skipped
    plan = make_plan(selections, common, settings.windows, heads, layers, without)
    if without and any(selection.what in OF_SOFTMAX for selection in selections):
        notes = (*notes, f"{'; '.join(without.values())}: skipped")
    identity = Identity(
        model=_storable(model.name),
        model_sha256=model.sha256,
        precision=model.precision,
        text=_storable(dataset or name),
        text_sha256=digest,
        settings=settings,
        howsmooth=version("howsmooth"),
    )
    return Prepared(model, plan, cut, {(needed[0], 0): first}, identity, tuple(notes))


def _opened(model: Any, options: ScanOptions, head: bool) -> OpenModel:
    """The model to scan, whatever its source is."""
    device, dtype, device_map, tokenizer = options.device, options.dtype, options.device_map, options.tokenizer
    if is_own(model):
        if device_map is not None or tokenizer is not None:
            raise InvalidInput("a network of your own has no tokenizer and no device_map: leave them out.")
        return own_network(model).on(device).in_dtype(dtype)
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise InvalidInput("a tokenizer goes with a model in memory: one that is opened by name brings its own.")
        return open_model(str(model), head=head, device=device, dtype=dtype, device_map=device_map)
    if device_map is not None:
        raise InvalidInput("a device_map spreads a model that is opened by name: one in memory is where it is.")
    if not isinstance(model, OpenModel):
        return model_in_memory(model, tokenizer, head=head, device=device).in_dtype(dtype)
    if tokenizer is not None:
        raise InvalidInput("a tokenizer goes with a model in memory: one that is open has its own.")
    return model.on(device).in_dtype(dtype)


def _storable(name: str) -> str:
    """A name to show: of a file name that is not UTF-8, which SQLite does not take, the wrong bytes become �."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _heads(targets: Targets | NetworkTargets, selections: Sequence[Selection]) -> list[int]:
    """The number of heads of each layer; 0 where none is requested, so that any attention is accepted."""
    if any(selection.what == "head" for selection in selections):
        without = targets.skipped
        return [0 if layer in without else targets.site(layer).attention.heads for layer in range(targets.layers)]
    return [0] * targets.layers


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
        self.work, self.total_work = 0.0, sum(batch.work for batch in self.missing) or 1.0

    def measure_here(self) -> Outcome:
        """Measure every missing batch in this process. A window is read once; an error ends the scan."""
        with self._interruptible():
            for (length, index), group in groupby(self.missing, key=lambda batch: (batch.length, batch.window)):
                self._tell(f"n = {length}, window {index}: reading")
                window, batches = self.ready.cut[length][index], list(group)
                with fitting(length):
                    targets = self.ready.at_hand.pop((length, index), None) or targets_at(self.ready.model, window)
                    targets.read(maps=any(batch.what in OF_SOFTMAX for batch in batches))
                for batch in batches:
                    self._tell(_label(batch))
                    with fitting(length):
                        rows = measure_batch(targets, batch, self.ready.identity.settings)
                    self._add(window, rows)
                    self.work += batch.work
        self.work = self.total_work
        self._tell("done")
        return Outcome()

    def measure_on(self, executor: Executor, load: Load, timeout: float | None = None) -> Outcome:
        """Measure every missing batch on an executor, in units; a unit that fails twice is reported."""
        origin, settings, cut = Origin.of(self.ready.model), self.ready.identity.settings, self.ready.cut
        windows = [(cut[one[0].length][one[0].window], one) for one in split(self.missing, load.width)]
        every = [Unit(origin, window.ids.detach().cpu().numpy(), batches, settings) for window, batches in windows]
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
        work = min(1.0, self.work / self.total_work)
        self.report(ScanProgress(len(self.stored), len(self.requested), work, label))

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


_LONG = 200
"""Batches from which on the time of a scan by workers is predicted first: a dozen are measured for that."""


@validated
def scan(model: Any, text: Any = None, **options: Any) -> Scan:
    """Measure a model on a text: every cell of what × layers × heads × lengths × windows.

    Args:
        model: a named model, a folder of a model or of a PEFT adapter (also as a `Path`), a hub id, the result of
            `howsmooth.models.open_model`, or a model or pipeline of transformers in memory, also compiled or with a
            PEFT adapter: a copy is measured. Any other module of torch, an ONNX file, an exported program or
            ``module:attribute``: its blocks of attention, the layers that hold them, the whole.
        text: of a network of one's own its input, or several of one shape. Of a model the text itself, the path of a
            file (an image or .wav where the model reads such; also as a string, when
            there is a file of that name), a list of texts or a dataset of them, or None for Alice in Wonderland.
        options: see `howsmooth.scans.ScanOptions`: lengths, windows, layers, what, out, resume, rtol, seed, ….

    Returns:
        A `Scan` with the requested cells.

    >>> result = scan("random:bert[layers=2,width=32]", lengths=16, layers="0-1", what="head[heads=1],attention")
    >>> [(row["layer"], row["what"], row["lower"] <= row["value"] <= row["upper"]) for row in result.rows]
    [(0, 'attention', True), (0, 'head', True), (1, 'attention', True), (1, 'head', True)]
    """
    check_options(options, ["model", "text", *(option.name for option in fields(ScanOptions))], "scan")
    chosen = ScanOptions(**options)
    shard = None if chosen.shard is None else parse_shard(chosen.shard)
    ready = prepare(model, text, chosen)
    if chosen.reference is not None and isinstance(ready.model, OwnNetwork):
        raise InvalidInput("the reference with random weights is for models of transformers: leave it out.")
    twin = twin_of(ready.model) if chosen.reference == "random" else None
    scanned = _measured(ready, chosen, shard)
    if twin is None:
        return scanned
    as_opened = replace(chosen, tokenizer=None, device=None, dtype=None, device_map=None)
    other = _measured(prepare(twin, text, as_opened), chosen, shard)
    notes, failures = dict.fromkeys((*scanned.notes, *other.notes)), (*scanned.failures, *other.failures)
    return replace(Scan.joined([scanned, other]), notes=tuple(notes), failures=failures)


def _measured(ready: Prepared, options: ScanOptions, shard: Shard | None) -> Scan:
    """The cells of a prepared scan, or of a shard of it, from its store where they are in it."""
    identity, plan = ready.identity, ready.plan
    with Store.writing(MEMORY if options.out is None else options.out) as store:
        number = store.begin(identity, options.resume)
        part = None if shard is None else shard.of(plan)
        note_shard(store, number, part)
        report = options.progress or scan_bar() or (lambda progress: None)
        driver = ScanDriver(ready, plan if part is None else part.part(plan), store, number, report)
        outcome = _run(driver, options)
        if not outcome.failures:
            store.finish(number)
        found = Scan.of(store, number, driver.requested)
    return replace(found, notes=(*ready.model.notes, *ready.notes, *outcome.notes), failures=outcome.failures)


def _run(driver: ScanDriver, options: ScanOptions) -> Outcome:
    """Measure what is missing, in this process or by an engine; the time of long scans is predicted first."""
    engine, ready = options.engine, driver.ready
    if engine is None:
        return driver.measure_here()
    ready.at_hand.clear()
    with open_engine(engine) as workers:
        load = load_of(workers, options.jobs)
        long = len(driver.plan) >= _LONG and not driver.stored
        expected = predict(ready, driver.plan, load.width) if long else None
        outcome = driver.measure_on(workers, load, options.timeout)
    if expected is None:
        return outcome
    return replace(outcome, notes=(*outcome.notes, expected.against(outcome.seconds)))
