r"""Sigmoid attention, at an input and on a set of tokens.

At an input: Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid Self-Attention*, 2024
(arXiv 2409.04431). On a set of tokens this project's bound, with biases, masks, a soft-cap and rotary positions:
J(X)Y at token i is

.. math:: \sum_j \big(P_{ij}V + P'_{ij}v_jw_{ij}^\top\big)y_j + \sum_j P'_{ij}v_j\,(g_{ij}\cdot y_i),\qquad
          P' = P(1-P),

with :math:`w_{ij}, g_{ij}` the derivatives of logit (i, j) in the key's and the query's token, and :math:`v_j` the
value, its bias included: weights do not sum to one here. Let :math:`|w| \le` push, :math:`|g| \le` pull,
:math:`|v| \le` size, and let every weight lie in [p₀, p₁]. A matrix of n × n blocks has at most n times the norm of its
largest block, and row i of the second sum at most n times its largest term, hence

.. math:: \|J\| \le n\Big[\max_{p_0\le p\le p_1}\big(p\,\|V\| + p(1-p)\,\text{size}\cdot\text{push}\big)
          + \max_{p_0\le p\le p_1}p(1-p)\cdot\text{size}\cdot\text{pull}\Big]. \qquad ∎

A soft-cap multiplies logit derivatives by factors in [0, 1]; a mask sets blocks to zero. With the usual shift −ln n and
logits of size S before it, np ≤ e^S: the bound stays finite as n grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.logit_terms import Terms
from howsmooth.attention.masks import Maps
from howsmooth.bounds.catalogue import FINITE, LINEAR, NO_QUERY_BIAS, NO_ROTARY, Assumption, no_bias, theorem
from howsmooth.bounds.head_constants import HeadScores, output_factor, value_matrices
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths
from howsmooth.norms.small_matrices import spectral
from howsmooth.sets.ellipsoid import Ellipsoid

RAMAPURAM = "Ramapuram et al. 2024"


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
    reference=RAMAPURAM,
    scope="point",
    kinds=("sigmoid",),
    assumptions=(LINEAR, NO_QUERY_BIAS, NO_KEY_OR_VALUE_BIAS, NO_ROTARY),
    on_paths=True,
)
def _local(group: Paths, where: Setting) -> Tensor:
    return sigmoid_local(*where.norms(group), group.upper_weights, where.point, group.upper_slopes) * group.allowance


@dataclass(frozen=True)
class SigmoidNumbers:
    """Constants of each head of sigmoid attention on a set of tokens; every entry is ``(heads,)``, float64.

    Attributes:
        value: ‖V‖.
        size: ≥ |v_j|.
        push: ≥ |∂logit/∂x_j|.
        pull: ≥ |∂logit/∂x_i|.
        low, high: every logit lies between them, shift included.
    """

    value: Tensor
    size: Tensor
    push: Tensor
    pull: Tensor
    low: Tensor
    high: Tensor


def sigmoid(numbers: SigmoidNumbers, n: float) -> Tensor:
    r"""The bound of this module; on the ball, without biases, never above
    :math:`\|V\|\,(n\sup\sigma + 2n\sup\sigma'\,\|A\|R^2)`.

    >>> import howsmooth as hs
    >>> attention = hs.SigmoidAttention(*torch.eye(1).repeat(3, 1, 1))
    >>> bound, ball = hs.bounds.get("howsmooth.sigmoid"), hs.sets.Ball(1.0)
    >>> [round(float(bound(attention, n=n, over=ball)), 2) for n in (1, 100, 10**6)]
    [1.18, 7.8, 8.15]
    """
    low, high = torch.sigmoid(numbers.low), torch.sigmoid(numbers.high)
    cross = numbers.size * numbers.push
    # p·value + p(1−p)·cross is concave in p, with its peak at (value + cross)/(2·cross).
    peak = torch.where(cross > 0, (numbers.value + cross) / (2 * cross), 1.0)
    p = torch.minimum(torch.maximum(peak, low), high)
    steepest = torch.minimum(low.clamp(min=0.5), high)
    diagonal = steepest * (1 - steepest) * numbers.size * numbers.pull
    return n * (p * numbers.value + p * (1 - p) * cross + diagonal)


def sigmoid_numbers(attention: AttentionMap, tokens: Ellipsoid, n: int, folded: bool = True) -> SigmoidNumbers:
    """The numbers of every head of sigmoid attention with linear queries, keys and values.

    Queries are q₀ + QΓz and keys k₀ + KΓz on the set, |z| ≤ ρ; their dot product is multiplied out. Rotations are
    isometries (up to their amplitude), so with them every dot product is replaced by the product of its norms.
    """
    axes, centre, reach, scores = tokens.axes, tokens.centre, tokens.reach, HeadScores.of(attention, 1)
    query, key, rotary = scores.query, scores.key, scores.rotary
    q0, k0 = scores.at(centre)

    def meet(left: Tensor, right: Tensor) -> Tensor:
        if rotary is None:
            return spectral(left.mT @ right)
        # Coordinates that do not turn keep their length.
        return max(1.0, rotary.amplitude**2) * spectral(left) * spectral(right)

    swing = reach * (meet(k0, query @ axes) + meet(q0, key @ axes) + reach * meet(key @ axes, query @ axes))
    middle = (q0 * k0).sum((-2, -1))
    if rotary is not None:
        swing, middle = swing + meet(q0, k0), torch.zeros_like(middle)
    low, high = middle - swing, middle + swing
    if attention.softcap is not None:
        low, high = (attention.softcap * torch.tanh(end / attention.softcap) for end in (low, high))
    shift = _shift(attention, n)
    value, bias = value_matrices(attention, folded), _value_bias(attention, folded)
    return SigmoidNumbers(
        value=spectral(value),
        size=(value @ centre + bias).norm(dim=-1) + reach * spectral(value @ axes),
        push=meet(key, q0) + reach * meet(key, query @ axes),
        pull=meet(query, k0) + reach * meet(query, key @ axes),
        low=low + shift,
        high=high + shift,
    )


def _value_bias(attention: AttentionMap, folded: bool) -> Tensor | float:
    """The constant that `howsmooth.bounds.head_constants.value_matrices` leaves out of the values."""
    if attention.value_bias is None:
        return 0.0
    bias = attention.per_head(attention.value_bias.double())[..., None]
    return (output_factor(attention) @ bias if folded else bias)[..., 0]


def _shift(attention: AttentionMap, n: int) -> float:
    """The shift that SigmoidAttention adds to every logit: its last term."""
    maps = Maps.every(1, attention.heads, n, torch.zeros((), dtype=torch.float64))
    block = list(attention.terms)[-1].block(slice(0, 1), slice(0, 1), maps)
    assert block is not None
    return float(block)


ONLY_MASKED = Assumption(
    "nothing but a mask and the shift is added to the logits",
    lambda where: Terms(list(where.map.terms)[:-1]).hides_only,
)


@theorem(
    "howsmooth.sigmoid",
    r"n\bigl[\max_p\bigl(p\|V\|+p(1-p)\|v\|\,|w|\bigr)+\max_p p(1-p)\,\|v\|\,|g|\bigr]",
    scope="ball",
    kinds=("sigmoid",),
    assumptions=(LINEAR, FINITE, ONLY_MASKED),
)
def _sigmoid(where: Setting, folded: bool) -> Tensor:
    assert where.tokens is not None
    return sigmoid(sigmoid_numbers(where.map, where.tokens, int(where.count), folded), where.count)
