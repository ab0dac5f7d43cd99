"""The least smooth input of a set, by search: all starts side by side here, or each by itself on an executor.

`Search` climbs within a budget and stores the best in a file; `best_of_all` hands the starts to an executor, and the
best that is measured wins.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.display import search_bar
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import Count, Positive, Seed, Size, validated
from howsmooth.attention import AttentionMap
from howsmooth.engines import Engine, EngineError, open_engine, submit_all
from howsmooth.engines.choice import load_of
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.norms import Measurement
from howsmooth.search.ascent import MILESTONES, Ascent, Climb, Exchange, Peak, norm_at
from howsmooth.search.norm_gradient import AttentionRoughness, FunctionRoughness
from howsmooth.search.search_question import Progress, Question, Start, resolved, starts_for
from howsmooth.search.witness import Stopped, Witness
from howsmooth.sets import Tokens
from howsmooth.sets.near_sets import Over

_SAVE_EVERY = 2.0
_CONTENDERS, _MOST_CONTENDERS = 0.98, 4
"""Best points this near to the best of all are measured at the end, at most so many: a climb has lower bounds only."""
_LAST_STEPS = 20
"""After the last milestone a climb that brings nothing for so many steps, and an eighth of all, has settled."""
_UNMEASURED = "one direction of the climb"


@validated
@full_precision
def worst_case(
    f: Callable[[Tensor], Any],
    n: Count | None = None,
    *,
    over: Over | None = None,
    start: Tensor | Sequence[Tensor] | None = None,
    norm: float | str = 2,
    head: int | None = None,
    starts: Size = 8,
    constructions: bool = True,
    steps: Size = 200,
    seconds: Positive | None = None,
    seed: Seed = 0,
    save: str | os.PathLike[str] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    executor: Executor | Engine | None = None,
) -> Witness:
    r"""Look for the X in a set at which ‖J(X)‖ is largest; on a convex set the supremum is the Lipschitz constant.

    The search climbs from many starts at once by the gradient of ‖J(X)‖ through fixed singular vectors
    (`howsmooth.search.norm_gradient`), with the theorems' own inputs among the starts. Its result is a lower bound
    with a witness: no search can say that there is nothing worse. For the other end see `howsmooth.bounds.table`.

    Args:
        f: an attention map, a layer of `howsmooth.nn` or `torch.nn.MultiheadAttention`, or any function or module of x
            ``(n, d)`` that can be differentiated twice.
        n: number of tokens; may be left out when the set or a start says it.
        over: the set (`howsmooth.sets`): `Ball`, `Sphere`, `Normalised`, `Around`, `Box` or `Tokens`; a normalisation
            layer means its image. None is all of R^{n × d}, for Lipschitz maps.
        start: inputs of your own to set out from, ``(n, d)`` each (token ids, ``(n,)``, for `Tokens`); one that
            lies outside the set is brought into it, which the witness notes.
        norm: 2 or inf.
        head: one head of the map, with its own slice of the output projection.
        starts: number of random starts.
        constructions: False searches without the theorems' inputs.
        steps: most steps to make.
        seconds: most seconds to climb; the first and last measurements come on top.
        seed: of the random starts; the same seed gives the same witness, unless ``seconds`` cuts it short.
        save: a file that always holds the best witness so far, whole.
        source: how the map was made, stored in that file, so that it can be made again.
        progress: called after every step with the step, ``steps`` and the best value so far; with an executor, after
            every start with the starts that are done, all of them, and the best value. A notebook shows a bar without
            it.
        executor: any `concurrent.futures.Executor`, or a `howsmooth.engines.Engine` of one: every start then climbs by
            itself, to its own end, and none is left behind half way. It is the same witness for any number of workers.

    Returns:
        A `Witness`. Ctrl-C ends the search and returns the best so far.

    >>> import torch, howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> witness = worst_case(head, 8, over=hs.sets.Ball(8**0.5), starts=2, steps=20)
    >>> round(witness.value, 1), witness.start
    (16.1, 'two poles')
    """
    began = time.perf_counter()
    question = Question.of(
        f,
        n,
        over,
        norm,
        given=() if start is None else (start,) if isinstance(start, Tensor) else tuple(start),
        head=head,
        starts=starts,
        constructions=constructions,
        steps=steps,
        seconds=seconds,
        seed=seed,
        save=None if save is None else Path(save),
        source=dict(source or {}),
        progress=progress or search_bar(),
    )
    inputs, notes = starts_for(question)
    if executor is None:
        return Search(question, began, inputs, notes).run()
    return best_of_all(question, began, inputs, notes, executor)


class Search:
    """One search: the climb, its budget, and the file of its best witness."""

    def __init__(self, question: Question, began: float, starts: list[Start], notes: tuple[str, ...] = ()):
        self.question, self.save, self.began = question, question.save, began
        self.starts, self.notes = starts, notes
        self.stopped: Stopped = "steps"
        self.saved_at, self.unsaved = -math.inf, False

    def run(self) -> Witness:
        climb = self._climb()
        if self.save is not None and math.isfinite(climb.leader.value):
            self._interim(climb).save(self.save)  # a file that cannot be written is an error now, not after the search
        try:
            self._go(climb)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        peak, measurement = self._best(climb)
        measurement = replace(measurement, notes=(*measurement.notes, *self.notes))
        witness = self._witness(climb, peak, measurement, self.stopped)
        self._store(witness)
        return witness

    def _climb(self) -> Climb:
        f, over, norm, seed = self.question.f, self.question.over, self.question.norm, self.question.seed
        roughness = AttentionRoughness(f, norm) if isinstance(f, AttentionMap) else FunctionRoughness(f, norm)
        if isinstance(over, Tokens):
            return Exchange(roughness, over, self.starts, seed)
        return Ascent(roughness, over, self.starts, seed)

    def _go(self, climb: Climb) -> None:
        question, ahead, begun = self.question, list(MILESTONES), 0
        self.since = time.perf_counter()
        for step in range(question.steps):
            used = step / question.steps
            if question.seconds is not None:
                spent = time.perf_counter() - self.since
                if spent >= question.seconds:
                    self.stopped = "seconds"
                    return
                used = max(used, spent / question.seconds)
            if ahead and used >= ahead[0]:
                ahead = [share for share in ahead if share > used]
                climb.milestone()
                begun = step
            climb.step(used)
            due = time.perf_counter() - self.saved_at > _SAVE_EVERY
            if self.save is not None and due and math.isfinite(climb.leader.value):
                self._store(self._interim(climb))
            if question.progress is not None:
                question.progress(step + 1, question.steps, climb.leader.value)
            last = max(_LAST_STEPS, question.steps // 8)
            if not ahead and step - begun >= last and climb.settled(last):
                self.stopped = "settled"
                return

    def _best(self, climb: Climb) -> tuple[Peak, Measurement]:
        """The best point, measured; of several that come near to it the one that measures most."""
        question = self.question
        ranked = sorted((peak for peak in climb.everyone if math.isfinite(peak.value)), key=lambda peak: -peak.value)
        if not ranked:
            raise NotDifferentiable(
                "the Jacobian of f has NaN or infinite entries at every point that was tried (as sqrt has at 0): "
                "search another set, or smooth f."
            )
        ranked = [peak for peak in ranked if resolved(question.f, question.over.at(peak.z))]
        if not ranked:
            raise InvalidInput("every point that was found has logits beyond the resolution of float64: give a set.")
        near = [peak for peak in ranked if peak.value >= _CONTENDERS * ranked[0].value]
        best = ranked[0], self._unmeasured(climb, ranked[0])
        try:
            for peak in near[: 1 if self.stopped == "interrupted" else _MOST_CONTENDERS]:
                measured = norm_at(question.f, question.over.at(peak.z), question.norm)
                if best[1].method == _UNMEASURED or float(measured) > float(best[1]):
                    best = peak, measured
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        return best

    def _interim(self, climb: Climb) -> Witness:
        return self._witness(climb, climb.leader, self._unmeasured(climb, climb.leader), "running")

    def _unmeasured(self, climb: Climb, peak: Peak) -> Measurement:
        """The value of the climb itself: ‖Jv‖ for one v, which is a lower bound."""
        value = torch.tensor(peak.value, dtype=torch.float64)
        return Measurement(
            value=value,
            lower=value,
            upper=torch.full_like(value, math.inf),
            confidence=0.0,
            norm=self.question.norm,
            converged=torch.tensor(False),
            products=2 * len(climb.history),
            method=_UNMEASURED,
            dtype=torch.float64,
            seconds=time.perf_counter() - self.began,
            rounding=Guarantee.MEASURED,
        )

    def _witness(self, climb: Climb, peak: Peak, measurement: Measurement, stopped: Stopped) -> Witness:
        question = self.question
        return Witness(
            x=question.over.at(peak.z).detach(),
            value=float(measurement),
            measurement=measurement,
            norm=question.norm,
            head=question.head,
            over=question.over.describe(),
            start=peak.name,
            history=list(climb.history),
            seed=question.seed,
            steps=len(climb.history),
            seconds=time.perf_counter() - self.began,
            stopped=stopped,
            ids=peak.z if isinstance(question.over, Tokens) else None,
            source=question.source,
        )

    def _store(self, witness: Witness) -> None:
        """Save; a disk that fills up during the search costs the file, never the result."""
        if self.save is None:
            return
        self.saved_at = time.perf_counter()
        try:
            witness.save(self.save)
        except InvalidInput as error:
            if not self.unsaved:
                warnings.warn(f"the witness is not saved, only returned: {error}", UserWarning, stacklevel=4)
            self.unsaved = True


def best_of_all(
    question: Question, began: float, starts: list[Start], notes: tuple[str, ...], engine: Executor | Engine
) -> Witness:
    """The best witness of all starts, of equal ones the first; starts that could not be climbed are noted.

    The seconds of a search are shared out: those that one worker climbs one after the other have them together.
    """
    witnesses: dict[int, Witness] = {}
    interrupted = False

    def store(place: int, witness: Witness) -> None:
        witnesses[place] = witness
        best = _best(witnesses)
        if question.save is not None and best is witness:
            replace(best, stopped="running", source=question.source).save(question.save)
        if question.progress is not None:
            question.progress(len(witnesses), len(starts), best.value)

    failures = []
    with suppress(KeyboardInterrupt), open_engine(engine) as executor:
        interrupted = True
        load = load_of(executor)
        rounds = -(-len(starts) // load.width)
        seconds = None if question.seconds is None else question.seconds / rounds
        alone = replace(question, save=None, progress=None, source={}, given=(), seconds=seconds)  # for a worker
        failures = submit_all(executor, climb, [(alone, start) for start in starts], store, load=load)
        interrupted = False
    if not witnesses:
        if interrupted:
            raise KeyboardInterrupt
        raise EngineError(f"no start could be climbed, first {starts[0].name} ({failures[0].reasons[-1]}).")
    best = _best(witnesses)
    missing = tuple(f"the start {starts[one.place].name!r} was not climbed: {one.reasons[-1]}" for one in failures)
    witness = replace(
        best,
        measurement=replace(best.measurement, notes=(*best.measurement.notes, *notes, *missing)),
        seconds=time.perf_counter() - began,
        stopped="interrupted" if interrupted else best.stopped,
        source=question.source,
    )
    if question.save is not None:
        witness.save(question.save)
    return witness


def climb(item: tuple[Question, Start]) -> Witness:
    """The search from one start, in whatever process this runs."""
    question, start = item
    return Search(question, time.perf_counter(), [start]).run()


def _best(witnesses: dict[int, Witness]) -> Witness:
    return witnesses[max(witnesses, key=lambda place: (witnesses[place].value, -place))]
