"""Bounds on the Taylor remainders of normalisations and activations on a ball.

Division z/N with N = (|z|²/d + ε)^½ has |e| ≤ R²/(√(3d) N₋²), ReLU has 0 ≤ e ≤ (D − |z⁰|)₊, smooth activations have
|e| ≤ ½D² max|φ''| for moves of at most R of a token or D of a number.

Proof: docs/theory/certificates-network.md, section "Taylor remainders".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
        curved = 0.5 * moved.square() * _largest_bend(self.activation, near, far)
        upper = torch.minimum(curved, 2.3 * moved) * (1 + ROUNDED) + noise  # |φ'| ≤ 1.13, twice
        return -upper, upper


def _largest_bend(activation: str, near: Tensor, far: Tensor) -> Tensor:
    """≥ |φ''(t)| for all near ≤ |t| ≤ far, but for rounding; each factor is monotone in |t|."""
    match activation:
        case "gelu":
            falling = torch.exp(-near.square() / 2) / (2 * torch.pi) ** 0.5
            ends = (2 - near.square()).abs(), (2 - far.square()).abs()
        case "silu":
            falling = torch.sigmoid(near) * torch.sigmoid(-near)
            ends = (2 - near * torch.tanh(near / 2)).abs(), (2 - far * torch.tanh(far / 2)).abs()
        case "tanh":  # |φ''| = 2 |tanh| (1 − tanh²)
            return 2 * torch.tanh(far) * torch.cosh(near.clamp_max(300.0)).square().reciprocal()
        case "sigmoid":  # |φ''| = σ(1 − σ)|1 − 2σ|
            return torch.sigmoid(near) * torch.sigmoid(-near) * torch.tanh(far / 2)
        case _:  # ½t(1 + tanh u): |φ''| ≤ (1 − tanh² u)(u' + ½|t u''| + |t tanh u| u'²)
            inner, steep = _cubic(far)
            falling = torch.cosh(_cubic(near)[0].clamp_max(300.0)).square().reciprocal()
            return falling * (steep + 3 * _CUBE * _ROOT * far.square() + far * torch.tanh(inner) * steep.square())
    return falling * torch.maximum(*ends)


_ROOT, _CUBE = (2 / torch.pi) ** 0.5, 0.044715


def _cubic(t: Tensor) -> tuple[Tensor, Tensor]:
    """u = √(2/π)(t + 0.044715 t³) of GELU by tanh, and its derivative."""
    return _ROOT * (t + _CUBE * t**3), _ROOT * (1 + 3 * _CUBE * t.square())


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    slope = 0.5 * torch.erfc(-z / 2**0.5) + z * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    return torch.nn.functional.gelu(z), slope


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    inner, steep = _cubic(z)
    t = torch.tanh(inner)
    return torch.nn.functional.gelu(z, approximate="tanh"), 0.5 * (1 + t) + 0.5 * z * (1 - t.square()) * steep


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    on = torch.sigmoid(z)
    return torch.nn.functional.silu(z), on * (1 + z * (1 - on))


_VALUES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "relu": lambda z: (torch.relu(z), (z > 0).to(z.dtype)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "tanh": lambda z: (torch.tanh(z), 1 - torch.tanh(z).square()),
    "sigmoid": lambda z: (torch.sigmoid(z), torch.sigmoid(z) * torch.sigmoid(-z)),
}
"""Value and derivative of every activation whose remainder is bounded."""
CERTIFIED_ACTIVATIONS = tuple(_VALUES)
"""The activations whose remainders are bounded."""


def activate(form: AffineForm, activation: str) -> tuple[AffineForm, ActivationRemainder]:
    """The form behind an activation, with a source for the remainder."""
    z = form.value
    value, slope = _VALUES[activation](z)
    slopes = [slope[:, :, None, None] * one for one in form.slopes]
    noise = 1.2 * form.rounding + gamma(2**11) * form.size
    remainder = ActivationRemainder(activation, z, form.number_gauge(), noise, form.token_gauge(1), form.slopes[0])
    eye = torch.eye(z.shape[-1], dtype=z.dtype)
    return form.after(value, slopes, block_diagonal(eye, len(z))), remainder


@dataclass(frozen=True)
class ProductRemainder(Remainder):
    """The remainder Δa∘Δu of a product a∘u.

    Attributes:
        left, right: gauges of the moves of a and u, ``(n, d, ·)``. noise: of rounding.
    """

    left: Tensor
    right: Tensor
    noise: Tensor

    def numbers(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        upper = moved_by(self.left, reach) * moved_by(self.right, reach) * (1 + ROUNDED)
        upper = upper + moved_by(self.noise, reach)
        return -upper, upper


def multiply(a: AffineForm, u: AffineForm) -> tuple[AffineForm, ProductRemainder]:
    """The form of a product of two forms with the same sources, with a source for its remainder.

    a∘u = a⁰∘u⁰ + a⁰∘Δu + u⁰∘Δa + Δa∘Δu, where the moves hold the rounding errors of a and u.
    """
    value = a.value * u.value
    slopes = [
        a.value[..., None, None] * of_u + u.value[..., None, None] * of_a
        for of_a, of_u in zip(a.slopes, u.slopes, strict=True)
    ]
    largest = [form.value.detach().abs().amax() for form in (a, u)]
    noise = largest[0] * u.rounding + largest[1] * a.rounding
    noise = noise + gamma(8) * (largest[0] * u.size + largest[1] * a.size)
    remainder = ProductRemainder(a.number_gauge(), u.number_gauge(), noise)
    eye = torch.eye(value.shape[-1], dtype=value.dtype)
    return a.after(value, slopes, block_diagonal(eye, len(value))), remainder
