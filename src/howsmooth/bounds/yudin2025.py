r"""Yudin, Gaponov, Kudriashov, Rakhuba, *Pay Attention to Attention Distribution: A New Local Lipschitz Bound for
Transformers*, 2025 (arXiv 2507.07814).

With the two largest weights p₁ ≥ p₂, the Jacobian :math:`S = \mathrm{diag}(p) - pp^\top` of softmax has
:math:`\|S\|_2 \le g(p) = p_1(1-p_1+p_2) \le \tfrac12`: small for flat weights and for weights on one token, which the
constant ½ cannot see.

Proof. Clear when p₁ = p₂ (S is below diag p) or p₁ = 1. Else the largest eigenvalue is the root in (p₂, p₁) of the
secular equation :math:`p_1^2/(p_1-\mu) - \sum_{j\ge2}p_j^2/(\mu-p_j) = 1`, whose left side increases. At μ = g(p) the
first term is :math:`p_1/(p_1-p_2)`, and the sum is at most :math:`(1-p_1)p_2/(g-p_2) = p_2/(p_1-p_2)`, as :math:`g -
p_2 = (1-p_1)(p_1-p_2)`. So the left side is at least 1 there, and the root is not beyond g. ∎

For attention :math:`f_i = VX^\top p_i`, :math:`p_i = \mathrm{softmax}(XAx_i + Xb)`, the score paths of the Jacobian are
:math:`VX^\top S_iXA\,y_i` and :math:`VX^\top S_iYw_i`, :math:`w_i = Ax_i + b`, for any mask. Since :math:`S_i1 = 0`,
tokens may be centred, :math:`X_c = X - 1\bar x^\top`, wherever they meet :math:`S_i`; and :math:`\sum_i|Yw_i|^2 \le
\|Y\|_F^2\|[w_i]\|^2`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.assumptions import LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP
from howsmooth.bounds.catalogue import Bound, register
from howsmooth.bounds.nair2025 import norms_at
from howsmooth.bounds.own.three_path import nowhere_nan, value_gain, weights_norm
from howsmooth.bounds.paths import Paths, paths
from howsmooth.bounds.rounding import gamma
from howsmooth.bounds.settings import Setting
from howsmooth.norms.matrices import spectral

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


def at_point(value: Tensor, weights: Tensor, tokens: Tensor, score: Tensor, sharpness: Tensor) -> Tensor:
    r""":math:`\|V\|(\|P\| + 2\|X\|^2\|A\|\max_ig(P_i))`, from the norms of each head and max g."""
    return value * (weights + 2 * tokens.square() * score * sharpness)


def softmax_jacobian(attention: AttentionMap, x: Tensor, folded: bool = True) -> Tensor:
    r""":math:`\|P\|\|V\| + \max_ig(P_i)\,\|VX_c^\top\|\,(\|X_cA\| + \|[Ax_i+b]_i\|)`, ``(heads,)``; linear, no
    positions.

    Never above `at_point`, and it takes a query bias.

    >>> import howsmooth as hs
    >>> softmax_jacobian(hs.SelfAttention.random(4), torch.ones(3, 4)) > 0
    tensor([True])
    """
    return torch.cat([_softmax_jacobian(part) for part in paths(attention, x, folded)])


def _softmax_jacobian(part: Paths) -> Tensor:
    radii = part.radii
    value, pull, push = (
        spectral(vectors) + radius.norm(dim=-1)
        for vectors, radius in ((part.value, radii.value), (part.pull, radii.pull), (part.push, radii.push))
    )
    bound = weights_norm(part) * value_gain(part) + _sharpness(part) * value * (pull + push)
    return nowhere_nan(bound * part.allowance)


def _sharpness(part: Paths) -> Tensor:
    r"""max_i g(P_i) from above: :math:`p_1^+(\sum_{j\ne1}p_j^+ + p_2^+)` of the raised weights, at most ½.

    g grows with every weight when :math:`1-p_1` is written as the sum of the others, and if another weight is the
    largest of the true ones it is at most the :math:`p_2^+` counted here.
    """
    upper = part.upper_weights
    if upper.shape[-1] == 1:
        return torch.zeros_like(upper[:, 0, 0])
    first, place = upper.max(-1, keepdim=True)
    others = upper.scatter(-1, place, 0.0)
    return (first[..., 0] * (others.sum(-1) + others.amax(-1))).clamp(max=0.5).amax(-1)


def _yudin(where: Setting, folded: bool) -> Tensor:
    sharpness = torch.cat([_sharpness(part) for part in paths(where.map, where.point, folded)])
    return nowhere_nan(at_point(*norms_at(where.map, where.point, folded), sharpness) * (1 + gamma(8)))


def _own(where: Setting, folded: bool) -> Tensor:
    return softmax_jacobian(where.map, where.point, folded)


register(
    Bound(
        name="yudin2025.softmax_jacobian",
        statement=r"\|V\|\,\bigl(\|P\|+2\|X\|^2\|A\|\max_ig(P_i)\bigr),\quad g(p)=p_1(1-p_1+p_2)",
        reference=REFERENCE,
        side="upper",
        norm=2,
        scope="point",
        kinds=("dot_product",),
        assumptions=(LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP),
        evaluate=_yudin,
    )
)
register(
    Bound(
        name="howsmooth.softmax_jacobian",
        statement=r"\|P\|\,\|V\|+\max_ig(P_i)\,\|VX_c^\top\|\,\bigl(\|X_cA\|+\|XA^\top+1b^\top\|\bigr)",
        reference="howsmooth",
        side="upper",
        norm=2,
        scope="point",
        kinds=("dot_product",),
        assumptions=(LINEAR, NO_ROTARY, NO_SOFTCAP),
        evaluate=_own,
    )
)
