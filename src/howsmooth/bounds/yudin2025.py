r"""Yudin, Gaponov, Kudriashov, Rakhuba, *Pay Attention to Attention Distribution: A New Local Lipschitz Bound for
Transformers*, 2025 (arXiv 2507.07814).

With the two largest weights p₁ ≥ p₂, the Jacobian :math:`S = \mathrm{diag}(p) - pp^\top` of softmax has
:math:`\|S\|_2 \le g(p) = p_1(1-p_1+p_2) \le \tfrac12`: small for flat weights and for weights on one token, which the
constant ½ cannot see.

Proof. Clear when p₁ = p₂ (S is below diag p) or p₁ = 1. Else the largest eigenvalue is the root in (p₂, p₁) of the
secular equation :math:`p_1^2/(p_1-\mu) - \sum_{j\ge2}p_j^2/(\mu-p_j) = 1`, whose left side increases. At μ = g(p) the
first term is :math:`p_1/(p_1-p_2)`, and the sum is at most :math:`(1-p_1)p_2/(g-p_2) = p_2/(p_1-p_2)`, as :math:`g -
p_2 = (1-p_1)(p_1-p_2)`. So the left side is at least 1 there, and the root is not beyond g. ∎

For attention the proof is that of `howsmooth.bounds.nair2025`, with g in the place of ½;
`howsmooth.bounds.own.softmax_jacobian` is never larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.assumptions import PLAIN
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.nair2025 import norms_at
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths
from howsmooth.numerics.roundoff import gamma

REFERENCE = "Yudin, Gaponov, Kudriashov, Rakhuba 2025"


def softmax_jacobian_norm(p: Tensor) -> Tensor:
    r""":math:`g(p) = p_1(1-p_1+p_2) \ge \|\mathrm{diag}(p)-pp^\top\|_2` for weights along the last axis.

    >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]))
    tensor([0.3750, 0.0000])
    """
    if p.shape[-1] == 1:
        return (p * (1 - p))[..., 0]
    first, second = p.topk(2, dim=-1).values.unbind(-1)
    return first * (1 - first + second)


def softmax_jacobian_bound(value: Tensor, weights: Tensor, tokens: Tensor, score: Tensor, sharpness: Tensor) -> Tensor:
    r""":math:`\|V\|(\|P\| + 2\|X\|^2\|A\|\max_ig(P_i))`, from the norms of each head and max g."""
    return value * (weights + 2 * tokens.square() * score * sharpness)


def sharpness(group: Paths) -> Tensor:
    r"""max_i g(P_i) from above: :math:`p_1^+(\sum_{j\ne1}p_j^+ + p_2^+)` of the raised weights, at most ½.

    g grows with every weight when :math:`1-p_1` is written as the sum of the others, and if another weight is the
    largest of the true ones it is at most the :math:`p_2^+` counted here.
    """
    upper = group.upper_weights
    if upper.shape[-1] == 1:
        return torch.zeros_like(upper[:, 0, 0])
    first, largest = upper.max(-1, keepdim=True)
    others = upper.scatter(-1, largest, 0.0)
    return (first[..., 0] * (others.sum(-1) + others.amax(-1))).clamp(max=0.5).amax(-1)


@theorem(
    "yudin2025.softmax_jacobian",
    r"\|V\|\,\bigl(\|P\|+2\|X\|^2\|A\|\max_ig(P_i)\bigr),\quad g(p)=p_1(1-p_1+p_2)",
    reference=REFERENCE,
    scope="point",
    assumptions=PLAIN,
    on_paths=True,
)
def _at_point(group: Paths, where: Setting) -> Tensor:
    return softmax_jacobian_bound(*norms_at(group, where), sharpness(group)) * (1 + gamma(8))
