r"""Gradient ascent on ‖J(X)‖ from many starts side by side.

Each token takes a step of Adam with one second moment for the whole token, which turns with the coordinates, of a
length that falls along a cosine:

.. math:: z_i \leftarrow \Pi\Big(z_i + \eta_t\,\frac{\hat m_i}{\hat s_i^{1/2}}\Big), \qquad
          m_i \leftarrow \beta_1m_i + (1-\beta_1)g_i, \quad s_i \leftarrow \beta_2s_i + (1-\beta_2)|g_i|^2,

with Π the way back into the set; on a sphere g and m are first cut to the tangent plane. The singular vectors follow by
one step of the power method per step. At a few milestones they are found anew, since a power method that follows one
singular vector does not see another overtake it, and the worse half of the starts is left behind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth.search.initial_vectors import first_vectors
from howsmooth.search.norm_gradient import Roughness
from howsmooth.search.start_inputs import Start
from howsmooth.sets import InputSet

RATE, LAST_RATE = 0.2, 0.01
"""First and last length of a token's step, in units of `InputSet.stride`."""
MILESTONES = (0.25, 0.5, 0.75)
FEWEST = 2
"""Starts that are never left behind, so that one that falls back does not end the search."""
FALLEN, SHORTER = 0.9, 0.3
"""A start that is below this share of its own best at a milestone goes on from there with steps shorter by this."""
SETTLED = 1e-7
"""Relative gain below which steps brought nothing."""
_FIRST, _SECOND = 0.9, 0.99
_JITTER = 1e-3
_TINY = 1e-140
"""Gradients of log ‖J‖ below this are nothing: their squares underflow."""


@dataclass(frozen=True)
class Peak:
    """The best point of one start: its coordinates, a true lower bound on ‖J‖ there, and the start's name."""

    z: Tensor
    value: float
    name: str


class Climb(ABC):
    """The starts of one search, and the best each has met; `step` by `step`, so that its owner may stop at any time.

    The best points are replaced, never written into: after an interrupt at any moment they are whole.
    """

    def __init__(self, points: Tensor, values: Tensor, starts: list[Start]):
        tried = zip(points, values.tolist(), starts, strict=True)
        self.best = [Peak(z.clone(), value, start.name) for z, value, start in tried]
        self.retired: list[Peak] = []
        self.history: list[float] = []

    @abstractmethod
    def step(self, progress: float) -> None:
        """One step of every start; ``progress`` in [0, 1] is how much of the budget is used up."""

    @abstractmethod
    def milestone(self) -> None:
        """Go on with the better half of the starts."""

    @property
    def everyone(self) -> list[Peak]:
        """The best point of every start."""
        return [*self.best, *self.retired]

    @property
    def leader(self) -> Peak:
        """The best point so far."""
        return max(self.everyone, key=lambda peak: peak.value)

    def settled(self, steps: int) -> bool:
        """Whether the last steps brought next to nothing."""
        return len(self.history) > steps and self.history[-1] <= self.history[-1 - steps] * (1 + SETTLED)

    def better_half(self) -> list[int]:
        """Leave the worse half of the starts behind; the places of the others among all."""
        order = sorted(range(len(self.best)), key=lambda i: -self.best[i].value)
        kept = sorted(order[: max(FEWEST, (len(order) + 1) // 2)])
        self.retired += [self.best[i] for i in order if i not in kept]
        self.best = [self.best[i] for i in kept]
        return kept


class Ascent(Climb):
    """Gradient ascent in the coordinates of a set."""

    def __init__(self, roughness: Roughness, over: InputSet, starts: list[Start], seed: int):
        self.roughness, self.over = roughness, over
        self.z = over.restrict_(over.coordinates(torch.stack([start.x for start in starts])))
        values, self.vectors = first_vectors(over.at(self.z), roughness)
        super().__init__(self.z, values, starts)
        self.stride = over.stride(self.z)
        self.fallen = [False] * len(starts)
        self._shake([i for i, start in enumerate(starts) if start.exact], seed)
        self.first: Tensor
        self.second: Tensor
        self.count = 0
        self._rest()

    def step(self, progress: float) -> None:
        slope = self.roughness.slope(self.over.at(self.z), self.vectors)
        values = slope.value.tolist()
        self.best = [
            Peak(self.z[i].clone(), value, peak.name) if value > peak.value else peak
            for i, (value, peak) in enumerate(zip(values, self.best, strict=True))
        ]
        self.history.append(self.leader.value)
        self.fallen = [value < FALLEN * peak.value for value, peak in zip(values, self.best, strict=True)]
        rate = LAST_RATE + (RATE - LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self.vectors = slope.vectors
        self._move(slope.gradient / slope.value.clamp(min=_TINY)[:, None, None], rate)

    def milestone(self) -> None:
        """Go on with the better half, from their best points, with vectors found anew."""
        kept = self.better_half()
        self.stride = torch.stack([self.stride[i] * (SHORTER if self.fallen[i] else 1.0) for i in kept])
        self.z = torch.stack([peak.z for peak in self.best])
        values, self.vectors = first_vectors(self.over.at(self.z), self.roughness)
        pairs = zip(self.best, values.tolist(), strict=True)
        self.best = [Peak(peak.z, max(peak.value, value), peak.name) for peak, value in pairs]
        self._rest()

    def _move(self, gradient: Tensor, rate: float) -> None:
        over = self.over
        g = over.tangent(self.z, over.pull(gradient).nan_to_num(0.0, 0.0, 0.0))
        self.count += 1
        self.first = _FIRST * over.tangent(self.z, self.first) + (1 - _FIRST) * g
        self.second = _SECOND * self.second + (1 - _SECOND) * g.square().sum(-1, keepdim=True)
        mean, square = self.first / (1 - _FIRST**self.count), self.second / (1 - _SECOND**self.count)
        self.z = over.restrict_(self.z + rate * self.stride * mean / square.sqrt().clamp(min=_TINY))

    def _rest(self) -> None:
        self.first, self.second, self.count = torch.zeros_like(self.z), torch.zeros_like(self.z[..., :1]), 0

    def _shake(self, exact: list[int], seed: int) -> None:
        """Move constructions a little, since equal tokens have equal gradients and would stay equal."""
        noise = torch.randn(self.z.shape, generator=random_stream(seed, "shaken constructions"), dtype=self.z.dtype)
        noise = noise / noise.norm(dim=-1, keepdim=True)
        self.z = self.z.clone()
        self.z[exact] += _JITTER * self.stride[exact] * noise[exact]
        self.z = self.over.restrict_(self.z)
