r"""LipschitzNorm attention in terms of its weights, for all inputs of all lengths.

The attention is that of Dasoulas, Scaman and Virmaux 2021 (`howsmooth.bounds.dasoulas2021`), with their divisor c.

Proof, for one head. Write :math:`u = \|Q\|_F`, κ and ω for the largest key and value, :math:`s_{ij} = q_i\cdot k_j/c`.

1. *Value path.* :math:`|s_{ij}| \le t_i := |q_i|/u \le 1` and :math:`\sum_i t_i^2 = 1`, so by
   :math:`e^t + (n-1)e^{-t} \ge 2\sqrt{n-1}` and the convexity of sinh

   .. math:: P_{ij} \le \frac{e^{t_i}}{e^{t_i} + (n-1)e^{-t_i}} = \frac1n + \frac{n-1}{n}\,
             \frac{2\sinh t_i}{e^{t_i} + (n-1)e^{-t_i}} \le \frac1n + \frac{\sqrt{n-1}}{n}\,\sinh(1)\,t_i.

   Since :math:`\sum_i t_i \le \sqrt n`, columns of P sum to at most 1 + sinh 1, and ‖P‖ ≤ √(1 + sinh 1).
2. *Score path.* Row i moves by at most :math:`\omega\,(\sum_j P_{ij}\,ds_{ij}^2)^{1/2}`. Distribute c over the factors:
   :math:`s_{ij} = (q_i/u)\cdot(k_j/\kappa)`, :math:`(q_i/u)\cdot(k_j/\omega)` or
   :math:`(q_i/\omega)\cdot(k_j/\kappa)` in the three branches of the maximum. In each, the one of u, κ, ω that is not
   divided by is the smallest of the three.
   dQ: :math:`Q/\|Q\|_F` has a derivative of norm at most 1/u, so this part is at most ‖dQ‖.
   dK: :math:`\sum_i |q_i|^2P_{ij}/u^2 =: a_j` sum to one; dividing by the largest key, number \*, moves key j by
   at most :math:`(|dk_j| + |dk_*|)/\kappa` (the key \* itself by :math:`|dk_*|/\kappa`), and
   :math:`\sum_{j\ne *} a_j(|dk_j| + |dk_*|)^2 + a_*|dk_*|^2 \le 2\|dK\|^2`: at most √2·‖dK‖.
   dω, in the branches that divide by it: :math:`\omega\,(\sum_i t_i^2)^{1/2}|d\omega|/\omega \le \|dV\|`. ∎

As a map of (Q, K, V) the constant is thus at most ((1 + √(1 + sinh 1))² + 3)^{1/2} < 3.03, which implies the constant
e√3 + 2√6 ≈ 9.61 that the paper is cited for.
"""

from __future__ import annotations

import math

from torch import Tensor

from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.dasoulas2021 import LIPSCHITZ_NORM, projections_of
from howsmooth.bounds.head_constants import output_factor, value_matrices
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral

MIXING = math.sqrt(1 + math.sinh(1))
"""‖P‖ ≤ √(1 + sinh 1) ≈ 1.475, whatever the tokens."""


def lipschitz_norm(mixed: Tensor, output: Tensor | float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r""":math:`\sqrt{1+\sinh1}\,\|WW_V\| + \|W\|(\|W_V\| + \|W_Q\| + \sqrt2\,\|W_K\|)`, for every input and every n.

    Args:
        mixed: ‖WW_V‖. output, query, key, value: ‖W‖, ‖W_Q‖, ‖W_K‖, ‖W_V‖. All of each head.

    >>> import torch, howsmooth as hs
    >>> attention = hs.LipschitzNormAttention(*torch.eye(2).repeat(3, 1, 1))
    >>> round(float(hs.bounds.get("howsmooth.lipschitz_norm")(attention)), 3)
    4.889
    """
    return MIXING * mixed + output * (value + query + 2**0.5 * key)


@theorem(
    "howsmooth.lipschitz_norm",
    r"\sqrt{1+\sinh 1}\,\|WW_V\|+\|W\|\bigl(\|W_V\|+\|W_Q\|+\sqrt2\,\|W_K\|\bigr)",
    reference="howsmooth, for the attention of Dasoulas, Scaman, Virmaux 2021",
    **LIPSCHITZ_NORM,
)
def _lipschitz_norm(where: Setting, folded: bool) -> Tensor:
    maps = projections_of(where)
    query, key, value = (spectral(w.double()) for w in (maps.query_weight, maps.key_weight, maps.value_weight))
    if not folded:
        return lipschitz_norm(value, 1.0, query, key, value)
    return lipschitz_norm(spectral(value_matrices(maps)), spectral(output_factor(maps)), query, key, value)
