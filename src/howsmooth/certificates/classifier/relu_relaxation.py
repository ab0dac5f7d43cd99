"""Parabolas and lines that bound ReLU on an interval, and the resulting quadratic of the input.

On [l, u] with l < 0 < u, ReLU is at most its chord and at most a parabola z + c(z − m)² or its mirror image, and at
least λz for every 0 ≤ λ ≤ 1. A sum of ReLUs is then at least a constant, plus a linear function of the hidden values,
plus a quadratic of the move.

Proof: docs/theory/certificates-classifier.md, section "Relaxation of ReLU".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEEPEST = 8.0
_LEAST = 0.5
"""Smallest m, as a share of the largest."""


@dataclass(frozen=True)
class HiddenBounds:
    """Bounds on the hidden values on a ball.

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
        """Whether a value may have either sign."""
        return (self.lower < 0) & (self.upper > 0)


@dataclass(frozen=True)
class HiddenMoments:
    """Mean and mean square of every hidden value over the worst moves, where a bound should be tight.

    The expected gap of :math:`z + (z-m)^2/(4m)` over them is least for m² = the mean square.
    """

    mean: Tensor
    square: Tensor

    def towards(self, mean: Tensor, square: Tensor, share: float) -> HiddenMoments:
        """The mixture with further moves."""
        return HiddenMoments(self.mean + share * (mean - self.mean), self.square + share * (square - self.square))


@dataclass(frozen=True)
class ReluRelaxation:
    r"""Σ b_k relu(z_k) ≥ constant + coefficients·z + slopes·(hδ) + Σ squares_k (h_kδ)², on the ball.

    Attributes:
        constant: the term without δ.
        coefficients: of z, ``(k,)``. slopes, squares: of h·δ, ``(k,)``; squares ≤ 0.
    """

    constant: Tensor
    coefficients: Tensor
    slopes: Tensor
    squares: Tensor

    @classmethod
    def of(cls, weights: Tensor, hidden: HiddenBounds, lines: Tensor, near: HiddenMoments | None) -> ReluRelaxation:
        """The bound for coefficients b.

        Args:
            lines: λ where b > 0. near: hidden values near which the bound is to be tight: it decides, where b < 0, if
                a parabola is taken, and with which t and m; chords everywhere when None.
        """
        lower, upper, start = hidden.lower, hidden.upper, hidden.start
        on, open_ = lower >= 0, hidden.unstable
        below, above = open_ & (weights > 0), open_ & (weights < 0)
        width = torch.where(open_, upper - lower, torch.ones_like(upper))
        skew = start - (lower + upper) / 2
        curve = share = price = torch.zeros_like(upper)
        offset, slope = -upper * lower / width, upper / width
        if near is not None:
            reach = hidden.reach.clamp_min(1e-300)
            away = (near.square - 2 * start * near.mean + start.square()).clamp_min(0.0)  # E y²
            t = (reach / away.sqrt().clamp_min(1e-300)).clamp(1.0, _STEEPEST)
            share, price = hidden.rest * t / reach, hidden.rest * (reach / t + skew.abs() + hidden.rest)
            c, at, line = _parabola(lower, upper, near.square.sqrt())
            gain = offset + slope * near.mean - (c * at + line * near.mean + c * near.square)
            is_tighter = above & (gain > c * (price + share * away))
            curve = torch.where(is_tighter, c, 0.0)
            offset, slope = torch.where(is_tighter, c * at, offset), torch.where(is_tighter, line, slope)
        line = torch.where(above, slope + curve * (2 * start - skew), lines)
        coefficients = weights * torch.where(on, 1.0, torch.where(below | above, line, 0.0))
        chord = torch.where(above, offset, 0.0)
        curvature = weights * curve
        constant = (weights * chord + curvature * start * (skew - start)).sum() - (curvature.abs() * price).sum()
        return cls(constant, coefficients, curvature * skew, curvature * (1 + share))


def _parabola(lower: Tensor, upper: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, m² and the slope at zero of a parabola above ReLU, m as near the given size as can be, where l < 0 < u."""
    right = upper >= -lower
    far, short = torch.where(right, upper, -lower), torch.where(right, -lower, upper)
    far, short = far.clamp_min(1e-300), short.clamp_min(0.0)
    m = torch.minimum(torch.maximum(size, _LEAST * far), far)
    c = torch.where(m <= short, 1 / (4 * m), short / (m + short).square())
    return c, m.square(), torch.where(right, 1 - 2 * c * m, 2 * c * m)
