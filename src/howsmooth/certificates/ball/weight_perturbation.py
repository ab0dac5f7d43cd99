r"""Attention weights tilted in steps: how far the covariances of a row can move.

In the notation of `howsmooth.certificates.ball.head_ball`, the weights of row i on the ball are :math:`P \propto
P^0e^{β+a}` with :math:`β_j = b_{ij}\cdot e_i`, what the token's own query does, and :math:`a_j = (t_{ij} + Ae_i)\cdot
e_j`, what the keys do; :math:`|β_j| \le B_j = ε_i|b_{ij}|`, :math:`|a_j| \le κ_i`. Let :math:`P^β \propto P^0e^β`.

**Two distributions.** If :math:`|\log(P_j/P'_j)| \le η_j` then, with means under :math:`M = \tfrac12(P+P')`,

.. math:: \mathrm{Cov}_P(u,z) - \mathrm{Cov}_{P'}(u,z) = \sum_j(P_j-P'_j)(u_j-\bar u)(z_j-\bar z),\qquad
          |P_j-P'_j| \le 2\tanh(η_j/2)M_j :

the terms :math:`(E_Pu-\bar u)(E_Pz-\bar z)` and :math:`(E_{P'}u-\bar u)(E_{P'}z-\bar z)` that the sum leaves out are
equal. By Cauchy–Schwarz, and because a variance is below the second moment about any point, the difference is at most
:math:`φ\,(\sum_jM_jz_j^2)^{1/2}`, :math:`φ = 2\|\sum_jM_j\tanh^2(η_j/2)(u_j-\bar u)(u_j-\bar u)^\top\|^{1/2}`. ∎

**The query's own tilt.** :math:`E_{P^0}β = 0`, so :math:`1 \le E_{P^0}e^β \le 1 + \tfrac12ε_i^2α_i^2e^{\max B}`, and
:math:`P^0_je^{-B_j}/E_{P^0}e^β \le P^β_j \le P^0_je^{B_j}`; η_j is B_j plus the logarithm of the right-hand side. The
mean moves by :math:`E_{P^0}[(r-1)u]`, :math:`r = e^β/E_{P^0}e^β`, and :math:`E(r-1)^2 \le \mathrm{Var}_{P^0}(e^β) \le
E_{P^0}(e^β-1)^2`: at most by :math:`s^β_i = ℓ^0_i\,ε_iα^0_i\,(e^{\max B}-1)/\max B`, and :math:`\bar u` by half of it.
In the direction w the mean moves by no more than :math:`s^β_i/ℓ^0_i` times :math:`(\sum_jP^0_j(u_j\cdot w)^2)^{1/2}`.
So, for every ϑ > 0, :math:`\sum_jM_j\tanh^2(η_j/2)((u_j-\bar u)\cdot w)^2` is at most the second moment of the u_j
about the old mean under the loads
:math:`(1+ϑ)M_j\tanh^2(η_j/2) + (1+1/ϑ)(s^β_i/2ℓ^0_i)^2\sum_lM_l\tanh^2(η_l/2)P^0_j`.
For the mean of all tokens but j, ℓ⁰ and α⁰ are divided by :math:`(1-P^0_j)^{1/2}`, and β, less its own mean, is at most
2 max B.

Beside that, :math:`|P^β_j-P^0_j| \le M_j|β_j-\log Ee^β|`, and :math:`β_j = b_{ij}\cdot e_i` with one e_i for all j. For
unit vectors w, :math:`\sum_jM_jβ_j^2(u_j\cdot w)^2 \le (ε_ih_i)^2`,
:math:`h_i = \|[M_j^{1/2}b_{ij}\otimes u_j]_j\|`, whose
square is the norm of the Hadamard product :math:`[(M_jM_l)^{1/2}(b_{ij}\cdot b_{il})(u_j\cdot u_l)]_{jl}` of two Gram
matrices. So φ is at most :math:`ε_ih_i + \tfrac12s^β_iε_i\|\sum_jM_jbb^\top\|^{1/2} + \log Ee^β\,
\|\sum_jM_juu^\top\|^{1/2}`, u about its mean under P⁰.

**The keys' tilt.** A weight p becomes at most :math:`pe^{2κ}/(pe^{2κ}+1-p)`, and no less than with −2κ. For covariances
it is taken in m equal steps, each of log-ratios within ±2κ_i/m: η = 2κ_i/m for all j, so that φ is
:math:`2\tanh(κ_i/m)` times a deviation under M. The mean moves by at most :math:`ℓ^β_i\sinhκ_i`
(`howsmooth.certificates.ball.head_ball`). So :math:`|Δo_i| \le s^β_i + ℓ^β_i\sinhκ_i`, all but ℓ^β at the input itself.
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
