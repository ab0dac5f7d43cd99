r"""Parabolas and lines around ReLU on an interval, and the quadratic of the input they leave.

On [l, u] with l < 0 < u, w = u − l:

- from above, :math:`\mathrm{relu}(z) \le \frac uw(z-l) + c(z-l)(z-u)` for every :math:`0 \le c \le \min(u,-l)/w^2`: the
  difference to z vanishes at u and is convex, so it is ≥ 0 on [0, u] when its slope there, u/w − 1 + cw, is ≤ 0; the
  value itself vanishes at l and is ≥ 0 on [l, 0] when its slope there, u/w − cw, is ≥ 0. The largest c is the least
  bound
  at every z: half the gap of the chord (c = 0) where u = −l.
- from below, :math:`\mathrm{relu}(z) \ge λz` for every 0 ≤ λ ≤ 1.

A hidden value is z = z⁰ + y + R, y = h·δ, with a known gradient h, |y| ≤ r|h| =: Y, and a remainder |R| ≤ ρ. Writing
ζ = z⁰ + y and s = z⁰ − (l+u)/2, :math:`z^2 = ζ^2 + (z+ζ)R` and z + ζ = (2z⁰ − s) + (2y + s + R), so

.. math:: c\,z^2 \;\le\; c\,ζ^2 + c\,(2z^0 - s)(z - ζ) + cρ\big(\tfrac tY y^2 + \tfrac Yt + |s| + ρ\big)

for every t > 0, because :math:`2|y| \le ty^2/Y + Y/t`: the square joins the other quadratic terms, where not all hidden
values can be at their ends at once. The margin, with coefficients b of the hidden values, is then at least a constant,
plus a functional of the attention's output, plus a quadratic of δ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEEPEST = 8.0


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
        constant: what does not depend on δ.
        coefficients: of z, ``(k,)``. slopes, squares: of h·δ, ``(k,)``; squares ≤ 0.
    """

    constant: Tensor
    coefficients: Tensor
    slopes: Tensor
    squares: Tensor

    @classmethod
    def of(cls, weights: Tensor, hidden: Hidden, lines: Tensor, near: Tensor | None) -> Relaxed:
        """The bound for coefficients b.

        Args:
            lines: λ where b > 0. near: hidden values near which the bound is to be tight: it decides, where b < 0, if
                the parabola is taken, and with which t; chords everywhere when None.
        """
        lower, upper, start = hidden.lower, hidden.upper, hidden.start
        on, open_ = lower >= 0, hidden.unstable
        below, above = open_ & (weights > 0), open_ & (weights < 0)
        width = torch.where(open_, upper - lower, torch.ones_like(upper))
        skew = start - (lower + upper) / 2
        curve, share, price = torch.zeros_like(upper), torch.zeros_like(upper), torch.zeros_like(upper)
        if near is not None:
            reach = hidden.reach.clamp_min(1e-300)
            away = (near - start).abs()
            t = (reach / away.clamp_min(1e-300)).clamp(1.0, _STEEPEST)
            share, price = hidden.rest * t / reach, hidden.rest * (reach / t + skew.abs() + hidden.rest)
            pays = (near - lower) * (upper - near) > price + share * away.square()
            curve = torch.where(above & pays, torch.minimum(upper, -lower) / width.square(), 0.0)
        line = torch.where(above, upper / width - curve * (lower + upper - 2 * start + skew), lines)
        coefficients = weights * torch.where(on, 1.0, torch.where(below | above, line, 0.0))
        chord = torch.where(above, -upper * lower / width + curve * lower * upper, 0.0)
        bent = weights * curve
        constant = (weights * chord + bent * start * (skew - start)).sum() - (bent.abs() * price).sum()
        return cls(constant, coefficients, bent * skew, bent * (1 + share))
