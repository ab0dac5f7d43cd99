r"""Sigmoid attention: Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid Self-Attention*, 2024
(arXiv 2409.04431)."""

from __future__ import annotations

from torch import Tensor

from howsmooth.bounds.assumptions import LINEAR, NO_QUERY_BIAS, NO_ROTARY, no_bias
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths

REFERENCE = "Ramapuram et al. 2024"


def sigmoid_local(value: Tensor, score: Tensor, weights: Tensor, x: Tensor, slopes: Tensor | None = None) -> Tensor:
    r"""At X: :math:`\|V\|\,\bigl(n\sup\sigma + 2n\sup\sigma'\,\|A\|\cdot\tfrac1n\sum_i|x_i|^2\bigr)`, suprema over the
    logits at X.

    Proof. J(X)Y at i is :math:`V[\sum_j P_{ij}y_j + \sum_j P'_{ij}x_j\,(A^\top x_j\cdot y_i) +
    \sum_j P'_{ij}x_j\,(Ax_i\cdot y_j)]` with P = σ and P' = σ' at the logits. ‖P‖ is at most n times its largest entry;
    each of the other sums is at most :math:`\sup\sigma'\,\|A\|\sum_j|x_j|^2`, the last by Cauchy–Schwarz over j and the
    sum of squares over i. Masks and additive biases only change the entries of P, and a soft-cap shrinks logit
    derivatives. ∎

    Args:
        value, score: ‖V‖ and ‖A‖ of each head. weights: P, ``(heads, n, n)``. x: ``(n, d)``.
        slopes: P', when known more exactly than P(1 − P).

    >>> import torch
    >>> one, x = torch.ones(1), torch.ones(2, 1)
    >>> float(sigmoid_local(one, one, torch.full((1, 2, 2), 0.5), x))  # 2·½ + 2·2·¼
    2.0
    """
    largest = weights.amax((-2, -1))
    slope = (weights * (1 - weights) if slopes is None else slopes).amax((-2, -1))
    return value * (len(x) * largest + 2 * slope * score * x.square().sum())


NO_KEY_OR_VALUE_BIAS = Assumption(
    "keys and values have no bias (weights that do not sum to one let both through)",
    lambda where: no_bias(where.map.key_bias, where.map.value_bias),
)


@theorem(
    "ramapuram2024.local",
    r"\|V\|\,\bigl(n\sup\sigma+2n\sup\sigma'\,\|A\|\,\tfrac1n\textstyle\sum_i|x_i|^2\bigr)",
    reference=REFERENCE,
    scope="point",
    kinds=("sigmoid",),
    assumptions=(LINEAR, NO_QUERY_BIAS, NO_KEY_OR_VALUE_BIAS, NO_ROTARY),
    on_paths=True,
)
def _local(group: Paths, where: Setting) -> Tensor:
    return sigmoid_local(*where.norms(group), group.upper_weights, where.point, group.upper_slopes) * group.allowance
