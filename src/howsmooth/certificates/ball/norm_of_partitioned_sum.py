r"""Inputs of some tokens taken apart from the rest.

Let a map be a sum :math:`K + Q`, where K sends inputs of the k-th part of the tokens to at most :math:`c_k` times their
length, and Q, which is diagonal in the tokens, to at most :math:`q_k` times. Parts of lengths :math:`a_k`, |a| = 1,
then go to at most :math:`\sum_kc_ka_k + (\sum_kq_k^2a_k^2)^{1/2}`, since Q keeps them apart. For all λ > 0 and
:math:`μ > \max_kq_k^2/λ`, by the inequality of the means, twice,

.. math:: \sum_kc_ka_k + \Big(\sum_kq_k^2a_k^2\Big)^{1/2} \le \frac12\Big(λ + μ + \sum_k\frac{c_k^2}{μ - q_k^2/λ}\Big),

with equality where :math:`λ = |q \circ a|` and :math:`(μ - q_k^2/λ)a_k = c_k`: a few steps
:math:`a \leftarrow c + q^2 \circ a/|q \circ a|` find such a, and λ and μ follow from it. The sum of the two norms,
:math:`|c| + \max_kq_k`, is what equal :math:`q_k` give. ∎
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.own.three_path import TINY
from howsmooth.bounds.point_error import gamma

_STEPS = 30


def norm_apart(columns: Tensor, blocks: Tensor) -> Tensor:
    """≥ ‖K + Q‖ from c and q, ``(…, parts) → (…)``.

    >>> columns, blocks = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([[2.0, 2.0], [0.0, 2.0]])
    >>> norm_apart(columns.double(), blocks.double())
    tensor([7.0000, 6.7082], dtype=torch.float64)
    """
    plain = columns.norm(dim=-1) + blocks.amax(-1)
    unit = plain.detach().clamp_min(TINY)[..., None]
    c, q = columns / unit, blocks / unit
    level, mu = _levels(c.detach(), q.detach())
    least = 0.5 * (level + mu)[..., 0] + 0.5 * (c.square() / (mu - q.square() / level)).sum(-1)
    return torch.fmin(plain, unit[..., 0] * least) * (1 + gamma(16 * (1 + columns.shape[-1])))


def _levels(c: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """λ and μ, ``(…, 1)``; they count as constants, where the bound has the right derivative."""
    a = _unit(c + q)
    for _ in range(_STEPS):
        a = _unit(c + q.square() * a / _length(q * a))
    level = _length(q * a)
    steep = q.square() / level
    least = steep.amax(-1, keepdim=True) * (1 + 1e-9) + TINY
    return level, torch.maximum((c + steep * a).norm(dim=-1, keepdim=True), least)


def _length(vectors: Tensor) -> Tensor:
    return vectors.norm(dim=-1, keepdim=True).clamp_min(1e-150)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / _length(vectors)
