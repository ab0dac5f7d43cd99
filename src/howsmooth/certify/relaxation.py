r"""Parabolas and lines around ReLU on an interval, and the quadratic of the input they leave.

On [l, u] with l < 0 < u, w = u − l:

- from above, :math:`\mathrm{relu}(z) \le \frac uw(z-l) + c(z-l)(z-u)` for every :math:`0 \le c \le \min(u,-l)/w^2`: the
  difference to z vanishes at u and is convex, so it is ≥ 0 on [0, u] when its slope there, u/w − 1 + cw, is ≤ 0; the
  value itself vanishes at l and is ≥ 0 on [l, 0] when its slope there, u/w − cw, is ≥ 0. The largest c is the least
  bound
  at every z: half the gap of the chord (c = 0) where u = −l.
- from below, :math:`\mathrm{relu}(z) \ge λz` for every 0 ≤ λ ≤ 1.

A hidden value is z = z⁰ + h·δ + R with a known gradient h and a remainder |R| ≤ ρ. Writing ζ = z⁰ + h·δ,
:math:`z^2 = ζ^2 + (z+ζ)R`, and z + ζ lies within ``half`` of ``middle``, so

.. math:: c\,z^2 = c\,ζ^2 + c\,\mathrm{middle}\,(z - ζ) \pm c\,\mathrm{half}\,ρ.

The margin, with coefficients b of the hidden values, is then at least a constant, plus a functional of the attention's
output, plus a quadratic of δ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hidden:
    """What is known of the hidden values on a ball.

    Attributes:
        start: z⁰ ``(k,)``. slope: h ``(k, N)``. lower, upper: l, u of z. rest: ρ. reach: r|h|.
    """

    start: Tensor
    slope: Tensor
    lower: Tensor
    upper: Tensor
    rest: Tensor
    reach: Tensor

    @property
    def unstable(self) -> Tensor:
        """Which may be of either sign."""
        return (self.lower < 0) & (self.upper > 0)


@dataclass(frozen=True)
class Relaxed:
    r"""Σ b_k relu(z_k) ≥ constant + coefficients·z + slopes·(hδ) + Σ squares_k (h_kδ)², on the ball.

    Attributes:
        constant, loss: what does not depend on δ, and how much of it is the price of the remainders.
        coefficients: of z, ``(k,)``. slopes, squares: of h·δ, ``(k,)``; squares ≤ 0.
    """

    constant: Tensor
    coefficients: Tensor
    slopes: Tensor
    squares: Tensor

    @classmethod
    def of(cls, weights: Tensor, hidden: Hidden, lines: Tensor, bent: Tensor) -> Relaxed:
        """The bound for coefficients b; lines: λ where b > 0; bent: whether to take the parabola where b < 0."""
        lower, upper = hidden.lower, hidden.upper
        on, open_ = lower >= 0, hidden.unstable
        below, above = open_ & (weights > 0), open_ & (weights < 0)
        width = torch.where(open_, upper - lower, torch.ones_like(upper))
        curve = torch.where(above & bent, torch.minimum(upper, -lower) / width.square(), 0.0)
        middle = (lower + upper) / 2 + hidden.start
        half = (upper - lower) / 2 + hidden.reach
        line = torch.where(above, upper / width - curve * (lower + upper - middle), lines)
        coefficients = weights * torch.where(on, 1.0, torch.where(below | above, line, 0.0))
        chord = torch.where(above, -upper * lower / width + curve * lower * upper, 0.0)
        bent_weights = weights * curve
        constant = (weights * chord + bent_weights * hidden.start * (hidden.start - middle)).sum()
        loss = (bent_weights.abs() * half * hidden.rest).sum()
        return cls(constant - loss, coefficients, bent_weights * (2 * hidden.start - middle), bent_weights)

    @staticmethod
    def worth_bending(hidden: Hidden, at: Tensor) -> Tensor:
        """Where the parabola gains more over the chord at the hidden values ``at`` than the remainder costs."""
        half = (hidden.upper - hidden.lower) / 2 + hidden.reach
        return (at - hidden.lower) * (hidden.upper - at) > half * hidden.rest
