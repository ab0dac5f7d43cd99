r"""Sigmoid attention on a set of tokens, with biases, masks, a soft-cap and rotary positions.

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
from howsmooth.attention.masks import Maps, Terms
from howsmooth.bounds.assumptions import FINITE, LINEAR
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.head_constants import HeadScores, output_factor, value_matrices
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral
from howsmooth.sets.ellipsoid import Ellipsoid


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

    def meet(left: Tensor, right: Tensor) -> Tensor:
        if rotary is None:
            return spectral(left.mT @ right)
        # Coordinates that do not turn keep their length.
        return max(1.0, rotary.amplitude**2) * spectral(left) * spectral(right)

    q0 = (query @ centre + scores.query_bias)[..., None]
    k0 = (key @ centre + scores.key_bias)[..., None]
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
