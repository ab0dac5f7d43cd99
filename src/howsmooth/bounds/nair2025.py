r"""Nair, *Softmax is 1/2-Lipschitz: A tight bound across all ℓp norms*, 2025 (arXiv 2510.23012).

The Jacobian :math:`S = \mathrm{diag}(p) - pp^\top` of softmax has :math:`\|S\|_q \le 1/2` in every ℓ_q. Proof: the rows
of |S| sum to :math:`2p_j(1-p_j) \le 1/2`, which is the norm in ℓ_∞ and, S being symmetric, in ℓ_1; Riesz and Thorin
interpolate. ∎

For attention :math:`f_i = VX^\top p_i`, :math:`p_i = \mathrm{softmax}(XAx_i)`, the two score paths of the Jacobian are
:math:`VX^\top S_iXA\,y_i` and :math:`VX^\top S_iY\,Ax_i`; with :math:`\sum_i|Yw_i|^2 \le \|Y\|_F^2\|[w_i]\|^2` each is
at most :math:`\|V\|\|X\|\max_i\|S_i\|\,\|X\|\|A\|`. Adding the value path ‖P‖‖V‖ gives the bounds below, for any mask.
"""

from __future__ import annotations

from torch import Tensor

from howsmooth.bounds.assumptions import FINITE, PLAIN
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.own.three_path import value_gain, weights_norm
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths
from howsmooth.norms.small_matrices import spectral

REFERENCE = "Nair 2025, softmax is 1/2-Lipschitz"


def softmax_jacobian_inf_norm(p: Tensor) -> Tensor:
    r""":math:`\max_j 2p_j(1-p_j) \le \tfrac12`: the norm of the Jacobian in ℓ_∞ and ℓ_1, a bound on it in every ℓ_q.

    >>> import torch
    >>> softmax_jacobian_inf_norm(torch.tensor([0.5, 0.25, 0.25]))
    tensor(0.5000)
    """
    return (2 * p * (1 - p)).amax(-1)


def softmax_half(value: Tensor, weights: Tensor, tokens: Tensor, score: Tensor) -> Tensor:
    """‖V‖(‖P‖ + ‖X‖²‖A‖), from ‖V‖, ‖P‖, ‖X‖ and ‖A‖."""
    return value * (weights + tokens.square() * score)


@theorem(
    "nair2025.ball",
    r"\|V\|\,\bigl(\sqrt n+nR^2\|A\|\bigr)",
    reference=REFERENCE,
    scope="ball",
    assumptions=(FINITE, *PLAIN),
    given=lambda where, folded: (*where.on_ball(folded), where.count),
)
def on_ball(value: Tensor, score: Tensor, radius: float, n: float) -> Tensor:
    """‖V‖(√n + nR²‖A‖), as ‖P‖ ≤ √n and ‖X‖ ≤ √n·R on the ball.

    >>> import torch
    >>> one = torch.ones(1)
    >>> on_ball(one, one, radius=1.0, n=4)
    tensor([6.])
    """
    return value * (n**0.5 + n * radius * radius * score)


def norms_at(group: Paths, where: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖V‖, ‖P‖, ‖X‖ and ‖A‖ of every map at x, from above, for linear attention maps without positions."""
    tokens, score = spectral(where.point), where.norms(group)[1]
    return value_gain(group) * group.allowance, weights_norm(group), tokens * group.allowance, score * group.allowance


@theorem(
    "nair2025.softmax_half",
    r"\|V\|\,\bigl(\|P\|+\|X\|^2\|A\|\bigr)",
    reference=REFERENCE,
    scope="point",
    assumptions=PLAIN,
    on_paths=True,
)
def _at_point(group: Paths, where: Setting) -> Tensor:
    return softmax_half(*norms_at(group, where))
