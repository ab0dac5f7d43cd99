"""Lower bounds on the minimum of a quadratic on a ball.

min_{|δ| ≤ r} g·δ + ½δᵀHδ ≥ −½gᵀ(H + νI)⁻¹g − ½νr² for every ν ≥ 0 with H + νI ≻ 0, with equality at the best ν (the
S-lemma); every ν is valid, so that its search needs no bound on rounding.

Proof: docs/theory/certificates-classifier.md, section "Quadratics on a ball".
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 8


def ball_minimum(gradient: Tensor, bend: Tensor, floor: Tensor, radius: float) -> Tensor:
    """min g·δ + ½δᵀQδ from below for a batch: gradients ``(g, N)``, ``bend`` = Qĝ, ``floor`` = −μ ≤ spectrum of Q.

    >>> g, q = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[-1.0, 0.0], [0.0, -1.0]]).double()
    >>> round(float(ball_minimum(g, (g / 5) @ q, torch.tensor([-1.0]).double(), 2.0)), 6)  # −2·5 − ½·4
    -12.0
    """
    size = gradient.norm(dim=-1)
    unit = gradient / size.clamp_min(1e-300)[:, None]
    v = bend - floor[:, None] * unit
    stiffness = (unit * v).sum(-1)
    square = v.square().sum(-1)
    usable = stiffness > 1e-12 * square.sqrt()
    lift = torch.where(usable, square / stiffness.where(usable, torch.ones_like(stiffness)), 0.0)
    share = torch.where(usable, stiffness.square() / square.clamp_min(1e-300), 0.0).clamp_max(1.0)
    along, across = share * size.square(), (1 - share) * size.square()
    shift = _best_shift(torch.stack([across, along], -1), torch.stack([torch.zeros_like(lift), lift], -1), radius)
    dual = across / shift + along / (shift + lift)
    return -0.5 * dual - 0.5 * (shift - floor) * radius**2


def form_minimum(gradient: Tensor, form: Tensor, floor: float, radius: float) -> tuple[float, Tensor, Tensor]:
    """min g·δ + ½δᵀ(H − μI)δ from below, for H with its gradient in a subspace; floor = −μ ≤ 0.

    Also a δ near the minimum and a swing: where δ is short of the ball, δ ± swing are as low and on its sphere.
    """
    spectrum, vectors = torch.linalg.eigh(form)
    low = min(float(spectrum[0]), 0.0)  # outside the subspace the form is zero
    turned = vectors.mT @ gradient
    square = turned.square()
    shift = _best_shift(square[None], (spectrum - low)[None], radius)[0]
    move = -vectors @ (turned / (spectrum - low + shift))
    dual = (square / (spectrum - low + shift)).sum()
    margin = form.shape[-1] ** 2 * 2**-50 * torch.linalg.matrix_norm(form)  # LAPACK's backward error
    bound = -0.5 * dual - 0.5 * (shift - low - floor + margin) * radius**2
    remaining = max(radius**2 - float(move.square().sum()), 0.0)
    return float(bound), move, remaining**0.5 * vectors[:, 0]


def _best_shift(squares: Tensor, offsets: Tensor, radius: float) -> Tensor:
    """Near the root ν > 0 of Σ squares/(offsets + ν)² = r²; offsets ≥ 0.

    Newton's method on 1/|δ(ν)| − 1/r, which is nearly straight (Moré and Sorensen 1983), kept positive.
    """
    shift = squares.sum(-1).sqrt() / radius + 1e-150
    for _ in range(_STEPS):
        terms = squares / (offsets + shift[..., None]).square()
        length = terms.sum(-1).clamp_min(1e-300)
        slope = (terms / (offsets + shift[..., None])).sum(-1).clamp_min(1e-300)
        shift = torch.maximum(shift + length / slope * (length.sqrt() / radius - 1), shift / 8)
    return shift
