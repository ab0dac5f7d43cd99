r"""Nair, *Softmax is 1/2-Lipschitz: A tight bound across all ℓp norms*, 2025 (arXiv 2510.23012).

The Jacobian :math:`S = \mathrm{diag}(p) - pp^\top` of softmax has :math:`\|S\|_q \le 1/2` in every ℓ_q. Proof: the rows
of |S| sum to :math:`2p_j(1-p_j) \le 1/2`, which is the norm in ℓ_∞ and, S being symmetric, in ℓ_1; Riesz and Thorin
interpolate. ∎

For attention :math:`f_i = VX^\top p_i`, :math:`p_i = \mathrm{softmax}(XAx_i)`, the two score paths of the Jacobian are
:math:`VX^\top S_iXA\,y_i` and :math:`VX^\top S_iY\,Ax_i`; with :math:`\sum_i|Yw_i|^2 \le \|Y\|_F^2\|[w_i]\|^2` each is
at most :math:`\|V\|\|X\|\max_i\|S_i\|\,\|X\|\|A\|`. Adding the value path ‖P‖‖V‖ gives the bounds below, for any mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.assumptions import FINITE, LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP
from howsmooth.bounds.catalogue import Bound, register
from howsmooth.bounds.heads import head_numbers, norm_rounding
from howsmooth.bounds.own.three_path import nowhere_nan, value_gain, weights_norm
from howsmooth.bounds.paths import paths
from howsmooth.bounds.settings import Setting
from howsmooth.norms.matrices import spectral
from howsmooth.sets import TokenSet

REFERENCE = "Nair 2025"


def softmax_jacobian_norm(p: Tensor) -> Tensor:
    r""":math:`\max_j 2p_j(1-p_j) \le \tfrac12`: the norm of the Jacobian in ℓ_∞ and ℓ_1, a bound on it in every ℓ_q.

    >>> softmax_jacobian_norm(torch.tensor([0.5, 0.25, 0.25]))
    tensor(0.5000)
    """
    return (2 * p * (1 - p)).amax(-1)


def at_point(value: Tensor, weights: Tensor, tokens: Tensor, score: Tensor) -> Tensor:
    """‖V‖(‖P‖ + ‖X‖²‖A‖), from ‖V‖, ‖P‖, ‖X‖ and ‖A‖."""
    return value * (weights + tokens.square() * score)


def on_ball(value: Tensor, score: Tensor, radius: float, n: float) -> Tensor:
    """‖V‖(√n + nR²‖A‖), as ‖P‖ ≤ √n and ‖X‖ ≤ √n·R on the ball.

    >>> one = torch.ones(1)
    >>> on_ball(one, one, radius=1.0, n=4)
    tensor([6.])
    """
    return value * (n**0.5 + n * radius * radius * score)


def norms_at(attention: AttentionMap, x: Tensor, folded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖V‖, ‖P‖, ‖X‖ and ‖A‖ of every head at x, from above, for linear attention maps without positions."""
    parts = list(paths(attention, x, folded))
    value = torch.cat([value_gain(part) for part in parts])
    weights = torch.cat([weights_norm(part) for part in parts])
    score = head_numbers(attention, TokenSet.ball(1.0, attention.in_features), n=len(x)).score
    score = score + norm_rounding(attention, folded)[1]
    allowance = max(part.allowance for part in parts)
    return value * allowance, weights, spectral(x.double()) * allowance, score * allowance


def _at_point(where: Setting, folded: bool) -> Tensor:
    return nowhere_nan(at_point(*norms_at(where.map, where.point, folded)))


def _on_ball(where: Setting, folded: bool) -> Tensor:
    numbers = where.numbers(folded)
    return on_ball(numbers.value, numbers.score, where.radius, where.count)


register(
    Bound(
        name="nair2025.softmax_half",
        statement=r"\|V\|\,\bigl(\|P\|+\|X\|^2\|A\|\bigr)",
        reference=f"{REFERENCE}, softmax is 1/2-Lipschitz",
        side="upper",
        norm=2,
        scope="point",
        kinds=("dot_product",),
        assumptions=(LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP),
        evaluate=_at_point,
    )
)
register(
    Bound(
        name="nair2025.ball",
        statement=r"\|V\|\,\bigl(\sqrt n+nR^2\|A\|\bigr)",
        reference=f"{REFERENCE}, softmax is 1/2-Lipschitz",
        side="upper",
        norm=2,
        scope="ball",
        kinds=("dot_product",),
        assumptions=(FINITE, LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP),
        evaluate=_on_ball,
    )
)
