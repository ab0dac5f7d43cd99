"""From a model and a text to measured cells, stored one batch at a time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from howsmooth._util.display import scan_bar
from howsmooth._util.sqlite_files import MEMORY
from howsmooth._util.validation import check_options, validated
from howsmooth.engines.choice import load_of, open_engine
from howsmooth.models.open_source import twin_of
from howsmooth.scans.cost import predict
from howsmooth.scans.driver import Outcome, ScanDriver
from howsmooth.scans.prepare import Prepared, prepare
from howsmooth.scans.scan_options import ScanOptions
from howsmooth.scans.scan_result import Scan
from howsmooth.scans.scan_store import Store
from howsmooth.scans.shards import Shard, note_shard, parse_shard

_LONG = 200
"""Batches from which on the time of a scan by workers is predicted first: a dozen are measured for that."""


@validated
def scan(model: Any, text: Any = None, **options: Any) -> Scan:
    """Measure a model on a text: every cell of what × layers × heads × lengths × windows.

    Args:
        model: a named model, a folder of a model or of a PEFT adapter (also as a `Path`), a hub id, the result of
            `howsmooth.models.open_model`, or a model or pipeline of transformers in memory, also compiled or with a
            PEFT adapter: a copy is measured.
        text: the text itself, the path of a file (an image or .wav where the model reads such; also as a string, when
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
        part = None if shard is None else shard.of(plan, identity.model_sha256, identity.text_sha256)
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
        expected = predict(ready.model, driver.plan, ready.cut, ready.settings, load.width) if long else None
        outcome = driver.measure_on(workers, load, options.timeout)
    if expected is None:
        return outcome
    return replace(outcome, notes=(*outcome.notes, expected.against(outcome.seconds)))
