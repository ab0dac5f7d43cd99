r"""Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024 (arXiv 2312.14820).

Dot-product attention on the ball B_R, with :math:`a = \|A\|R^2`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.bounds.assumptions import (
    AT_LEAST_TWO,
    BALL,
    FINITE,
    LINEAR,
    NO_PLACES,
    NO_QUERY_BIAS,
    NO_SOFTCAP,
    PLAIN,
    UNMASKED_OR_CAUSAL,
)
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.head_constants import query_key, value_matrices
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral

REFERENCE = "Castin, Ablin, Peyré 2024"


@theorem(
    "castin2024.sqrt_n",
    r"\sqrt3\,\|V\|\,\bigl(\|A\|^2R^4(4n+1)+n\bigr)^{1/2}",
    reference=f"{REFERENCE}, Theorem 3.3",
    scope="ball",
    assumptions=PLAIN,
    given=lambda where, folded: (*where.on_ball(folded), where.count),
)
def sqrt_n(value: Tensor, score: Tensor, radius: float, n: float) -> Tensor:
    r"""Theorem 3.3: :math:`\mathrm{Lip}(f|_{B_R^n}) \le \sqrt3\,\|V\|\,(\|A\|^2R^4(4n+1) + n)^{1/2}`, masked or not.

    Since :math:`(u+v+w)^2 \le 3(u^2+v^2+w^2)`, it follows from
    `howsmooth.bounds.own.token_set_bounds.token_set_sqrt_n`, never larger.

    Args:
        value, score: ‖V‖ and ‖A‖ of each head. radius: R. n: number of tokens.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> float(sqrt_n(one, one, radius=1.0, n=4))  # √3·√21
    7.93725...
    """
    a = score * radius * radius
    return 3**0.5 * value * (a.square() * (4 * n + 1) + n).sqrt()


@theorem(
    "castin2024.mean_field",
    r"\|V\|\,(1+3\|A\|R^2)\,e^{2\|A\|R^2}",
    reference=f"{REFERENCE}, Theorem 3.5",
    scope="mean-field W2",
    assumptions=(LINEAR, NO_PLACES, NO_QUERY_BIAS, NO_SOFTCAP),
    given=lambda where, folded: where.on_ball(folded),
)
def mean_field(value: Tensor, score: Tensor, radius: float) -> Tensor:
    r"""Theorem 3.5: :math:`\mathrm{Lip}_{W_2}(F|_{\mathcal P(B_R)}) \le \|V\|(1 + 3\|A\|R^2)\,e^{2\|A\|R^2}`, unmasked.

    It bounds the constant for every n. **False under a mask**; see the errata.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> [round(float(mean_field(one, b * one, 1.0)), 1) for b in (1, 2)]
    [29.6, 382.2]
    """
    a = score * radius * radius
    return value * (1 + 3 * a) * torch.exp(2 * a)


def lower_sqrt_n(response: Tensor, gamma: Tensor, radius: float, n: float) -> Tensor:
    r"""Proposition 3.4: :math:`\mathrm{Lip}(f|_{B_R^n}) \ge \tfrac12\|Vu\|\sqrt{n-1}` while
    :math:`n \le 1+e^{2\gamma R^2}`, masked or not; NaN for longer sequences.

    Here u is a unit eigenvector of A for a real eigenvalue: −γ (tokens −Ru, Ru, Ru, …) or 8γ (Ru, Ru/2, Ru/2, …).

    Args:
        response: ‖Vu‖. gamma: γ.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> float(lower_sqrt_n(one, one, radius=1.0, n=5)), float(lower_sqrt_n(one, one, radius=1.0, n=9))
    (1.0, nan)
    """
    holds = n <= 1 + torch.exp(2 * gamma * radius * radius)
    return torch.where(holds, 0.5 * response * (n - 1) ** 0.5, torch.nan)


def large_radius_limit(attention: AttentionMap, x: Tensor) -> Tensor:
    r"""For almost every X, :math:`\|J(RX)\| \to \|V\|\,\sqrt{\text{largest in-degree}}` as R → ∞, of each head.

    The in-degree of token j is the number of tokens whose largest logit is that of j (the hardmax map). Far out the
    weights are one-hot, the score path vanishes and the Jacobian is the 0–1 matrix of the hardmax map times V.
    Needs distinct logits in every row and linear queries, keys and values without biases.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(1), 2 * torch.eye(1))
    >>> float(large_radius_limit(head, torch.tensor([[-1.0], [2.0], [3.0]])))  # both positive tokens look at the first
    2.82842...
    """
    query, key, _ = query_key(attention)
    x = x.double()
    logits = (x @ query.mT) @ (x @ key.mT).mT
    logits = attention.terms.added_to(logits, Maps.every(1, attention.heads, len(x), logits))
    degree = torch.nn.functional.one_hot(logits.argmax(-1), len(x)).sum(1).amax(1)
    return spectral(value_matrices(attention)) * degree.double().sqrt()


def real_eigenpairs(attention: AttentionMap) -> tuple[Tensor, Tensor]:
    """The real eigenvalues of A = KᵀQ other than zero, ``(heads, min(k, d))`` (else NaN), and unit eigenvectors.

    A has rank k or less: for k ≤ d its eigenvalues are those of the k × k matrix QKᵀ, and Kᵀs is an eigenvector of A
    when s is one of it. An eigenvalue that is zero up to rounding has a vector that rounding chose: it is left out.
    """
    query, key, _ = query_key(attention)
    narrow = key.shape[-2] <= key.shape[-1]
    values, vectors = torch.linalg.eig(query @ key.mT if narrow else key.mT @ query)
    lifted = (key.mT @ vectors.real if narrow else vectors.real).mT  # (heads, min(k, d), d)
    size = lifted.norm(dim=-1, keepdim=True)
    lifted = lifted / size.clamp(min=1e-300)
    scale = key.flatten(1).norm(dim=-1) * query.flatten(1).norm(dim=-1)
    real = (values.imag.abs() <= 1e-12 * values.abs()) & (values.abs() > 1e-10 * scale[:, None])
    missed = (lifted @ query.mT @ key - values.real[..., None] * lifted).norm(dim=-1)
    real &= (size[..., 0] > 0) & (missed <= 1e-9 * values.abs())
    return torch.where(real, values.real, torch.nan), lifted


@theorem(
    "castin2024.lower_sqrt_n",
    r"\tfrac12\|Vu\|\sqrt{n-1},\ n\le 1+e^{2\gamma R^2},\ \gamma=\max(-\gamma_{\min},\gamma_{\max}/8)",
    reference=f"{REFERENCE}, Proposition 3.4",
    side="lower",
    scope="ball",
    assumptions=(*PLAIN, UNMASKED_OR_CAUSAL, BALL, FINITE, AT_LEAST_TWO),
)
def _lower_sqrt_n(where: Setting, folded: bool) -> Tensor:
    values, vectors = real_eigenpairs(where.map)
    gamma = torch.maximum(-values, values / 8)
    response = (value_matrices(where.map, folded) @ vectors.mT).norm(dim=-2)
    bounds = lower_sqrt_n(response, gamma, where.radius, where.count)
    return bounds.nan_to_num(nan=0.0).amax(-1) * (1 - 1e-9)  # the eigenvector is known to that accuracy
