r"""L2 self-attention everywhere: bounds of Kim, Papamakarios and Mnih, and of this project.

Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021 (arXiv 2006.04710).

Dot-product attention is not Lipschitz; L2 attention with tied queries and keys and the factor
:math:`A_h = W_hW_h^\top/s` is, with constants in :math:`\varphi^{-1}(N-1)`, :math:`\varphi(x) = xe^{x+1}`.

Weights are laid out as in `L2SelfAttention`: query = W_hᵀ ``(heads, k, d)``, value = W^V_hᵀ ``(heads, v, d)`` (without
A_h), output = W^O_h ``(heads, v, d_out)``; s = √k.

This project's bounds hold for any mask that lets every token see itself. In the coordinates :math:`z_i = W_h^\top
x_i/\sqrt s` a head is the Gaussian average Z ↦ PZ, :math:`P_{ij} \propto e^{-|z_i-z_j|^2}`, followed by :math:`M_h =
W_h^\top W_h^VW_h^O/\sqrt s`. So everything rests on two constants of the average, `average_lip_2` and
`average_lip_inf`. With :math:`m_i = \sum_j P_{ij}z_j` and C_i the covariance of the tokens under P_i, its derivative
along Y at token i is

.. math:: 2C_iy_i + \sum_j P_{ij}y_j - 2\sum_j P_{ij}(z_j-m_i)\,(z_j-z_i)\cdot y_j, \qquad
          \operatorname{tr} C_i + |m_i - z_i|^2 = \sum_j P_{ij}|z_i-z_j|^2 \le c := \varphi^{-1}(N-1),

by the key lemma (`phi_inverse`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from scipy.special import lambertw
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from howsmooth.attention import L2SelfAttention
from howsmooth.attention.masks import Sight
from howsmooth.bounds.catalogue import FINITE, SEES_ITSELF, UNMASKED_OR_CAUSAL, Assumption, theorem
from howsmooth.bounds.question_setting import Setting
from howsmooth.errors import InvalidInput
from howsmooth.norms.small_matrices import spectral
from howsmooth.numerics.roundoff import gamma

KIM = "Kim, Papamakarios, Mnih 2021"


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
    "reference": f"{KIM}, Theorem 3.2",
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

    Proof: that of `l2_lip_inf` with :math:`|u|_1 \le s|u|_2` for both score terms.

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
    **_THEOREM | {"reference": f"{KIM}, Theorem 3.2, corrected"},
)
def lip_2(query: Tensor, value: Tensor, output: Tensor, n: float) -> Tensor:
    r"""Theorem 3.2 in the 2-norm, **corrected**, for the block:

    .. math:: \mathrm{Lip}_2 \le \frac{\sqrt N}{s}\,(4\varphi^{-1}(N-1)+1)
              \Big(\sum_h \|W_h\|_2^4\,\|W_h^V\|_2^2\Big)^{1/2}\|W^O\|_2.

    With :math:`\|W_h\|_2^2` in the root, as it is often written, it is false: the map scales as :math:`W_h^2`.
    Proof: `l2_lip_2` is never larger.

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


_entry: dict[str, Any] = {"scope": "global", "kinds": ("l2",)}
_lower: dict[str, Any] = _entry | {"side": "lower"}


def largest_column(n: float, sight: Sight, weight: float = 0.0) -> float:
    r"""An upper bound on :math:`\sum_i P_{ij}\,(1 + \lambda\,(u\cdot(z_i-z_j))^2)` for every j and unit vector u.

    With the weight λ = 0 it bounds the column sums of P: √N with full sight, 2√N − 1 when ordered (or causal: of two
    tokens that see the same one, one sees the other), (N+1)/2 always. Full and ordered sight have the further factor
    :math:`\sqrt{1+\lambda^2/2}`.

    Proof. Let f_i be the unit feature vectors of the Gaussian kernel K, s_i = u·(z_i−z_j), and r_i ≥ 1 the sum of K_ik
    over the k that i sees, so that P_ij = K_ij/r_i. The function :math:`h = (1+\lambda s^2)K(\cdot, z_j)` belongs to
    the space of the kernel, because :math:`s^2K = \tfrac14\partial_u^2K + \tfrac12K`. Its squared norm is 1 + λ²/2: the
    fourth derivative of e^{−x²} at 0 is 12 and the second −2, so s²K has 12/16 − 4/8 + 1/4 = 1/2, and it is orthogonal
    to K(·, z_j), being zero at z_j. The sum is Σ_i x_i with x_i = ⟨f_i, h⟩/r_i. *Full*: by Cauchy–Schwarz it is at most
    ‖h‖·|Σ f_i/r_i|, and |Σ f_i/r_i|² = Σ K_ik/(r_ir_k) ≤ Σ_i r_i/r_i² ≤ N. *Ordered*: let G hold the m tokens with
    x_i ≥ θ and T be the sum of ⟨f_i, h⟩ over G. Every pair in G is counted in r_i or r_k, so
    T²/‖h‖² ≤ |Σ_G f_i|² ≤ 2 Σ_G r_i − m ≤ 2T/θ − m, hence m ≤ ‖h‖²/θ²: the m-th largest x_i is at most ‖h‖/√m, and
    Σ 1/√m ≤ 2√N − 1. *Any mask*: r_i ≥ 1 + K_ij for i ≠ j, so x_i ≤ max_d (1+λd)/(1+e^d), which is ½ for λ ≤ ½ and
    λφ⁻¹(e^{1/λ}) above. Last, a column sum plus λ(N−1) times max_d d/(1+e^d) = φ⁻¹(1) holds for all. ∎

    The power N^{1/2} is right: see `wide_input`.

    >>> [largest_column(100, sight) for sight in ("full", "ordered", "any")]
    [10.0, 19.0, 50.5]
    """
    most = 0.5 if weight <= 0.5 else weight * phi_inverse(math.exp(1 / weight))
    sums, bounds = (n + 1) / 2, [1 + (n - 1) * most]
    if sight != "any":
        roots = n**0.5 if sight == "full" else 2 * n**0.5 - 1
        sums = min(sums, roots)
        bounds.append(roots * (1 + weight**2 / 2) ** 0.5)
    return min(*bounds, sums + weight * (n - 1) * phi_inverse(1.0))


@lru_cache(maxsize=4096)
def average_lip_2(n: float, sight: Sight = "full") -> float:
    r"""Lip₂ of Z ↦ PZ is at most :math:`2c + \min_\lambda \sqrt{(1+4c/\lambda)\,q_\lambda}`, q_λ from `largest_column`.

    Unmasked it is at most :math:`2c + N^{1/4}\,(1 + \sqrt{2\sqrt2c})`; wide heads need the power N^{1/4}. No larger
    than Kim's √N(4c + 1).

    Proof. The three terms of the derivative: ‖2C_i‖ ≤ 2c. For a unit vector w, g_j = w·(z_j−m_i), a_j = (z_j−z_i)·y_j
    and any λ > 0 the other two along w are
    :math:`\sum_j P_{ij}(w\cdot y_j - 2g_ja_j) \le \sqrt{\sum_j P_{ij}(1+4g_j^2/\lambda)}
    \sqrt{\sum_j P_{ij}(|y_j|^2+\lambda a_j^2)}` by Cauchy–Schwarz, twice. The first root is at most √(1 + 4c/λ); the
    squares of the second, summed over i, are at most q_λ‖Y‖². ∎ With q_λ ≤ √N(1 + λ/√2) the minimum is the form above;
    with q_λ ≤ (N+1)/2 + λ(N−1)φ⁻¹(1) ≤ N + λ(N−1)c, for N ≥ 2, it is at most √N(1 + 2c), no larger than Kim's.

    >>> [round(average_lip_2(1000, sight), 1) for sight in ("full", "ordered", "any")]
    [31.4, 40.5, 94.3]
    """
    c = phi_inverse(n - 1)
    if c == 0:
        return 1.0
    # Every λ proves a bound, so the search need not be exact.
    least = minimize_scalar(
        lambda log: (1 + 4 * c * math.exp(-log)) * largest_column(n, sight, math.exp(log)),
        bounds=(-5.0, 10.0),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return 2 * c + float(least.fun) ** 0.5


def average_lip_inf(n: float, width: int) -> float:
    r"""Lip_∞ of Z ↦ PZ on tokens of width k is at most :math:`1 + 2(1+\sqrt k)\,c`, for every mask with self.

    Proof. For |Y|_∞ ≤ 1 coordinate a of the score terms is at most 2 Σ_b|C_ab| and 2 Σ_j P_ij|z_j−m_i|_a|z_j−z_i|_1.
    Let α be the second moment of coordinate a of z_j − z_i under P_i and τ that of the others: α + τ ≤ c. As C_aa ≤ α,
    both sums are at most α + √((k−1)ατ) ≤ ½(1+√k)(α+τ) by Cauchy–Schwarz. The value term is at most 1. ∎

    >>> round(average_lip_inf(1000, 1), 3)  # Kim's 4c + 1
    18.682
    """
    return 1 + 2 * (1 + width**0.5) * phi_inverse(n - 1)


def l2_lip_2(query: Tensor, value: Tensor, n: float, sight: Sight = "full", output: Tensor | None = None) -> Tensor:
    r"""Of each head: `average_lip_2` · :math:`\|W_h\|\,\|W_h^\top W_h^VW_h^O\|/s`; without W^O when not given.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> float(l2_lip_2(10 * one, one, 2)) > 160.16  # the supremum for N = 2, W = 10
    True
    """
    s = query.shape[-2] ** 0.5
    inner = query @ value.mT if output is None else query @ value.mT @ output
    return average_lip_2(n, sight) / s * spectral(query) * spectral(inner)


def block_lip_2(query: Tensor, value: Tensor, output: Tensor, average: float) -> Tensor:
    r"""Lip₂ of the whole block: :math:`\tfrac\kappa s\,\|[W_h/c_h]_h\|\,\|[c_hM_h]_h\|` for any numbers c_h > 0.

    κ is the constant of the Gaussian average Z ↦ PZ (`average_lip_2`), [·]_h puts the heads side by
    side, on the right on top of each other. It spares the factor up to √H that adding up heads costs.

    Proof, in three steps. X ↦ (XW_h/c_h)_h is linear, with the first norm. On its output y_h the weights are those of
    :math:`z_h = c_hy_h/\sqrt s`, so y_h ↦ Py_h is the Gaussian average in other units: it has the constant κ, and so
    have all heads side by side. At last (y_h)_h ↦ Σ_h c_hy_hM_h/s is linear, with the second norm over s. ∎
    With :math:`c_h^2 = \|W_h\|/\|M_h\|` the product is at most :math:`\sum_h\|W_h\|\|M_h\|`; here Frobenius norms take
    their place (`balanced`), which costs no decomposition.

    Args:
        query, value, output: W_hᵀ, W^V_hᵀ, W^O_h, each ``(heads, k, d)``. average: κ.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> float(block_lip_2(10 * one, one, one, average=1.5))
    150.0
    """
    tied, mixing = balanced(query, mixing_matrix(query, value, output))
    return average / query.shape[-2] ** 0.5 * spectral(tied) * spectral(mixing)


def mixing_matrix(query: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """The M_h of all heads on top of each other, ``(d, d)``."""
    return (query @ value.mT @ output).flatten(0, 1)


def balanced(query: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """[W_hᵀ/c_h] and [c_h M_h], both ``(d, d)``, with c_h² = ‖W_h‖_F/‖M_h‖_F."""
    heads = len(query)
    sizes = (vector_norm(weights.reshape(heads, -1), dim=-1) for weights in (query, mixing))
    tied, mixed = (size.clamp(min=torch.finfo(query.dtype).eps) for size in sizes)
    c = (tied / mixed).sqrt()[:, None, None]
    return (query / c).flatten(0, 1), (mixing.unflatten(0, (heads, -1)) * c).flatten(0, 1)


@theorem(
    "howsmooth.l2_lip_inf",
    r"\bigl((2+\tfrac2s)c+\tfrac1s\bigr)\max_o\sum_h\|W_h^\top\|_\infty"
    r"\sum_a|(W_h^\top W_h^VW_h^O)_{ao}|,\quad c=\varphi^{-1}(N-1)",
    norm=math.inf,
    assumptions=L2_ASSUMPTIONS,
    combine="block",
    given=lambda where, folded: (*l2_weights(where), where.map.terms.most_seen(where.count)),
    **_entry,
)
def l2_lip_inf(query: Tensor, value: Tensor, output: Tensor, n: float) -> Tensor:
    r"""Of the block: :math:`\big((2+\tfrac2s)c + \tfrac1s\big)\,\max_o \sum_h \|W_h^\top\|_\infty \sum_a|(M_h)_{ao}|`,

    with :math:`M_h = W_h^\top W_h^VW_h^O`. Proof: coordinates of z move by at most ‖W_hᵀ‖_∞/√s, those of the average
    by `average_lip_inf` times that, and output coordinate o adds them up with the weights (M_h)_ao/√s. ∎
    """
    s = query.shape[-2] ** 0.5
    outer = (query @ value.mT @ output).abs().sum(-2)  # (heads, d_out)
    return average_lip_inf(n, query.shape[-2]) / s * (matrix_norm(query, math.inf)[:, None] * outer).sum(0).amax()


def tight_input(n: int) -> Tensor:
    r"""The last token at 0, half of the others at √(1+c), half at −√(1+c): equality in the key lemma. ``(n, 1)``.

    For even n the first token is so far away that nobody sees it, and c is that of n − 1 tokens. The last token sees
    all others under a causal mask too.

    >>> tight_input(3).shape
    torch.Size([3, 1])
    """
    half = (n - 1) // 2
    at = torch.full((half, 1), (1 + _odd_phi(n)) ** 0.5, dtype=torch.float64)
    return torch.cat([torch.full((1 - n % 2, 1), 100.0, dtype=torch.float64), at, -at, at.new_zeros(1, 1)])


def average_lower_2(n: float) -> float:
    r"""Lip₂ of Z ↦ PZ is at least :math:`2c + \tfrac1{1+c}`, c as in `tight_input`, where P_ii = 1/(1+c) and C_i = c.

    >>> round(average_lower_2(1001), 2), round(average_lip_2(1001), 2)
    (9.03, 31.44)
    """
    c = _odd_phi(n)
    return 2 * c + 1 / (1 + c)


def average_lower_inf(n: float) -> float:
    r"""Lip_∞ of Z ↦ PZ is at least :math:`4c - 1 + 2/(1+c)`, within 2 of `average_lip_inf` at width 1.

    Proof. At the tight input P_ii = 1/(1+c) and C_i = c, so row i has the entry 1/(1+c) + 2c, and others that add up
    to c/(1+c) · |1 − 2(1+c)|. ∎

    >>> round(average_lower_inf(1001), 2), round(average_lip_inf(1001, 1), 2)
    (17.05, 18.69)
    """
    c = _odd_phi(n)
    return 4 * c - 1 + 2 / (1 + c)


def wide_input(leaves: int, hubs: int) -> Tensor:
    r"""An input on which Lip₂ grows like N^{1/4}: hubs at 0, leaves at √t e_i on axes of their own.

    With a = e^{−t} = L^{−1/2} every leaf gives the hubs the weight p = ma/(1 + ma + (L−1)a²). Moving all hubs alike
    along a further axis, |Y| = 1, moves every leaf's output by p/√m: ‖J‖ ≥ p√(L/m), which is L^{1/4}/√8 for m = 2√L.
    With hubs first a causal mask only helps. Tokens are L + 1 wide.
    """
    x = torch.zeros(hubs + leaves, leaves + 1, dtype=torch.float64)
    x[hubs:, :leaves] = (0.5 * math.log(leaves)) ** 0.5 * torch.eye(leaves, dtype=torch.float64)
    return x


def wide_lower(leaves: int, hubs: int) -> float:
    """The lower bound p√(L/m) on Lip₂ of Z ↦ PZ that `wide_input` reaches.

    >>> round(wide_lower(10**12, 2 * 10**6) / 10**3 * 8**0.5, 3)
    1.0
    """
    p = hubs * leaves**-0.5 / (1 + hubs * leaves**-0.5 + (leaves - 1) / leaves)
    return p * (leaves / hubs) ** 0.5


def _odd_phi(n: float) -> float:
    return phi_inverse((n - 1) // 2 * 2)


@theorem(
    "howsmooth.l2_lip_2",
    r"\bigl(2c+\min_\lambda\sqrt{(1+4c/\lambda)\,q_\lambda}\bigr)\,\|W_h\|\,\|W_h^\top W_h^VW_h^O\|/s,"
    r"\quad c=\varphi^{-1}(N-1)",
    assumptions=L2_ASSUMPTIONS,
    **_entry,
)
def _lip_2(where: Setting, folded: bool) -> Tensor:
    (query, value, output), terms = l2_weights(where), where.map.terms
    return l2_lip_2(query, value, terms.most_seen(where.count), terms.sight, output if folded else None)


@theorem(
    "howsmooth.l2_lower_2",
    r"\bigl(2c+\tfrac1{1+c}\bigr)\,\|A_hW_h^VW_h^O\|,\quad c=\varphi^{-1}(2\lfloor(N-1)/2\rfloor)",
    assumptions=(*L2_ASSUMPTIONS, UNMASKED_OR_CAUSAL),
    **_lower,
)
def _lower_2(where: Setting, folded: bool) -> Tensor:
    r"""Of each head: :math:`\mathrm{Lip}_2 \ge \big(2c + \tfrac1{1+c}\big)\,\|A_hW_h^VW_h^O\|`, c as in `tight_input`.

    Proof. Take the tight input along :math:`W_h^\top u`: :math:`x_i = z_i\sqrt s\,u/|W_h^\top u|`, u the unit vector on
    which :math:`(A_hW_h^VW_h^O)^\top` is largest. There P_ii = 1/(1+c) and C_i has the eigenvector W_hᵀu to the
    eigenvalue c, so block (i, i) of the Jacobian maps u to (2c + 1/(1+c))·(A_hW^V_hW^O_h)ᵀu. ∎

    The values are those that the map holds, A_hW^V_h rounded: the proof asks no more of them.
    """
    value = where.map.value_weight.double()
    inner = value.mT @ where.map.output_weight.double() if folded else value
    lost = gamma(8 * value[0].numel()) * value.norm(dim=(-2, -1))
    if folded:
        lost = lost * where.map.output_weight.double().norm(dim=(-2, -1))
    return average_lower_2(where.count) * (spectral(inner) * (1 - 1e-12) - lost).clamp(min=0)


_LINE = Assumption(
    "there is one head, and it and the tokens have width one", lambda where: where.map.query_weight.numel() == 1
)


@theorem(
    "howsmooth.l2_tight_lower",
    r"\bigl(4c-1+\tfrac2{1+c}\bigr)\,|W|\,\|(WW^VW^O)^\top\|_\infty,\quad c=\varphi^{-1}(2\lfloor(N-1)/2\rfloor)",
    norm=math.inf,
    assumptions=(*L2_ASSUMPTIONS, UNMASKED_OR_CAUSAL, _LINE),
    combine="block",
    **_lower,
)
def _lower_inf(where: Setting) -> Tensor:
    scale = matrix_norm((where.map.value_weight.double().mT @ where.map.output_weight.double()).sum(0), 1)
    return average_lower_inf(where.count) * scale * (1 - 1e-12)
