"""The norm of a map from bounds on parts of its input and on a term that is diagonal in the parts.

If K maps inputs of part k to at most c_k times their length and Q, diagonal in the parts, to at most q_k times, then
‖K + Q‖ ≤ ½(λ + μ + Σ_k c_k²/(μ − q_k²/λ)) for all λ > 0 and μ > max_k q_k²/λ.

Proof: docs/theory/certificates-ball.md, section "The norm of a partitioned sum".
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.point_bounds import TINY
from howsmooth.numerics.roundoff import gamma

_STEPS = 30


def norm_of_partitioned_sum(columns: Tensor, blocks: Tensor) -> Tensor:
    """≥ ‖K + Q‖ from c and q, ``(…, parts) → (…)``.

    >>> columns, blocks = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([[2.0, 2.0], [0.0, 2.0]])
    >>> norm_of_partitioned_sum(columns.double(), blocks.double())
    tensor([7.0000, 6.7082], dtype=torch.float64)
    """
    plain = columns.norm(dim=-1) + blocks.amax(-1)
    unit = plain.detach().clamp_min(TINY)[..., None]
    c, q = columns / unit, blocks / unit
    level, mu = _levels(c.detach(), q.detach())
    minimum = 0.5 * (level + mu)[..., 0] + 0.5 * (c.square() / (mu - q.square() / level)).sum(-1)
    return torch.fmin(plain, unit[..., 0] * minimum) * (1 + gamma(16 * (1 + columns.shape[-1])))


def _levels(c: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """λ and μ, ``(…, 1)``; they count as constants, where the bound has the right derivative."""
    a = _unit(c + q)
    for _ in range(_STEPS):
        a = _unit(c + q.square() * a / _length(q * a))
    level = _length(q * a)
    steep = q.square() / level
    minimum = steep.amax(-1, keepdim=True) * (1 + 1e-9) + TINY
    return level, torch.maximum((c + steep * a).norm(dim=-1, keepdim=True), minimum)


def _length(vectors: Tensor) -> Tensor:
    return vectors.norm(dim=-1, keepdim=True).clamp_min(1e-150)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / _length(vectors)
