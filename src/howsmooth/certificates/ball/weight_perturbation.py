"""Bounds on a row of attention weights whose query and keys move.

Row i on the ball is P ∝ P⁰e^{β+a} with the query's shift |β_j| ≤ B_j = ε_i|b_ij|, E_{P⁰}β = 0, and the keys' shift
|a_j| ≤ κ_i. If |log(P_j/P'_j)| ≤ η_j and M = ½(P + P'), then |Cov_P(u, z) − Cov_{P'}(u, z)| ≤ φ(Σ_j M_j z_j²)^½ with
φ = 2‖Σ_j M_j tanh²(η_j/2)(u_j − ū)(u_j − ū)ᵀ‖^½. The query's perturbation is one step, that of the keys several.

With R ∝ P_l, l ≠ s, the mean m = E_R v⁰ of all tokens but s moves by Δm = Σ_l (R⁰_l e^{B'_l})^½ (v⁰_l − c) ξ_l,
|ξ| ≤ ρ_i + sinh κ_i, for every point c: the distances of the remaining tokens from each other count, not those from s.

Proof: docs/theory/certificates-ball.md, sections "Perturbed weights" and "Leave-one-out means".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.bounds.point_bounds import TINY, root
from howsmooth.bounds.three_paths import LEAST, Paths
from howsmooth.numerics.roundoff import gamma

KEY_STEPS = 3
"""Steps of the perturbation by the keys."""
_MIN_SHARE = 1e-6
"""ϑ lies between this and its inverse."""
_SLACK = 2.0**-50
"""Bound on the rounding error of 1 − p for p up to 1; bounds on weights are moved apart by as much."""
MIN_REMAINDER = 1e-100
"""One minus a weight counts as zero below this, so that quotients are finite."""

Moment = Callable[[Tensor], Tensor]
"""≥ ‖Σ_j w_ij a_ij a_ijᵀ‖ for weights ``(g, n, n)``, ``(g, n)``."""
KeyMoment = Callable[[Tensor, Tensor, Tensor], Tensor]
"""≥ ‖Σ_j w_ij b_ij b_ijᵀ‖, ``(g, n)``, for weights and keys about centres with rounding errors up to a radius."""


@dataclass(frozen=True)
class PerturbationStep:
    """One step of the perturbation.

    Attributes:
        mixture: ≥ M ``(g, n, n)``. factor: ≥ φ/2 of the values under M, ``(g, n)``.
        loads: weights under which the second moment of the values is at least (φ/2)² in every direction, ``(g, n, n)``.
    """

    mixture: Tensor
    factor: Tensor
    loads: Tensor


@dataclass(frozen=True)
class WeightPerturbation:
    """Rows of weights on a ball.

    Attributes:
        scores: ``(g, n, n)``. weights: ≥ P⁰, as `howsmooth.bounds.three_paths.Paths.upper_weights`.
        logit_error: bound on the rounding error of the logits, up to a shift of a row, ``(g, n, 1)``.
        query_shifts: B_ij. key_shifts: ≥ |a_ij|.
        query_deviation: ≥ ε_iα⁰_i, the deviation of β at the input, ``(g, n)``.
    """

    scores: Tensor
    weights: Tensor
    logit_error: Tensor
    query_shifts: Tensor
    key_shifts: Tensor
    query_deviation: Tensor

    @cached_property
    def max_query_shift(self) -> Tensor:
        """max_j B_ij, ``(g, n)``."""
        return self._row_maximum(self.query_shifts)

    @cached_property
    def max_key_shift(self) -> Tensor:
        """κ_i, ``(g, n)``."""
        return self._row_maximum(self.key_shifts)

    def _row_maximum(self, shifts: Tensor) -> Tensor:
        return shifts.masked_fill(self.scores == -torch.inf, 0.0).amax(-1)

    @cached_property
    def log_mean(self) -> Tensor:
        """≥ log E e^β, ``(g, n)``."""
        return torch.log1p(0.5 * self.query_deviation.square() * torch.exp(self.max_query_shift))

    def upper(self, share: float = 1.0) -> Tensor:
        """The largest weights under the query's perturbation and a share of that of the keys."""
        box = softmax_ceiling(self.scores, self.query_shifts + share * self.key_shifts + self.logit_error)
        by_query = (self.weights * torch.exp(self.query_shifts)).clamp_max(1.0)
        others = (1 - by_query) * torch.exp(-2 * share * self.max_key_shift)[..., None]
        upper = torch.fmin(box, by_query / (by_query + others).clamp_min(TINY))
        return (upper * (1 + _SLACK)).clamp_max(1.0)

    def lower(self, share: float = 1.0) -> Tensor:
        """The smallest weights."""
        box = softmax_ceiling(self.scores, -self.query_shifts - share * self.key_shifts - self.logit_error)
        here = (self.weights * torch.exp(-2 * self.logit_error) - LEAST).clamp_min(0.0)
        by_query = here * torch.exp(-self.query_shifts - self.log_mean[..., None])
        others = (1 - by_query + _SLACK) * torch.exp(2 * share * self.max_key_shift)[..., None]
        return torch.fmax(box, by_query / (by_query + others)) * (1 - _SLACK)

    def mean_shift_by_query(self, deviation: Tensor) -> Tensor:
        """The shift of a mean of this deviation at the input by the query's perturbation."""
        return deviation * self.query_deviation * exponential_mean(self.max_query_shift)

    @cached_property
    def mixture(self) -> Tensor:
        """≥ M of the query's perturbation."""
        return 0.5 * (self.weights + self.upper(0.0))

    def query_step(self, moment: Moment, mean_shift: Tensor, product_norm: Tensor) -> PerturbationStep:
        """The query's perturbation, for values whose mean moves by at most ``mean_shift``.

        ``product_norm`` is at least the norm of [M^½β(u − ū)], ``(g, n)``; ∞ where it is not known.
        """
        mixture, whole = self.mixture, moment(self.mixture).sqrt()
        ratio = torch.tanh(0.5 * (self.query_shifts + self.log_mean[..., None])).square() * mixture
        largest = torch.tanh(0.5 * (self.max_query_shift + self.log_mean))
        mass, inner = ratio.sum(-1), root(moment(ratio))
        plain, sharper = largest * whole, inner + 0.5 * mean_shift * root(mass)
        away = 0.5 * self.mean_shift_by_query(root(mass))  # |ū − o| in a direction ÷ the deviation of the values there
        share = (away * root(moment(self.weights)) / inner).clamp(_MIN_SHARE, 1 / _MIN_SHARE)
        about_mean = (1 + share)[..., None] * ratio + ((1 + 1 / share) * away.square())[..., None] * self.weights
        loads = torch.where((sharper < plain)[..., None], about_mean, mixture * largest.square()[..., None])
        factor = torch.minimum(torch.minimum(plain, sharper), 0.5 * (product_norm + self.log_mean * whole))
        return PerturbationStep(mixture, factor, loads)

    def key_steps(self, moment: Moment) -> list[PerturbationStep]:
        """The perturbation by the keys."""
        ends = [self.upper(step / KEY_STEPS) for step in range(KEY_STEPS + 1)]
        factor = torch.tanh(self.max_key_shift / KEY_STEPS)
        loads = factor.square()[..., None]
        mixtures = [0.5 * (before + after) for before, after in pairwise(ends)]
        return [PerturbationStep(mixture, factor * moment(mixture).sqrt(), mixture * loads) for mixture in mixtures]


def exponential_mean(x: Tensor) -> Tensor:
    """(e^x − 1)/x, the mean of e^t for t from 0 to x."""
    return torch.expm1(x.clamp_min(TINY)) / x.clamp_min(TINY)


def largest_mean(numbers: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """max Σ_j p_j·number_j over low ≤ p ≤ high, Σp = 1, along the last axis.

    The free mass 1 − Σ low goes to the largest numbers first. It is known to within a few roundings of 1, a large
    relative error where one weight is nearly 1.

    >>> n, none, most = torch.tensor([1.0, 5.0, 3.0]), torch.zeros(3), torch.tensor([1.0, 0.25, 0.5])
    >>> float(largest_mean(n, none, most))  # ¼·5 + ½·3 + ¼·1
    3.0
    """
    order = numbers.argsort(-1, descending=True)
    sorted_numbers, floor, room = (t.gather(-1, order) for t in (numbers, low, high - low))
    free = (1 - low.sum(-1, keepdim=True) + gamma(8 * (numbers.shape[-1] + 2))).clamp_min(0.0)
    before = room.cumsum(-1) - room
    taken = torch.minimum((free - before).clamp_min(0.0), room)
    return ((floor + taken) * sorted_numbers).sum(-1) * (1 + gamma(8 * numbers.shape[-1]))


@dataclass(frozen=True)
class LeaveOneOut:
    """Every row without one token: loads ≥ R⁰e^{B'} ``(g, n, n)``, points c ``(g, n, m)``, size ≥ |ξ| ``(g, n)``."""

    loads: Tensor
    centres: Tensor
    size: Tensor

    @classmethod
    def of(
        cls, keys: Tensor, group: Paths, moves: Tensor, key_factor: Tensor, radius: Tensor, moment: KeyMoment
    ) -> LeaveOneOut:
        """All tokens of every map but ``keys (g,)``.

        ``key_factor`` is sinh κ_i, ``radius`` bounds the rounding error of a b_ij, ``(g, n)`` each.
        """
        chosen = torch.nn.functional.one_hot(keys, group.weights.shape[-1]).bool()[:, None]
        remainder = 1 - (group.upper_weights * chosen).sum(-1, keepdim=True)
        here = torch.where(
            remainder > MIN_REMAINDER,
            group.upper_weights / remainder.clamp_min(MIN_REMAINDER),
            group.seen.to(remainder),
        )
        here = here.clamp_max(1.0).masked_fill(chosen, 0.0)
        plain = group.weights.masked_fill(chosen, 0.0)
        plain = plain / plain.sum(-1, keepdim=True).clamp_min(TINY)
        middle = plain @ group.pull
        key_distances = group.pull_distances(middle)
        mean_error = torch.expm1(2 * group.radii.weights + gamma(4 * len(moves))) * key_distances.amax(-1)
        error = radius + mean_error
        query_shifts = moves[:, None] * (key_distances + error[..., None])
        growth = exponential_mean(query_shifts).square()
        size = moves * root(moment(here * growth, middle, error)) + key_factor
        return cls((here * torch.exp(query_shifts)).clamp_max(1.0), plain @ group.value, size)
