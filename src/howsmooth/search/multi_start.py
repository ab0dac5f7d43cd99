"""One search: all its starts side by side in this process, within a budget, the best stored in a file."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace

import torch

from howsmooth._util.guarantee import Guarantee
from howsmooth.attention import AttentionMap
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.norms import Measurement
from howsmooth.search.ascent import MILESTONES, Ascent, Climb, Peak
from howsmooth.search.initial_vectors import norm_at
from howsmooth.search.norm_gradient import AttentionRoughness, FunctionRoughness
from howsmooth.search.search_question import Question, resolved
from howsmooth.search.start_inputs import Start
from howsmooth.search.token_exchange import Exchange
from howsmooth.search.witness import Stopped, Witness
from howsmooth.sets import Tokens

_SAVE_EVERY = 2.0
_CONTENDERS, _MOST_CONTENDERS = 0.98, 4
"""Best points this near to the best of all are measured at the end, at most so many: a climb has lower bounds only."""
_LAST_STEPS = 20
"""After the last milestone a climb that brings nothing for so many steps, and an eighth of all, has settled."""
_UNMEASURED = "one direction of the climb"


class Search:
    """One search: the climb, its budget, and the file of its best witness."""

    def __init__(self, question: Question, began: float, starts: list[Start], notes: tuple[str, ...] = ()):
        self.asked, self.save, self.began = question, question.save, began
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
        if self.save is not None:
            self._keep(witness)
        return witness

    def _climb(self) -> Climb:
        f, over, norm, seed = self.asked.f, self.asked.over, self.asked.norm, self.asked.seed
        roughness = AttentionRoughness(f, norm) if isinstance(f, AttentionMap) else FunctionRoughness(f, norm)
        if isinstance(over, Tokens):
            return Exchange(roughness, over, self.starts, seed)
        return Ascent(roughness, over, self.starts, seed)

    def _go(self, climb: Climb) -> None:
        asked, ahead, begun = self.asked, list(MILESTONES), 0
        self.since = time.perf_counter()
        for step in range(asked.steps):
            used = step / asked.steps
            if asked.seconds is not None:
                spent = time.perf_counter() - self.since
                if spent >= asked.seconds:
                    self.stopped = "seconds"
                    return
                used = max(used, spent / asked.seconds)
            if ahead and used >= ahead[0]:
                ahead = [share for share in ahead if share > used]
                climb.milestone()
                begun = step
            climb.step(used)
            due = time.perf_counter() - self.saved_at > _SAVE_EVERY
            if self.save is not None and due and math.isfinite(climb.leader.value):
                self._keep(self._interim(climb))
            if asked.progress is not None:
                asked.progress(step + 1, asked.steps, climb.leader.value)
            last = max(_LAST_STEPS, asked.steps // 8)
            if not ahead and step - begun >= last and climb.settled(last):
                self.stopped = "settled"
                return

    def _best(self, climb: Climb) -> tuple[Peak, Measurement]:
        """The best point, measured; of several that come near to it the one that measures most."""
        asked = self.asked
        ranked = sorted((peak for peak in climb.everyone if math.isfinite(peak.value)), key=lambda peak: -peak.value)
        if not ranked:
            raise NotDifferentiable(
                "the Jacobian of f has NaN or infinite entries at every point that was tried (as sqrt has at 0): "
                "search another set, or smooth f."
            )
        ranked = [peak for peak in ranked if resolved(asked.f, asked.over.at(peak.z))]
        if not ranked:
            raise InvalidInput("every point that was found has logits beyond the resolution of float64: give a set.")
        near = [peak for peak in ranked if peak.value >= _CONTENDERS * ranked[0].value]
        best = ranked[0], self._unmeasured(climb, ranked[0])
        try:
            for peak in near[: 1 if self.stopped == "interrupted" else _MOST_CONTENDERS]:
                measured = norm_at(asked.f, asked.over.at(peak.z), asked.norm)
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
            norm=self.asked.norm,
            converged=torch.tensor(False),
            products=2 * len(climb.history),
            method=_UNMEASURED,
            dtype=torch.float64,
            seconds=time.perf_counter() - self.began,
            rounding=Guarantee.MEASURED,
        )

    def _witness(self, climb: Climb, peak: Peak, measurement: Measurement, stopped: Stopped) -> Witness:
        asked = self.asked
        return Witness(
            x=asked.over.at(peak.z).detach(),
            value=float(measurement),
            measurement=measurement,
            norm=asked.norm,
            head=asked.head,
            over=asked.over.describe(),
            start=peak.name,
            history=list(climb.history),
            seed=asked.seed,
            steps=len(climb.history),
            seconds=time.perf_counter() - self.began,
            stopped=stopped,
            ids=peak.z if isinstance(asked.over, Tokens) else None,
            source=asked.source,
        )

    def _keep(self, witness: Witness) -> None:
        """Save; a disk that fills up during the search costs the file, never the result."""
        assert self.save is not None
        self.saved_at = time.perf_counter()
        try:
            witness.save(self.save)
        except InvalidInput as error:
            if not self.unsaved:
                warnings.warn(f"the witness is not saved, only returned: {error}", UserWarning, stacklevel=4)
            self.unsaved = True
