"""Derivatives of attention read at one token whose query does not move.

Every logit and value is affine in the tokens: o(p) = c + Σ_h Σ_j P_hj (U_h p_j + u_hj), P_h = softmax_j(κ_h·p_j +
s_hj). The derivatives of a functional a·o along a line are joint cumulants under P: the gradient and the second
derivative σᵀMσ + 2αᵀDσ are exact at the input, the third is bounded on the whole ball (`Functionals.third_derivative`).

Proof: docs/theory/certificates-classifier.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_PIECES = 16
_SPREAD = math.sqrt(2)
"""The largest difference of two coordinates of a unit vector."""
_SKEW = _SPREAD**3 / (6 * math.sqrt(3))
_MIXED = 2 / (3 * math.sqrt(3))
"""max x²y on x² + y² = 1."""


@dataclass(frozen=True)
class PooledAttention:
    """The map o(p) of this module in float64.

    Attributes:
        keys: κ, ``(heads, d)``. key_offsets: s, ``(heads, fixed + n)``.
        values: U, ``(heads, m, d)``. value_offsets: u, ``(heads, fixed + n, m)``. constant: c, ``(m,)``.
        fixed: how many tokens, the first ones, do not move.
    """

    keys: Tensor
    key_offsets: Tensor
    values: Tensor
    value_offsets: Tensor
    constant: Tensor
    fixed: int

    def at(self, tokens: Tensor) -> Expansion:
        """The expansion at an input ``(n, d)``, for all functionals."""
        still = tokens.new_zeros(self.fixed, tokens.shape[-1])
        rows = torch.cat([still, tokens])
        weights = torch.softmax(self.key_offsets + self.keys @ rows.mT, dim=-1)
        return Expansion(self, weights, self.value_offsets + rows @ self.values.mT)

    def __call__(self, tokens: Tensor) -> Tensor:
        """o(p), ``(m,)``."""
        return self.at(tokens).output


@dataclass(frozen=True)
class Expansion:
    """Weights P ``(heads, rows)`` and values ``(heads, rows, m)`` at an input."""

    pool: PooledAttention
    weights: Tensor
    rows: Tensor

    @property
    def output(self) -> Tensor:
        """o at the input."""
        return self.pool.constant + torch.einsum("hj,hjm->m", self.weights, self.rows)

    @cached_property
    def covariance(self) -> Tensor:
        """D of every head over the tokens that move."""
        p = self.weights[:, self.pool.fixed :]
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]

    @cached_property
    def steepness(self) -> Tensor:
        """|κ| of every head."""
        return self.pool.keys.norm(dim=-1)

    @cached_property
    def unsaturated(self) -> Tensor:
        """The mass q outside the largest weight."""
        return self.weights.scatter(-1, self.weights.argmax(-1, keepdim=True), 0.0).sum(-1)

    def growth(self, radii: Tensor) -> Tensor:
        r"""η with :math:`P_j \le e^{η}P^0_j` for all j and every P on balls of radii ``(b, 1)``, ``(b, heads)``.

        :math:`P_j/P^0_j = e^{σ_j}/E_{P^0}e^{σ} \le e^{σ_j - E_{P^0}σ}` (Jensen), and :math:`σ_j - E_{P^0}σ =
        (e_j - P^0)\cdotσ` with :math:`|σ| \le |κ|r` over the tokens that move.
        """
        p = self.weights[:, self.pool.fixed :]
        square = p.square().sum(-1, keepdim=True)
        longest = torch.maximum((1 - 2 * p + square).amax(-1), square[:, 0] if self.pool.fixed else square[:, 0] * 0)
        return radii * self.steepness * longest.sqrt() * (1 + 2**-40)

    def spread(self, radii: Tensor) -> tuple[Tensor, Tensor]:
        r"""V ≥ :math:`\mathrm{Var}_P(x)` and T² ≥ :math:`(x_j - E_Px)^2` for unit x, all j and P on balls ``(b, 1)``.

        The coordinates of x span at most √2, so the variance is at most ½ (Popoviciu). About the coordinate of the
        largest weight it is at most 2q̂, where :math:`\hat q = q/(q + (1-q)e^{-Δ})`, Δ = √2\|κ\|r, bounds the mass of
        the others: no difference of two logits moves by more than Δ. About the mean under :math:`P^0` it is at most
        :math:`e^{η}\|D^0\|`. And :math:`x_j - E_Px = (e_j - P)\cdot x`, :math:`|e_j - P|^2 \le 1 + |P|^2 \le 1 + \max
        P`. Both grow with the radius.
        """
        q, grown = self.unsaturated, self.growth(radii).exp()
        away = q / (q + (1 - q) * (-_SPREAD * radii * self.steepness).exp())
        variance = torch.minimum(2 * away, grown * self._covariance_norm).clamp_max(0.5)
        return variance, 1 + (grown * self.weights.amax(-1)).clamp_max(1.0)

    @cached_property
    def _covariance_norm(self) -> Tensor:
        """‖D‖ of every head."""
        largest = torch.linalg.eigvalsh(self.covariance)[:, -1].clamp_min(0.0)
        return largest + len(self.covariance[0]) ** 2 * 2**-50  # LAPACK's backward error; the entries are at most ¼


class Functionals:
    """Gradient, curvature and third derivative at an input of functionals a·o, for every row a of ``(g, m)``.

    Attributes:
        gradient: ``(g, n·d)``.
    """

    def __init__(self, point: Expansion, directions: Tensor):
        pool, p = point.pool, point.weights
        self.point, self.directions = point, directions
        self.pulled = torch.einsum("gm,hmd->ghd", directions, pool.values)  # Uᵀa
        rows = torch.einsum("gm,hjm->ghj", directions, point.rows)
        centred = rows - (p * rows).sum(-1, keepdim=True)
        self._deviation = (p * centred.square()).sum(-1).sqrt()
        self._range = rows.amax(-1) - rows.amin(-1)
        moving = slice(pool.fixed, None)
        self._mass, self._push = p[:, moving], (p * centred)[..., moving]
        gradient = torch.einsum("hj,ghd->gjd", self._mass, self.pulled)
        self.gradient = (gradient + torch.einsum("ghj,hd->gjd", self._push, pool.keys)).flatten(1)

    @property
    def value(self) -> Tensor:
        """a·o at the input."""
        return self.directions @ self.point.output

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """Uᵀa along κ and the length of the rest, ``(g, heads)``."""
        keys = self.point.pool.keys
        unit = keys / self.point.steepness.clamp_min(1e-300)[:, None]
        along = (self.pulled * unit).sum(-1)
        return along, (self.pulled - along[..., None] * unit).norm(dim=-1)

    @cached_property
    def curvature(self) -> tuple[Tensor, Tensor]:
        r"""Bounds on the spectrum of the second derivative from below (≤ 0) and above (≥ 0), ``(g,)`` each.

        In coordinates along κ and along the rest of :math:`U^\top a` a head's form is 2n × 2n; heads are added.
        """
        size, (along, across) = self.point.steepness, self._split
        d, push = self.point.covariance, self._push
        m = torch.diag_embed(push) - push[..., None] * self._mass[:, None] - push[..., None, :] * self._mass[:, :, None]
        keys = size[:, None, None] ** 2 * m + 2 * (size * along)[..., None, None] * d
        mixed = (size * across)[..., None, None] * d
        form = torch.cat([torch.cat([keys, mixed], -1), torch.cat([mixed, torch.zeros_like(mixed)], -1)], -2)
        # The computed eigenvalues are those of a form that differs by less than this (LAPACK's backward error).
        margin = form.shape[-1] ** 2 * 2**-50 * torch.linalg.matrix_norm(form)
        eigenvalues = torch.linalg.eigvalsh(form)
        lowest, highest = (eigenvalues[..., 0] - margin).clamp_max(0.0), (eigenvalues[..., -1] + margin).clamp_min(0.0)
        return lowest.sum(-1), highest.sum(-1)

    def hessian_product(self, moves: Tensor) -> Tensor:
        """The second derivative of every functional applied to a move of its own, ``(g, n·d)``."""
        keys = self.point.pool.keys
        moves = moves.unflatten(-1, (-1, keys.shape[-1]))
        sigma = torch.einsum("hd,gjd->ghj", keys, moves)
        alpha = torch.einsum("ghd,gjd->ghj", self.pulled, moves)

        def covariance(t: Tensor) -> Tensor:
            return self._mass * (t - (self._mass * t).sum(-1, keepdim=True))

        inner = self._push * (sigma - (self._mass * sigma).sum(-1, keepdim=True))
        on_keys = inner - self._mass * (self._push * sigma).sum(-1, keepdim=True) + covariance(alpha)
        out = torch.einsum("ghj,hd->gjd", on_keys, keys) + torch.einsum("ghj,ghd->gjd", covariance(sigma), self.pulled)
        return out.flatten(1)

    def third_derivative(self, radii: Tensor) -> Tensor:
        r"""An upper bound on :math:`|g'''|` for every unit direction and every point of balls ``(b, 1)``, ``(g, b)``.

        Write σ = \|κ\|x and α = bx + cy with x, y orthogonal parts of a unit vector, b and c from the split of
        :math:`U^\top a`. With V and T from `Expansion.spread` and t = x − Ex:

        - the symmetric form κ₃ takes its largest value over unit vectors on the diagonal (Banach), where
          :math:`|Et^3| \le C_3 = \min(TV, 2\sqrt2/(6\sqrt3))`: a centred variable on [−A, B], A + B = √2, has
          :math:`E(B-t)(t+c)^2 \ge 0`; take c = A with V ≤ AB where B ≥ 2A, c = B/2 elsewhere. Hence
          :math:`3|κ_3(α,σ,σ)| \le 3|κ|^2 C_3(|b| + c\max x^2y)`.
        - :math:`κ_4(a,σ,σ,σ) = |κ|^3\mathrm{Cov}(a, t^3 - 3Vt)`, at most the product of standard deviations;
          :math:`E t^2(t^2-3V)^2 \le V\max(3V, T^2-3V)^2`; that of a is at most half its range, or :math:`e^{η/2}` times
          the one at the input, plus what the values move: :math:`\sqrt V\,|U^\top a|r`.
        """
        point, (along, across) = self.point, self._split
        size, (variance, reach) = point.steepness, point.spread(radii)
        skew = (reach.sqrt() * variance).clamp_max(_SKEW)
        root = variance.sqrt()
        high = torch.maximum(3 * variance * root, 2 / 9 * reach * reach.sqrt())  # the largest below V = T²/9
        fourth = torch.where(variance <= reach / 9, root * (reach - 3 * variance), high)
        grown = (point.growth(radii) / 2).exp() * self._deviation[:, None]
        moved = root * radii * self.pulled.norm(dim=-1)[:, None]
        deviation = torch.minimum(self._range[:, None] / 2, grown) + moved
        mixed = 3 * size**2 * skew * (along.abs() + _MIXED * across)[:, None]
        return (mixed + size**3 * fourth * deviation).sum(-1)

    def remainder(self, radius: float) -> Tensor:
        r"""An upper bound on \|g(p+δ) − g − ∇g·δ − ½δᵀ∇²gδ\| for all \|δ\| ≤ r, ``(g,)``.

        :math:`\int_0^1 \tfrac12(1-s)^2 |g'''(p + sδ)|ds`, with the bound of `third_derivative` on the ball of radius
        sr, which grows with s, at the end of each of sixteen pieces.
        """
        ends = torch.arange(_PIECES + 1, dtype=torch.float64) / _PIECES
        tails = (1 - ends) ** 3 / 6
        return radius**3 * (self.third_derivative(radius * ends[1:, None]) * (tails[:-1] - tails[1:])).sum(-1)
