r"""The softmax Jacobian in attention: Yudin's constant with centred tokens and a query bias.

For attention :math:`f_i = VX^\top p_i`, :math:`p_i = \mathrm{softmax}(XAx_i + Xb)`, the score paths of the Jacobian are
:math:`VX^\top S_iXA\,y_i` and :math:`VX^\top S_iYw_i`, :math:`w_i = Ax_i + b`, for any mask. Since :math:`S_i1 = 0`,
tokens may be centred, :math:`X_c = X - 1\bar x^\top`, wherever they meet :math:`S_i`; and :math:`\sum_i|Yw_i|^2 \le
\|Y\|_F^2\|[w_i]\|^2`.
With ‖S_i‖ ≤ g(P_i) of `howsmooth.bounds.yudin2025` the bound follows. ∎
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.assumptions import LINEAR, NO_ROTARY, NO_SOFTCAP
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.own.three_path import nowhere_nan, spectral, value_gain, weights_norm
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths, paths
from howsmooth.bounds.yudin2025 import sharpness


def softmax_jacobian(attention: AttentionMap, x: Tensor, folded: bool = True) -> Tensor:
    r""":math:`\|P\|\|V\| + \max_ig(P_i)\,\|VX_c^\top\|\,(\|X_cA\| + \|[Ax_i+b]_i\|)`, ``(heads,)``; linear, no
    positions.

    Never above `howsmooth.bounds.yudin2025.softmax_jacobian_bound`, and it takes a query bias.

    >>> import howsmooth as hs
    >>> softmax_jacobian(hs.SelfAttention.random(4), torch.ones(3, 4)) > 0
    tensor([True])
    """
    return torch.cat([_bound(group) for group in paths(attention, x, folded)])


@theorem(
    "howsmooth.softmax_jacobian",
    r"\|P\|\,\|V\|+\max_ig(P_i)\,\|VX_c^\top\|\,\bigl(\|X_cA\|+\|XA^\top+1b^\top\|\bigr)",
    scope="point",
    assumptions=(LINEAR, NO_ROTARY, NO_SOFTCAP),
    on_paths=True,
)
def _bound(group: Paths, where: Setting | None = None) -> Tensor:
    radii = group.radii
    value, pull, push = (
        spectral(vectors) + radius.norm(dim=-1)
        for vectors, radius in ((group.value, radii.value), (group.pull, radii.pull), (group.push, radii.push))
    )
    bound = weights_norm(group) * value_gain(group) + sharpness(group) * value * (pull + push)
    return nowhere_nan(bound * group.allowance)
