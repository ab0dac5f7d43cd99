"""From a model and a text to measured cells, kept one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from howsmooth._util.display import scan_bar
from howsmooth._util.validation import Device, check_count, check_options, check_positive, keywords, validated
from howsmooth.engines import Engine, load_of, open_engine
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window
from howsmooth.models.open_source import DeviceMap, Dtype, twin_of
from howsmooth.scans.cell_values import measure_batch
from howsmooth.scans.cost import predict
from howsmooth.scans.memory_checks import fitting
from howsmooth.scans.plan import Batch, Settings
from howsmooth.scans.prepare import prepare
from howsmooth.scans.scan_grammar import Numbers as Places
from howsmooth.scans.scan_result import Scan
from howsmooth.scans.scan_store import MEMORY, Store
from howsmooth.scans.shards import note_shard, parse_shard
from howsmooth.scans.units import run_units

_LONG = 200
"""Batches from which on a scan by workers is predicted first, and at its end compared: a dozen are tried for that."""


@dataclass(frozen=True)
class Progress:
    """How far a scan is: cells kept, cells asked for, and what is measured next; ``work`` weighs cells by length."""

    cells: int
    total: int
    work: float
    label: str


@validated
def scan(
    model: Any,
    text: Any = None,
    *,
    lengths: Places | None = None,
    windows: int = 1,
    layers: Places | None = None,
    what: str | Sequence[str] = "head",
    out: Path | str | None = None,
    resume: bool = True,
    tokenizer: Any = None,
    device: Device | None = None,
    dtype: Dtype | None = None,
    device_map: DeviceMap | None = None,
    column: str | None = None,
    reference: Literal["random"] | None = None,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | Engine | None = None,
    jobs: int | None = None,
    timeout: float | None = 3600.0,
    shard: str | None = None,
    **settings: Any,
) -> Scan:
    """Measure a model on a text: every cell of what × layers × heads × lengths × windows.

    Args:
        model: a named model, a folder of a model or of a PEFT adapter (also as a `Path`), a hub id, what
            `howsmooth.models.open_model` gives, or a model or pipeline of transformers in memory, also compiled or with
            a PEFT adapter: a copy is measured.
        text: the text itself, the path of a file (an image or .wav where the model reads such; also as a string, when
            there is a file of that name), a list of texts or a dataset of them, or None for Alice in Wonderland.
        lengths: numbers of tokens, special ones included: 128 (the default), [64, 128] or "8,16,…,512".
        windows: how many windows of each length are cut from the text.
        layers: "0,2-4" or a list; None for all.
        what: "head", "attention", "residual", "mlp", "layer", "prefix", "model" or "logits", one or several, each with
            an optional choice: "head[layers=0-5,heads=3]".
        out: a store file, in which a stopped scan is taken up again; None to keep nothing.
        resume: keep what the store has of this scan; otherwise measure it anew.
        tokenizer: of a model in memory, where transformers does not find it by the model's name.
        device: where to measure, for example "cuda"; by default where the model is.
        dtype: "auto" (weights as they are stored, computed upon in float32), "float64" for the arithmetic, or
            "bfloat16" or "float16" to round the weights first.
        device_map: of a model that is opened by name: handed to ``from_pretrained`` of transformers ("auto", or module
            → device), which needs accelerate. What is measured must not be offloaded.
        column: which column of a dataset, "text" unless it is said.
        reference: "random" to measure the same architecture with random weights as well, in the same store: what
            training has changed. Its rows are those of MODEL@random, and a report shows them beside the others.
        progress: called before every batch and at the end; with workers, whenever one has answered. A notebook shows a
            bar without it.
        executor: any `concurrent.futures.Executor` that measures instead of this process, which alone writes; or a
            `howsmooth.engines.Engine` of one.
        jobs: how many units are measured at a time; without an executor, by as many processes (1: by this one).
        timeout: seconds after which a unit is given up with its worker; not in this process.
        shard: "i/N" for part i of N of this scan, in a store of its own, or "slurm" for that of a task of a job array;
            `howsmooth.scans.merge_stores` joins them.
        settings: rtol, confidence, seed, explain, bounds: see `howsmooth.scans.Settings`.

    Returns:
        A `Scan` with the cells asked for.

    >>> result = scan("random:bert[layers=2,width=32]", lengths=16, layers="0-1", what="head[heads=1],attention")
    >>> [(row["layer"], row["what"], row["lower"] <= row["value"] <= row["upper"]) for row in result.rows]
    [(0, 'attention', True), (0, 'head', True), (1, 'attention', True), (1, 'head', True)]
    """
    check_options(settings, [*(option.name for option in fields(Settings)), *keywords(scan)], "scan")
    if out is not None and (not str(out).strip() or str(out) == MEMORY or str(out).startswith("file:")):
        raise InvalidInput(f"out is the name of a file, got {str(out)!r}: leave it out to keep nothing.")
    this_shard = None if shard is None else parse_shard(shard)
    if timeout is not None:
        check_positive(timeout, "timeout")
    if executor is None and jobs is not None and check_count(jobs, "jobs", most=1024) > 1:
        executor = Engine(jobs=jobs)
    wanted = Settings(windows=windows, **settings)
    where: dict[str, Any] = {"device": device, "dtype": dtype, "device_map": device_map, "column": column}
    ready = prepare(model, text, lengths, layers, what, wanted, tokenizer=tokenizer, **where)
    model, plan, cut, chosen, said = ready.model, ready.plan, ready.cut, ready.settings, ready.said
    identity = ready.identity
    beside = twin_of(model) if reference == "random" else None
    with Store.writing(MEMORY if out is None else out) as store:
        number = store.begin(identity, resume)
        part = None if this_shard is None else this_shard.of(plan, identity.model_sha256, identity.text_sha256)
        note_shard(store, number, part)
        plan = plan if part is None else part.part(plan)
        at_hand = ready.at_hand
        tell = progress or scan_bar() or (lambda now: None)
        failures: tuple[str, ...] = ()
        if executor is None:
            run(model, plan, cut, at_hand, chosen, store, number, tell)
        else:
            at_hand.clear()
            with open_engine(executor) as workers:
                show = lambda *now: tell(Progress(*now))  # noqa: E731
                load = load_of(workers, jobs)
                long = len(plan) >= _LONG and not store.cells(number)
                expected = predict(model, plan, cut, chosen, load.width) if long else None
                done = run_units(workers, model, plan, cut, chosen, store, number, show, load, timeout)
            failures = done.failures
            compared = () if expected is None else (expected.against(done.seconds),)
            said = (*said, *(f"tried again: {unit}" for unit in done.again), *compared)
        asked = {cell for batch in plan for cell in batch.cells()}
        if not failures:
            store.finish(number)
        scanned = replace(Scan.of(store, number, asked), notes=(*model.notes, *said), failures=failures)
    if beside is None:
        return scanned
    same: dict[str, Any] = {"lengths": lengths, "windows": windows, "layers": layers, "what": what, "out": out}
    same |= {"resume": resume, "progress": progress, "executor": executor, "jobs": jobs, "timeout": timeout}
    other = scan(beside, text, column=column, shard=shard, **same, **settings)
    notes, failed = (*scanned.notes, *other.notes), (*scanned.failures, *other.failures)
    return replace(Scan.joined([scanned, other]), notes=tuple(dict.fromkeys(notes)), failures=failed)


def run(
    model: OpenModel,
    plan: Sequence[Batch],
    cut: dict[int, list[Window]],
    at_hand: dict[tuple[int, int], Targets],
    settings: Settings,
    store: Store,
    number: int,
    progress: Callable[[Progress], None],
) -> None:
    """Measure every batch of which a cell is missing, and keep it before the next begins.

    What the model did in a window is asked once: ``at_hand`` has the windows it has read, and gives them up.
    """
    asked = {cell for batch in plan for cell in batch.cells()}
    kept = asked & store.cells(number)
    missing = [batch for batch in plan if not kept.issuperset(batch.cells())]
    work, all_work = 0.0, sum(batch.work for batch in missing) or 1.0

    def tell(label: str) -> None:
        progress(Progress(len(kept), len(asked), work / all_work, label))

    try:
        for (length, index), batches in groupby(missing, key=lambda batch: (batch.length, batch.window)):
            tell(f"n = {length}, window {index}: reading")
            window, of_window = cut[length][index], list(batches)
            with fitting(length):
                targets = at_hand.pop((length, index), None) or Targets(model, window)
                targets.read(maps=any(batch.what in ("head", "attention") for batch in of_window))
            for batch in of_window:
                tell(_label(batch))
                with fitting(length):
                    measured = measure_batch(targets, batch, settings)
                store.add(number, window.start, window.tokens, measured)
                kept.update(batch.cells())
                work += batch.work
    except KeyboardInterrupt:
        kept = asked & store.cells(number)  # the last batch may have been kept a moment ago
        tell("interrupted")
        raise
    work = all_work
    tell("done")


def _label(batch: Batch) -> str:
    where = "" if batch.layer is None else f" of layer {batch.layer}"
    return f"n = {batch.length}, window {batch.window}: {'heads' if batch.what == 'head' else batch.what}{where}"
