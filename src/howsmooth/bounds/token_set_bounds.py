r"""Dot-product attention on a set of tokens, on the ball B_R with :math:`a = \|A\|R^2`.

Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024 (arXiv 2312.14820), and this project's bounds, for any mask,
query bias and rotary positions.

Proof of the latter. For tangents Y the Jacobian at token i is

.. math:: V\Big[\sum_j P_{ij}(x_j - m_i)\,(A_{ij}^\top x_j + \beta_{ij})\cdot y_i
          + \sum_j P_{ij}\big(y_j + (x_j - m_i)\,(w_{ij}\cdot y_j)\big)\Big], \qquad w_{ij} = A_{ij}x_i + b_{ij}.

By Cauchy–Schwarz under P_i the first sum is at most spread · pull · :math:`|y_i|` and the second at most
:math:`(\text{value} + \text{push}\cdot\text{spread})\,(\sum_j P_{ij}|y_j|^2)^{1/2}`, with the numbers of `HeadNumbers`;
summing squares over i brings the largest column sum of P, which is at most n. A soft-cap multiplies
logit derivatives by factors in [0, 1] and only shrinks both sums. Without positions and masks the density of P_i
against the uniform weights is at most :math:`e^{2\,\text{swing}}`, which replaces n: the mean-field regime. ∎

On the ball of radius R: value = ‖V‖, spread = ‖V‖R, pull = ‖A‖R, push = ‖A‖R + |b|, swing = ‖A‖R² + |b|R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.catalogue import (
    CAUSAL,
    LINEAR,
    NO_PLACES,
    NO_QUERY_BIAS,
    NO_ROTARY,
    NO_SOFTCAP,
    PLAIN,
    theorem,
)
from howsmooth.bounds.question_setting import HeadNumbers

CASTIN = "Castin, Ablin, Peyré 2024"


@theorem(
    "castin2024.sqrt_n",
    r"\sqrt3\,\|V\|\,\bigl(\|A\|^2R^4(4n+1)+n\bigr)^{1/2}",
    reference=f"{CASTIN}, Theorem 3.3",
    scope="ball",
    assumptions=PLAIN,
    given=lambda where, folded: (*where.on_ball(folded), where.count),
)
def castin_sqrt_n(value: Tensor, score: Tensor, radius: float, n: float) -> Tensor:
    r"""Theorem 3.3: :math:`\mathrm{Lip}(f|_{B_R^n}) \le \sqrt3\,\|V\|\,(\|A\|^2R^4(4n+1) + n)^{1/2}`, masked or not.

    Since :math:`(u+v+w)^2 \le 3(u^2+v^2+w^2)`, it follows from
    `token_set_sqrt_n`, never larger.

    Args:
        value, score: ‖V‖ and ‖A‖ of each head. radius: R. n: number of tokens.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> float(castin_sqrt_n(one, one, radius=1.0, n=4))  # √3·√21
    7.93725...
    """
    a = score * radius * radius
    return 3**0.5 * value * (a.square() * (4 * n + 1) + n).sqrt()


@theorem(
    "castin2024.mean_field",
    r"\|V\|\,(1+3\|A\|R^2)\,e^{2\|A\|R^2}",
    reference=f"{CASTIN}, Theorem 3.5",
    scope="mean-field W2",
    assumptions=(LINEAR, NO_PLACES, NO_QUERY_BIAS, NO_SOFTCAP),
    given=lambda where, folded: where.on_ball(folded),
)
def castin_mean_field(value: Tensor, score: Tensor, radius: float) -> Tensor:
    r"""Theorem 3.5: :math:`\mathrm{Lip}_{W_2}(F|_{\mathcal P(B_R)}) \le \|V\|(1 + 3\|A\|R^2)\,e^{2\|A\|R^2}`, unmasked.

    It bounds the constant for every n. **False under a mask**; see the errata.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> [round(float(castin_mean_field(one, b * one, 1.0)), 1) for b in (1, 2)]
    [29.6, 382.2]
    """
    a = score * radius * radius
    return value * (1 + 3 * a) * torch.exp(2 * a)


@theorem(
    "howsmooth.sqrt_n",
    r"\|V\|\,\bigl(a+(1+a+|b|R)\sqrt n\bigr),\quad a=R^2\max_{ij}\|A_{ij}\|",
    scope="ball",
    assumptions=(LINEAR,),
    given=lambda where, folded: (where.numbers(folded), where.count),
)
def token_set_sqrt_n(numbers: HeadNumbers, n: float) -> Tensor:
    r"""On the ball :math:`\|V\|\,(a + (1+a+|b|R)\sqrt n)`, for any mask, additive logit bias and rotary positions."""
    return _token_set_bound(numbers, n**0.5)


@theorem(
    "howsmooth.mean_field",
    r"\|V\|\,\bigl(a+(1+a+|b|R)\,e^{a+|b|R}\bigr)",
    scope="mean-field W2",
    assumptions=(LINEAR, NO_PLACES),
    given=lambda where, folded: (where.numbers(folded),),
)
def token_set_mean_field(numbers: HeadNumbers) -> Tensor:
    r"""On the ball :math:`\|V\|\,(a + (1+a+|b|R)\,e^{a+|b|R})` in W₂, unmasked, without positions: every n at once."""
    return _token_set_bound(numbers, torch.exp(numbers.swing))


@theorem(
    "howsmooth.unified",
    r"\|V\|\,\bigl[a+(1+a+|b|R)\min(\sqrt n,\,e^{a+|b|R})\bigr]",
    scope="ball",
    assumptions=(LINEAR, NO_PLACES),
    given=lambda where, folded: (where.numbers(folded), where.count),
)
def unified(numbers: HeadNumbers, n: float) -> Tensor:
    r"""On the ball :math:`\|V\|\,[a + (1+a+|b|R)\min(\sqrt n, e^{a+|b|R})]`: both regimes, crossing at n = e^{2a}.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1))
    >>> [round(float(hs.bounds.get("howsmooth.unified")(head, n=n, over=hs.sets.Ball(1.0))), 2) for n in (4, 10**9)]
    [5.0, 6.44]
    """
    return torch.minimum(token_set_sqrt_n(numbers, n), token_set_mean_field(numbers))


def crossover(numbers: HeadNumbers) -> Tensor:
    """The n = e^{2·swing} (e^{2a} on the ball) at which the mean-field form takes over from √n."""
    return torch.exp(2 * numbers.swing)


@theorem(
    "howsmooth.masked_mean_field",
    r"\|V\|\,\bigl(a+2(1+2a)\,e^{2a}\bigr)",
    scope="mean-field d2",
    assumptions=(LINEAR, CAUSAL, NO_ROTARY),
    given=lambda where, folded: (where.numbers(folded),),
)
def masked_mean_field(numbers: HeadNumbers) -> Tensor:
    r"""On the ball :math:`\|V\|\,(a + 2(1+2a)\,e^{2a})` in the conditional distance d₂, causal mask, every n.

    The density of P_i against the uniform weights on the past is at most e^{2·swing}, and |x_j − m_i| ≤ 2ρ‖Γ‖, so that
    the second sum is at most (value + 2·spread·push)·e^{2·swing} times the running mean of |y_j|; by Hardy's inequality
    running means have norm at most 2 in ℓ². With A = 0 that factor is reached: the unmasked constants are false here.
    """
    return numbers.spread * numbers.pull + 2 * (numbers.value + 2 * numbers.spread * numbers.push) * torch.exp(
        2 * numbers.swing
    )


def _token_set_bound(numbers: HeadNumbers, growth: Tensor | float) -> Tensor:
    return numbers.spread * numbers.pull + (numbers.value + numbers.spread * numbers.push) * growth
