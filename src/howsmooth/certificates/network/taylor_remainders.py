"""Bounds on the Taylor remainders of normalisations and activations on a ball.

Division z/N with N = (|z|²/d + ε)^½ has |e| ≤ R²/(√(3d) N₋²), ReLU has 0 ≤ e ≤ (D − |z⁰|)₊, GELU and SiLU have
|e| ≤ ½D² max|φ''| for moves of at most R of a token or D of a number.

Proof: docs/theory/certificates-network.md, section "Taylor remainders".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.certificates.network.affine_form import AffineForm, block_diagonal, length, spectral_ceiling
from howsmooth.numerics.roundoff import gamma

ROUNDED = gamma(2**12)
"""Sums of nonnegative numbers, of at most some thousand terms, are rounded up by this share."""


class Remainder(ABC):
    """The remainder of one nonlinear part of a network."""

    @abstractmethod
    def numbers(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of every number of the remainder, or of Euclidean norms of groups of them (−ρ, ρ): ``(m, groups)``."""

    def lengths(self, reach: Tensor) -> Tensor:
        """Bounds on |e_j| of every block, ``(m,)``, for a reach ``(1 + blocks,)`` of all sources before."""
        lower, upper = self.numbers(reach)
        return length(torch.maximum(-lower, upper)) * (1 + ROUNDED)


def moved_by(rows: Tensor, reach: Tensor) -> Tensor:
    """The bounds that gauges give for a reach of all sources."""
    return (rows @ reach[: rows.shape[-1]]) * (1 + ROUNDED)


@dataclass(frozen=True)
class NormalisationRemainder(Remainder):
    """The remainder of z/N."""

    start: Tensor
    rows: Tensor
    noise: Tensor
    width: int
    eps: float

    def numbers(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        moved = moved_by(self.rows, reach)
        smallest = (self.start - moved).clamp_min(0.0).square() / self.width + self.eps
        upper = (moved.square() / ((3 * self.width) ** 0.5 * smallest))[:, None] * (1 + ROUNDED)
        upper = upper + moved_by(self.noise, reach)
        return -upper, upper


def normalise(form: AffineForm, eps: float) -> tuple[AffineForm, NormalisationRemainder]:
    """The form behind z ↦ z/N, with a source for the remainder."""
    z, d = form.value, form.value.shape[-1]
    size = (z.square().mean(-1, keepdim=True) + eps).sqrt()
    value = z / size
    slopes = []
    for slope in form.slopes:
        along = torch.einsum("nd,ndmb->nmb", value, slope) / d
        slopes.append((slope - value[:, :, None, None] * along[:, None]) / size[..., None, None])
    steepest = 2 / size.min()  # the derivative has norm at most 1/N; 2 for its rounded form
    noise = steepest * (form.rounding + gamma(8 * d + 64) * form.size)
    remainder = NormalisationRemainder(length(z) * (1 - gamma(d + 8)), form.token_gauge(), noise, d, eps)
    eye = torch.eye(d, dtype=z.dtype)
    return form.after(value, slopes, block_diagonal(eye, len(z))), remainder


@dataclass(frozen=True)
class ActivationRemainder(Remainder):
    """The remainder of an activation.

    Attributes:
        start: z⁰ ``(n, h)``. rows: gauge of its moves. noise: of rounding. along: slopes in the input's own moves.
        others: gauge of the moves of tokens by all other sources.
    """

    activation: str
    start: Tensor
    rows: Tensor
    noise: Tensor
    others: Tensor
    along: Tensor

    def lengths(self, reach: Tensor) -> Tensor:
        plain, moves = super().lengths(reach), reach[1 : 1 + self.along.shape[-2]]
        moved, noise = moved_by(self.rows, reach), moved_by(self.noise, reach)
        share = ((self.numbers(reach)[1] - noise) / moved.clamp_min(1e-300)).clamp_min(0.0) * (1 + ROUNDED)
        straight = spectral_ceiling((share[..., None, None] * self.along).movedim(2, 1)) @ moves
        rest = (moved - (1 - ROUNDED) * (length(self.along) @ moves)).clamp_min(0.0)
        rest_length = torch.minimum(length(share * rest), share.amax(-1) * moved_by(self.others, reach))
        together = straight + rest_length + noise * share.shape[-1] ** 0.5
        return torch.minimum(plain, together * (1 + ROUNDED))

    def numbers(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        moved, size = moved_by(self.rows, reach), self.start.abs()
        noise = moved_by(self.noise, reach)
        near, far = (size - moved).clamp_min(0.0), size + moved
        if self.activation == "relu":
            upper = (moved - size).clamp_min(0.0)
            return -noise.expand_as(upper), upper + noise
        if self.activation == "gelu":
            falling = torch.exp(-near.square() / 2) / (2 * torch.pi) ** 0.5
            ends = (2 - near.square()).abs(), (2 - far.square()).abs()
        else:
            falling = torch.sigmoid(near) * torch.sigmoid(-near)
            ends = (2 - near * torch.tanh(near / 2)).abs(), (2 - far * torch.tanh(far / 2)).abs()
        curved = 0.5 * moved.square() * falling * torch.maximum(*ends)
        upper = torch.minimum(curved, 2.3 * moved) * (1 + ROUNDED) + noise  # |φ'| ≤ 1.13, twice
        return -upper, upper


def activate(form: AffineForm, activation: str) -> tuple[AffineForm, ActivationRemainder]:
    """The form behind an activation, with a source for the remainder."""
    z = form.value
    if activation == "relu":
        value, slope = torch.relu(z), (z > 0).to(z.dtype)
    elif activation == "gelu":
        value = torch.nn.functional.gelu(z)
        slope = 0.5 * torch.erfc(-z / 2**0.5) + z * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    else:
        value, on = torch.nn.functional.silu(z), torch.sigmoid(z)
        slope = on * (1 + z * (1 - on))
    slopes = [slope[:, :, None, None] * one for one in form.slopes]
    noise = 1.2 * form.rounding + gamma(2**11) * form.size
    remainder = ActivationRemainder(activation, z, form.number_gauge(), noise, form.token_gauge(1), form.slopes[0])
    eye = torch.eye(z.shape[-1], dtype=z.dtype)
    return form.after(value, slopes, block_diagonal(eye, len(z))), remainder
