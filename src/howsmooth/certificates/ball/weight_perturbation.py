"""Bounds on a row of attention weights whose query and keys move.

Row i on the ball is P ∝ P⁰e^{β+a} with the query's shift |β_j| ≤ B_j = ε_i|b_ij|, E_{P⁰}β = 0, and the keys' shift
|a_j| ≤ κ_i. If |log(P_j/P'_j)| ≤ η_j and M = ½(P + P'), then |Cov_P(u, z) − Cov_{P'}(u, z)| ≤ φ(Σ_j M_j z_j²)^½ with
φ = 2‖Σ_j M_j tanh²(η_j/2)(u_j − ū)(u_j − ū)ᵀ‖^½. The query's perturbation is one step, that of the keys several.

Proof: docs/theory/certificates-ball.md, section "Perturbed weights".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.bounds.own.neighbourhood import softmax_ceiling
from howsmooth.bounds.own.three_path import TINY, root
from howsmooth.bounds.three_paths import LEAST

STEPS = 3
"""Of the tilt by the keys."""
_LEAST_SHARE = 1e-6
"""ϑ stays between this and its inverse."""
_SLACK = 2.0**-50
"""What 1 − p may have lost, for p up to 1; the ends of weights are moved apart by as much."""

Moment = Callable[[Tensor], Tensor]
"""‖Σ_j w_ij a_ij a_ijᵀ‖ for weights ``(g, n, n)``, from above, ``(g, n)``."""


@dataclass(frozen=True)
class Step:
    """One step of the tilt: M from above ``(g, n, n)``, and φ/2 of the values under it, ``(g, n)``.

    In every direction φ/2 is at most the root of the second moment of the values under ``loads``, ``(g, n, n)``.
    """

    mixed: Tensor
    factor: Tensor
    loads: Tensor


@dataclass(frozen=True)
class Tilts:
    """Rows of weights on a ball.

    Attributes:
        scores: ``(g, n, n)``. weights: P⁰ from above, as `howsmooth.bounds.three_paths.Paths.upper_weights`.
        off: what rounding may have done to the logits, up to a shift of a row, ``(g, n, 1)``.
        own: B_ij. keys: |a_ij| from above. lean: ε_iα⁰_i, the deviation of β at the input, from above, ``(g, n)``.
    """

    scores: Tensor
    weights: Tensor
    off: Tensor
    own: Tensor
    keys: Tensor
    lean: Tensor

    @cached_property
    def most(self) -> Tensor:
        """max_j B_ij, ``(g, n)``."""
        return self.own.masked_fill(self.scores == -torch.inf, 0.0).amax(-1)

    @cached_property
    def tilt(self) -> Tensor:
        """κ_i, ``(g, n)``."""
        return self.keys.masked_fill(self.scores == -torch.inf, 0.0).amax(-1)

    @cached_property
    def shift(self) -> Tensor:
        """≥ log E e^β, ``(g, n)``."""
        return torch.log1p(0.5 * self.lean.square() * torch.exp(self.most))

    def high(self, share: float = 1.0) -> Tensor:
        """The largest weights under the query's own tilt and a share of that of the keys."""
        box = softmax_ceiling(self.scores, self.own + share * self.keys + self.off)
        own = (self.weights * torch.exp(self.own)).clamp_max(1.0)
        less = torch.exp(-2 * share * self.tilt)[..., None]
        most = torch.fmin(box, own / (own + (1 - own) * less).clamp_min(TINY))
        return (most * (1 + _SLACK)).clamp_max(1.0)

    def low(self, share: float = 1.0) -> Tensor:
        """The smallest."""
        box = softmax_ceiling(self.scores, -self.own - share * self.keys - self.off)
        least = (self.weights * torch.exp(-2 * self.off) - LEAST).clamp_min(0.0)
        own = least * torch.exp(-self.own - self.shift[..., None])
        more = torch.exp(2 * share * self.tilt)[..., None]
        return torch.fmax(box, own / (own + (1 - own + _SLACK) * more)) * (1 - _SLACK)

    def own_move(self, deviation: Tensor) -> Tensor:
        """How far a mean of this deviation at the input moves by the query's own tilt."""
        return deviation * self.lean * exponential_mean(self.most)

    @cached_property
    def mixed(self) -> Tensor:
        """M of the query's own tilt, from above."""
        return 0.5 * (self.weights + self.high(0.0))

    def own_step(self, moment: Moment, drift: Tensor, twisted: Tensor) -> Step:
        """The query's own tilt, for values whose mean moves by at most ``drift``.

        ``twisted`` is at least the norm of [M^½β(u − ū)], ``(g, n)``; ∞ where it is not known.
        """
        mixed, whole = self.mixed, moment(self.mixed).sqrt()
        ratio = torch.tanh(0.5 * (self.own + self.shift[..., None])).square() * mixed
        most = torch.tanh(0.5 * (self.most + self.shift))
        mass, inner = ratio.sum(-1), root(moment(ratio))
        plain, sharper = most * whole, inner + 0.5 * drift * root(mass)
        away = 0.5 * self.own_move(root(mass))  # |ū − o| in a direction ÷ the deviation of the values there
        share = (away * root(moment(self.weights)) / inner).clamp(_LEAST_SHARE, 1 / _LEAST_SHARE)
        about_own = (1 + share)[..., None] * ratio + ((1 + 1 / share) * away.square())[..., None] * self.weights
        loads = torch.where((sharper < plain)[..., None], about_own, mixed * most.square()[..., None])
        return Step(mixed, torch.minimum(torch.minimum(plain, sharper), 0.5 * (twisted + self.shift * whole)), loads)

    def key_steps(self, moment: Moment) -> list[Step]:
        """The tilt by the keys."""
        ends, factor = [self.high(step / STEPS) for step in range(STEPS + 1)], torch.tanh(self.tilt / STEPS)
        mixtures = [0.5 * (before + after) for before, after in pairwise(ends)]
        loads = factor.square()[..., None]
        return [Step(mixed, factor * moment(mixed).sqrt(), mixed * loads) for mixed in mixtures]


def exponential_mean(most: Tensor) -> Tensor:
    """(e^x − 1)/x, the mean of e^t for t from 0 to x."""
    return torch.expm1(most.clamp_min(TINY)) / most.clamp_min(TINY)
