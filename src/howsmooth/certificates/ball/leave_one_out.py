"""The mean value of all tokens but one on a ball.

With R ∝ P_l, l ≠ s, the mean m = E_R v⁰ moves by Δm = Σ_l (R⁰_l e^{B'_l})^½ (v⁰_l − c) ξ_l, |ξ| ≤ ρ_i + sinh κ_i, for
every point c: the distances of the remaining tokens from each other count, not those from s.

Proof: docs/theory/certificates-ball.md, section "Leave-one-out means".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from howsmooth.bounds.point_bounds import TINY, root
from howsmooth.bounds.three_paths import Paths
from howsmooth.certificates.ball.weight_perturbation import exponential_mean
from howsmooth.numerics.roundoff import gamma

MIN_REMAINDER = 1e-100
"""One minus a weight counts as zero below this, so that quotients are finite."""


class KeyMoment(Protocol):
    """≥ ‖Σ_j w_ij b_ij b_ijᵀ‖, ``(g, n)``, for keys about centres with rounding errors up to a radius ``(g, n)``."""

    def __call__(self, weights: Tensor, centres: Tensor, radius: Tensor) -> Tensor: ...


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
