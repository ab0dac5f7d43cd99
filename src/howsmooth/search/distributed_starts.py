"""The starts of a search on any executor: each climbs by itself, and the best that is measured wins."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace

from howsmooth.engines import Engine, EngineError, open_engine, submit_all
from howsmooth.engines.choice import load_of
from howsmooth.search.multi_start import Search
from howsmooth.search.search_question import Question
from howsmooth.search.start_inputs import Start
from howsmooth.search.witness import Witness


def best_of_all(
    asked: Question, began: float, starts: list[Start], notes: tuple[str, ...], engine: Executor | Engine
) -> Witness:
    """The best witness of all starts, of equal ones the first; what could not be climbed is noted.

    The seconds of a search are shared out: those that one worker climbs one after the other have them together.
    """
    witnesses: dict[int, Witness] = {}
    interrupted = False

    def keep(place: int, witness: Witness) -> None:
        witnesses[place] = witness
        best = _best(witnesses)
        if asked.save is not None and best is witness:
            replace(best, stopped="running", source=asked.source).save(asked.save)
        if asked.progress is not None:
            asked.progress(len(witnesses), len(starts), best.value)

    failures = []
    with suppress(KeyboardInterrupt), open_engine(engine) as executor:
        interrupted = True
        load = load_of(executor)
        rounds = -(-len(starts) // load.width)
        seconds = None if asked.seconds is None else asked.seconds / rounds
        alone = replace(asked, save=None, progress=None, source={}, given=(), seconds=seconds)  # for a worker
        failures = submit_all(executor, climb, [(alone, start) for start in starts], keep, load=load)
        interrupted = False
    if not witnesses:
        if interrupted:
            raise KeyboardInterrupt
        raise EngineError(f"no start could be climbed, first {starts[0].name} ({failures[0].reasons[-1]}).")
    best = _best(witnesses)
    said = tuple(f"the start {starts[one.place].name!r} was not climbed: {one.reasons[-1]}" for one in failures)
    witness = replace(
        best,
        measurement=replace(best.measurement, notes=(*best.measurement.notes, *notes, *said)),
        seconds=time.perf_counter() - began,
        stopped="interrupted" if interrupted else best.stopped,
        source=asked.source,
    )
    if asked.save is not None:
        witness.save(asked.save)
    return witness


def climb(item: tuple[Question, Start]) -> Witness:
    """The search from one start, in whatever process this runs."""
    asked, start = item
    return Search(asked, time.perf_counter(), [start]).run()


def _best(witnesses: dict[int, Witness]) -> Witness:
    return witnesses[max(witnesses, key=lambda place: (witnesses[place].value, -place))]
