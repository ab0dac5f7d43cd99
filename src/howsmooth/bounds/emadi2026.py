r"""Sensitivity of attention weights: Emadi, *Exact Attention Sensitivity and the Geometry of Transformer Stability*,
2026 (arXiv 2602.18849).

**The norm of the softmax Jacobian from ℓ∞ to ℓ1.** With :math:`S = \mathrm{diag}(p) - pp^\top`,

.. math:: \|S\|_{\infty\to1} = \theta(p) = \max_A 4\,p(A)\,(1-p(A)) = 1 - \min_A\,(1-2p(A))^2 ,

the balanced mass: 1 where the weights split into two halves of the same mass, and small where one token has nearly all.

Proof. The norm is the largest :math:`\|Ss\|_1` over signs s, since a convex function on a cube is largest at a corner.
With A the tokens of sign +1 and m = p(A), :math:`p\cdot s = 2m-1` and :math:`(Ss)_j = p_j(s_j - (2m-1))`, which is
:math:`2(1-m)p_j` on A and :math:`-2mp_j` elsewhere; the sum of absolute values is :math:`4m(1-m)`. ∎

To find the best A is to split numbers evenly, which is hard in general; both ends are cheap (`balanced_mass`).

**Attention in the norm of the largest token.** The paper measures tokens by the largest of them. For every query i,
with all tokens moved by at most 1,

.. math:: \|J\|_{\mathrm{token}} \le \max_i\Bigl[\|V\| + \theta(P_i)\,
          \bigl(\max_j|M^{q\top}(k_j-c)| + |M^{k\top}q_i|\bigr)\,\max_j|v_j - c'|\Bigr]

for any centres c, c': the bound does not grow with n as such. (This form, with centres, is this project's; the paper's
own constants are products of norms of weights.)

Proof. Output i moves by :math:`\sum_jP_{ij}Vy_j + \sum_jdP_{ij}v_j`. The first is at most ‖V‖, the weights of a row
summing to one. As :math:`\sum_jdP_{ij} = 0`, the second is :math:`\sum_jdP_{ij}(v_j-c')`, at most
:math:`\|dP_i\|_1\max_j|v_j-c'|`, and :math:`dP_i = S_i\,ds_i` with :math:`\|dP_i\|_1\le\theta(P_i)\|ds_i\|_\infty`. The
logits move by :math:`ds_{ij} = y_i\cdot M^{q\top}k_j + M^{k\top}q_i\cdot y_j`, where a constant over j, such as
:math:`y_i\cdot M^{q\top}c`, changes no weight. ∎
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.assumptions import LINEAR, NO_ROTARY, NO_SOFTCAP
from howsmooth.bounds.catalogue import CATALOGUE, theorem
from howsmooth.bounds.own.three_path import nowhere_nan, value_gain
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths

REFERENCE = "Emadi 2026"
_NAME = "emadi2026.balanced_mass"


def balanced_mass(p: Tensor) -> tuple[Tensor, Tensor]:
    r"""Both ends of θ(p) for weights along the last axis.

    From below the weights are dealt out, the largest first, always to the lighter half. From above no half is lighter
    than what the largest weight leaves: :math:`4t(1-t)` with :math:`t = \max(\tfrac12, \max_jp_j)`. The ends meet where
    one token has half of the mass or more.

    >>> [round(float(end), 3) for end in balanced_mass(torch.tensor([0.7, 0.2, 0.1]))]
    [0.84, 0.84]
    >>> [round(float(end), 3) for end in balanced_mass(torch.tensor([0.4, 0.3, 0.3]))]
    [0.96, 1.0]
    """
    halves = torch.zeros((*p.shape[:-1], 2), dtype=p.dtype, device=p.device)
    for weight in p.sort(dim=-1, descending=True).values.unbind(-1):
        lighter = halves.argmin(-1, keepdim=True)
        halves = halves.scatter_add(-1, lighter, weight[..., None])
    return 4 * halves[..., 0] * halves[..., 1], most_mass(1 - p.amax(-1))


def most_mass(rest: Tensor) -> Tensor:
    r""":math:`\theta` from above, by what all tokens but the heaviest have at most.

    >>> most_mass(torch.tensor([0.1, 0.5, 0.9]))
    tensor([0.3600, 1.0000, 1.0000])
    """
    light = rest.clamp(0.0, 0.5)
    return 4 * light * (1 - light)


@theorem(
    _NAME,
    r"\max_i\bigl[\|V\|+\theta(P_i)\,(\max_j|A^\top(x_j-c)|+|Ax_i+b|)\,\max_j|V(x_j-c')|\bigr]",
    reference=REFERENCE,
    norm="token",
    scope="point",
    assumptions=(LINEAR, NO_ROTARY, NO_SOFTCAP),
    block=lambda where: CATALOGUE[_NAME]._heads(where, True).sum(),
    on_paths=True,
)
def _bound(group: Paths, where: Setting | None = None) -> Tensor:
    upper, radii = group.upper_weights, group.radii
    heaviest = upper.argmax(-1, keepdim=True)
    mass = most_mass(upper.scatter(-1, heaviest, 0.0).sum(-1))  # (g, n)
    value, pull = (_reach(one, far) for one, far in ((group.value, radii.value), (group.pull, radii.pull)))
    push = group.push.norm(dim=-1) + radii.push
    rows = value_gain(group)[:, None] + mass * (pull[:, None] + push) * value[:, None]
    return nowhere_nan(rows.amax(-1) * group.allowance)


def _reach(vectors: Tensor, radius: Tensor) -> Tensor:
    """The largest distance from the mean of all, ``(g,)``, with the rounding of each."""
    centre = vectors.mean(1, keepdim=True)
    return ((vectors - centre).norm(dim=-1) + radius).amax(-1)
