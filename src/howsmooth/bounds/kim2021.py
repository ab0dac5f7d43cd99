r"""Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021 (arXiv 2006.04710).

Dot-product attention is not Lipschitz; L2 attention with tied queries and keys and the factor
:math:`A_h = W_hW_h^\top/s` is, with constants in :math:`\varphi^{-1}(N-1)`, :math:`\varphi(x) = xe^{x+1}`.

Weights are laid out as in `L2SelfAttention`: query = W_hᵀ ``(heads, k, d)``, value = W^V_hᵀ ``(heads, v, d)`` (without
A_h), output = W^O_h ``(heads, v, d_out)``; s = √k.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.special import lambertw
from torch import Tensor
from torch.linalg import matrix_norm

from howsmooth.attention import L2SelfAttention
from howsmooth.bounds.assumptions import FINITE, SEES_ITSELF
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.question_setting import Setting
from howsmooth.errors import InvalidInput
from howsmooth.norms.small_matrices import spectral

REFERENCE = "Kim, Papamakarios, Mnih 2021"


def phi_inverse(y: float) -> float:
    r"""The x ≥ 0 with :math:`\varphi(x) = xe^{x+1} = y`: Lambert's W at y/e. N tokens need it at y = N − 1.

    **Key lemma.** If token i sees itself and at most N − 1 others, and :math:`P_{ij} \propto e^{-|z_i-z_j|^2}`, then

    .. math:: \sum_j P_{ij}\,|z_i - z_j|^2 \le \varphi^{-1}(N-1).

    Proof. With :math:`d_j = |z_i-z_j|^2` the claim Σ d_j e^{−d_j} ≤ c(1 + Σ e^{−d_j}), both sums over j ≠ i, reads
    Σ (d_j − c) e^{−d_j} ≤ c. Each term is largest at d_j = c + 1, so the left side is at most (N−1)e^{−c−1}, which is
    c for c = φ⁻¹(N−1). ∎ Equality: all others at squared distance 1 + φ⁻¹.

    >>> x = phi_inverse(9.0)
    >>> round(x * math.exp(x + 1), 12), phi_inverse(0.0)
    (9.0, 0.0)
    """
    return float(lambertw(y / math.e).real)


TIED = Assumption(
    "queries and keys share their weights (W^Q = W^K)", lambda where: bool(getattr(where.attention, "tied", False))
)
VALUE_FACTOR = Assumption(
    "values carry the factor A_h = W_hW_hᵀ/s", lambda where: bool(getattr(where.attention, "value_factor", False))
)
ONLY_HIDES = Assumption(
    "nothing is added to the logits of tokens that are seen", lambda where: where.map.terms.hides_only
)
L2_ASSUMPTIONS = (FINITE, TIED, VALUE_FACTOR, ONLY_HIDES, SEES_ITSELF)
"""Assumptions of every bound for L2 attention; without any one of them it is false."""


def l2_weights(where: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Query, plain value and output weights of an L2 map in float64."""
    attention = where.map
    assert isinstance(attention, L2SelfAttention)
    return attention.query_weight.double(), attention.plain_value.double(), attention.output_weight.double()


_THEOREM: dict[str, Any] = {
    "reference": f"{REFERENCE}, Theorem 3.2",
    "scope": "global",
    "kinds": ("l2",),
    "assumptions": L2_ASSUMPTIONS,
    "combine": "block",
    "given": lambda where, folded: (*l2_weights(where), where.count),
}


@theorem(
    "kim2021.lip_inf",
    r"\Bigl(4\varphi^{-1}(N-1)+\tfrac1s\Bigr)\|W^{O\top}\|_\infty"
    r"\max_h\|W_h\|_\infty\|W_h^\top\|_\infty\max_h\|W_h^{V\top}\|_\infty",
    norm=math.inf,
    **_THEOREM,
)
def lip_inf(query: Tensor, value: Tensor, output: Tensor, n: float) -> Tensor:
    r"""Theorem 3.2 in the ∞-norm, for the block:

    .. math:: \mathrm{Lip}_\infty \le \Big(4\varphi^{-1}(N-1) + \frac1s\Big)\,\|W^{O\top}\|_\infty
              \max_h \|W_h\|_\infty\|W_h^\top\|_\infty\, \max_h \|W_h^{V\top}\|_\infty.

    Proof: that of `howsmooth.bounds.own.l2_bounds.l2_lip_inf` with :math:`|u|_1 \le s|u|_2` for both score terms.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> [round(float(lip_inf(one, one, one, n)), 3) for n in (10, 100, 1000)]
    [5.404, 11.515, 18.682]
    """
    s = query.shape[-2] ** 0.5
    tied = matrix_norm(query, 1) * matrix_norm(query, math.inf)  # ‖W_h‖_∞ is the largest column sum of W_hᵀ
    outer = matrix_norm(output.flatten(0, 1), 1)
    return (4 * phi_inverse(n - 1) + 1 / s) * outer * tied.amax() * matrix_norm(value, math.inf).amax()


@theorem(
    "kim2021.lip_2",
    r"\tfrac{\sqrt N}{s}\bigl(4\varphi^{-1}(N-1)+1\bigr)\Bigl(\sum_h\|W_h\|_2^4\|W_h^V\|_2^2\Bigr)^{1/2}\|W^O\|_2",
    **_THEOREM | {"reference": f"{REFERENCE}, Theorem 3.2, corrected"},
)
def lip_2(query: Tensor, value: Tensor, output: Tensor, n: float) -> Tensor:
    r"""Theorem 3.2 in the 2-norm, **corrected**, for the block:

    .. math:: \mathrm{Lip}_2 \le \frac{\sqrt N}{s}\,(4\varphi^{-1}(N-1)+1)
              \Big(\sum_h \|W_h\|_2^4\,\|W_h^V\|_2^2\Big)^{1/2}\|W^O\|_2.

    With :math:`\|W_h\|_2^2` in the root, as it is often written, it is false: the map scales as :math:`W_h^2`.
    Proof: `howsmooth.bounds.own.l2_bounds.l2_lip_2` is never larger.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> round(float(lip_2(one, one, one, 1000)), 1)
    590.8
    """
    s = query.shape[-2] ** 0.5
    stacked = (spectral(query) ** 4 * spectral(value) ** 2).sum().sqrt()
    return n**0.5 / s * (4 * phi_inverse(n - 1) + 1) * stacked * spectral(output.flatten(0, 1))


def not_lipschitz_witness(n: int, t: float) -> Tensor:
    r"""Theorem 3.1: dot-product attention has no global Lipschitz constant in any norm. Input ``(n, 1)``, n odd.

    One token at 0 weighs all tokens alike, so its own block of the Jacobian is V(1/n + A·Var), and the variance of the
    others, half at t and half at −t, has no bound. With A = V = 1: :math:`\|J\|_\infty \ge 1 + t^2(n-1)/n`.

    >>> not_lipschitz_witness(3, 2.0).T
    tensor([[ 0.,  2., -2.]], dtype=torch.float64)
    """
    if n < 3 or n % 2 == 0:
        raise InvalidInput(f"the witness needs an odd number of tokens, at least 3, got {n}.")
    half = torch.full(((n - 1) // 2, 1), float(t), dtype=torch.float64)
    return torch.cat([half.new_zeros(1, 1), half, -half])
