r"""The local bound: variances at the input in place of the radius of the ball.

With V the value–output matrix and, under the weights of row i, :math:`m_i` the mean token,
:math:`s_i^2 = \sum_jS_{ij}|x_j-m_i|^2`, :math:`w_{ij} = M^{k\top}_jq_i` (Ax_i + b without positions) and
:math:`C_i = \sum_jS_{ij}(x_j-m_i)k_j^\top M^q_i` (Cov_i A without positions):

.. math:: \|J\| \le \|V\|\Big[\max_i\|C_i\| + \max_i\big(1 + s_i\max_j|w_{ij}|\big)\,
          \Big(\max_j\sum_iP_{ij}\Big)^{1/2}\Big].

Proof. By `howsmooth.bounds.three_paths` with :math:`v_j = Vx_j` the Jacobian at token i is :math:`V[C_iy_i +
\sum_j(P_{ij}y_j + S_{ij}(x_j-m_i)(w_{ij}\cdot y_j))]`. The first part is block diagonal. As :math:`0 \le S \le P`,
Cauchy–Schwarz bounds the second by :math:`(1 + s_i\max_j|w_{ij}|)(\sum_jP_{ij}|y_j|^2)^{1/2}`, the maximum over the
tokens that i sees; summing squares over i brings the column sums. ∎

It holds for any mask, query bias, rotary positions, q/k normalisation and soft-cap, as long as values are linear; also
for L2 attention. At one input `howsmooth.bounds.own.three_path` is the sharper bound on trained heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.assumptions import KNOWN_ROUNDING, LINEAR_VALUES
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.key_value_spread import about_means, keys, product_slack
from howsmooth.bounds.own.three_path import TINY, largest_block, nowhere_nan, psd_norm, push_radii, value_gain
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths, distances, paths


def local(attention: AttentionMap, x: Tensor, folded: bool = True) -> Tensor:
    """The local bound of every head at x, ``(heads,)`` or ``(batch, heads)``; values must be linear.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.eye(1), torch.eye(1))
    >>> local(head, torch.tensor([[0.0], [1.0], [-1.0]]))  # 2/3 + (1 + 0.64)·√1.09
    tensor([2.3...], dtype=torch.float64)
    """
    bounds = torch.cat([_local(group) for group in paths(attention, x, folded)])
    return bounds.reshape(*x.shape[:-2], attention.heads)


@theorem(
    "howsmooth.local",
    r"\|V\|\bigl[\max_i\|C_iA\|+\max_i(1+|Ax_i+b|\,s_i)\,(\max_j\textstyle\sum_iP_{ij})^{1/2}\bigr]",
    scope="point",
    kinds=("dot_product", "l2"),
    assumptions=(LINEAR_VALUES, KNOWN_ROUNDING),
    on_paths=True,
)
def _local(group: Paths, where: Setting | None = None) -> Tensor:
    """The formula with weights, spreads and pushes raised by what rounding may have taken from them."""
    cloud = about_means(group, group.tokens, 0.0)
    mean = group.weights @ group.tokens if group.softmax else torch.zeros_like(group.tokens)
    spread = (group.upper_slopes * distances(mean, group.tokens).square()).sum(-1)  # s_i²
    pulls = (group.upper_slopes @ group.pull.square().sum(-1, keepdim=True))[..., 0]

    def gram(maps: Tensor, i: Tensor) -> Tensor:
        block = group.query_block(maps, i, group.tokens)
        short = block if block.shape[-2] <= block.shape[-1] else block.mT
        return short @ short.mT

    maps = group.pull_map
    gain = 1.0 if maps is None else psd_norm(maps.mT @ maps, squarings=3)
    diagonal = largest_block(*product_slack(group, cloud, keys(group)), spread * pulls * gain, gram)
    push = (group.push_lengths() + push_radii(group)).masked_fill(~group.seen, 0.0).amax(-1)
    columns = group.upper_weights.sum(-2).amax(-1)
    lengths = spread.clamp_min(TINY).sqrt() + cloud.error
    bound = value_gain(group) * (diagonal + (1 + lengths * push).amax(-1) * columns.sqrt())
    return nowhere_nan(bound * group.allowance)
