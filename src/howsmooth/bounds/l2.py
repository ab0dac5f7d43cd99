r"""This project's bounds for L2 self-attention: any mask that lets every token see itself.

In the coordinates :math:`z_i = W_h^\top x_i/\sqrt s` a head is the Gaussian average Z ↦ PZ,
:math:`P_{ij} \propto e^{-|z_i-z_j|^2}`, followed by :math:`M_h = W_h^\top W_h^VW_h^O/\sqrt s`. So everything rests on
two constants of the average, `average_lip_2` and `average_lip_inf`. With :math:`m_i = \sum_j P_{ij}z_j` and C_i the
covariance of the tokens under P_i, its derivative along Y at token i is

.. math:: 2C_iy_i + \sum_j P_{ij}y_j - 2\sum_j P_{ij}(z_j-m_i)\,(z_j-z_i)\cdot y_j, \qquad
          \operatorname{tr} C_i + |m_i - z_i|^2 = \sum_j P_{ij}|z_i-z_j|^2 \le c := \varphi^{-1}(N-1),

by the key lemma (`howsmooth.bounds.kim2021.phi_inverse`). Weights are laid out as in `howsmooth.bounds.kim2021`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from howsmooth.attention import AttentionMap, Causal, SlidingWindow
from howsmooth.bounds.assumptions import UNMASKED_OR_CAUSAL
from howsmooth.bounds.catalogue import Assumption, Bound, register
from howsmooth.bounds.heads import spectral
from howsmooth.bounds.kim2021 import L2_ASSUMPTIONS, l2_weights, phi_inverse
from howsmooth.bounds.settings import Setting
from howsmooth.bounds.visibility import hides

REFERENCE = "howsmooth"
Sight = Literal["full", "ordered", "any"]
"""Who sees whom: everyone everyone; of two tokens that see the same token one sees the other (causal masks and causal
windows); or anything in which tokens see themselves."""


def largest_column(n: float, sight: Sight) -> float:
    r"""An upper bound on every column sum of P: √N with full sight, 2√N − 1 when ordered, (N+1)/2 always.

    Proof. Let t_i = e^{−|z_i−z_j|²} = ⟨f_i, f_j⟩ with f the unit feature vectors of the Gaussian kernel K, and r_i ≥ 1
    the sum of K_ik over the k that i sees, so that P_ij = t_i/r_i. *Any mask*: t_i/r_i ≤ t_i/(1+t_i) ≤ ½ for i ≠ j.
    *Full*: with w_i = P_ij Cauchy–Schwarz gives (Σ w_it_i)² ≤ |Σ w_if_i|² = Σ w_iw_kK_ik ≤ Σ w_i²r_i = Σ w_it_i; so
    Σ P_ij² ≤ Σ w_it_i ≤ 1 and the sum is at most √N. *Ordered*: let G hold the m tokens with P_ij ≥ θ and T be the sum
    of t_i over G. Every pair in G is counted in r_i or r_k, so T² ≤ |Σ_G f_i|² ≤ 2 Σ_G r_i − m ≤ 2T/θ − m, hence
    m ≤ 2T/θ − T² ≤ 1/θ²: the m-th largest entry of the column is at most 1/√m, and Σ 1/√m ≤ 2√N − 1. ∎

    The power N^{1/2} is right: see `wide_input`.

    >>> [largest_column(100, sight) for sight in ("full", "ordered", "any")]
    [10.0, 19.0, 50.5]
    """
    always = (n + 1) / 2
    return {"full": n**0.5, "ordered": min(2 * n**0.5 - 1, always), "any": always}[sight]


def largest_moment(n: float, sight: Sight) -> float:
    r"""An upper bound v on :math:`\sum_i P_{ij}|z_i-z_j|^2` for every column j.

    Proof. Each of the N − 1 terms with i ≠ j is at most max_d d/(1+e^d) = φ⁻¹(1), the key lemma for two tokens. Also
    |z_i−z_j|² ≤ −log P_ij, so the sum is at most −Σ p log p ≤ q log(N/q) for a column with sum q, by concavity, and
    that grows with q up to N/e. ∎
    """
    q = min(largest_column(n, sight), n / math.e)
    return min(q * math.log(n / q), (n - 1) * phi_inverse(1.0))


def average_lip_2(n: float, sight: Sight = "full") -> float:
    r"""Lip₂ of Z ↦ PZ is at most :math:`\sqrt q + 2c + 2\sqrt{cv}`, q and v from `largest_column`, `largest_moment`.

    Unmasked, from N = 8 on: :math:`N^{1/4} + 2c + \sqrt{2c\sqrt N\log N}`. No larger than Kim's √N(4c + 1).

    Proof. The three terms of the derivative: ‖2C_i‖ ≤ 2c; ‖P‖² ≤ (largest row sum)(largest column sum) ≤ q; and
    |Σ_j P_ij(z_j−m_i)(z_j−z_i)·y_j|² ≤ ‖C_i‖ Σ_j P_ij|z_j−z_i|²|y_j|², which summed over i is at most c·v·‖Y‖². ∎
    No larger: (N+1)/2 ≤ N, and v ≤ (N−1)φ⁻¹(1) ≤ (N−1)c from N = 2 on, so 2√(cv) ≤ 2c√N.

    >>> [round(average_lip_2(1000, sight), 1) for sight in ("full", "ordered", "any")]
    [58.4, 72.0, 101.3]
    """
    c = phi_inverse(n - 1)
    return largest_column(n, sight) ** 0.5 + 2 * c + 2 * (c * largest_moment(n, sight)) ** 0.5


def average_lip_inf(n: float, width: int) -> float:
    r"""Lip_∞ of Z ↦ PZ on tokens of width k is at most :math:`1 + 2(1+\sqrt k)\,c`, for every mask with self.

    Proof. For |Y|_∞ ≤ 1 coordinate a of the score terms is at most 2 Σ_b|C_ab| and 2 Σ_j P_ij|z_j−m_i|_a|z_j−z_i|_1.
    Let α be the second moment of coordinate a of z_j − z_i under P_i and τ that of the others: α + τ ≤ c. As C_aa ≤ α,
    both sums are at most α + √((k−1)ατ) ≤ ½(1+√k)(α+τ) by Cauchy–Schwarz. The value term is at most 1. ∎

    >>> round(average_lip_inf(1000, 1), 3)  # Kim's 4c + 1
    18.682
    """
    return 1 + 2 * (1 + width**0.5) * phi_inverse(n - 1)


def lip_2(query: Tensor, value: Tensor, n: float, sight: Sight = "full", output: Tensor | None = None) -> Tensor:
    r"""Of each head: `average_lip_2` · :math:`\|W_h\|\,\|W_h^\top W_h^VW_h^O\|/s`; without W^O when not given.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> float(lip_2(10 * one, one, 2)) > 160.16  # the supremum for N = 2, W = 10
    True
    """
    s = query.shape[-2] ** 0.5
    inner = query @ value.mT if output is None else query @ value.mT @ output
    return average_lip_2(n, sight) / s * spectral(query) * spectral(inner)


def lip_inf(query: Tensor, value: Tensor, output: Tensor, n: float) -> Tensor:
    r"""Of the block: :math:`\big((2+\tfrac2s)c + \tfrac1s\big)\,\max_o \sum_h \|W_h^\top\|_\infty \sum_a|(M_h)_{ao}|`,

    with :math:`M_h = W_h^\top W_h^VW_h^O`. Proof: coordinates of z move by at most ‖W_hᵀ‖_∞/√s, those of the average
    by `average_lip_inf` times that, and output coordinate o adds them up with the weights (M_h)_ao/√s. ∎
    """
    s = query.shape[-2] ** 0.5
    outer = (query @ value.mT @ output).abs().sum(-2)  # (heads, d_out)
    moved = matrix_norm(query, math.inf)
    return average_lip_inf(n, query.shape[-2]) / s * (moved[:, None] * outer).sum(0).amax()


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


def lower_2(query: Tensor, value: Tensor, n: int, output: Tensor | None = None) -> Tensor:
    r"""Of each head: :math:`\mathrm{Lip}_2 \ge \big(2c + \tfrac1{1+c}\big)\,\|A_hW_h^VW_h^O\|`, c as in `tight_input`.

    Proof. Take the tight input along :math:`W_h^\top u`: :math:`x_i = z_i\sqrt s\,u/|W_h^\top u|`, u the unit vector on
    which :math:`(A_hW_h^VW_h^O)^\top` is largest. There P_ii = 1/(1+c) and C_i has the eigenvector W_hᵀu to the
    eigenvalue c, so block (i, i) of the Jacobian maps u to (2c + 1/(1+c))·(A_hW^V_hW^O_h)ᵀu. ∎

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> round(float(lower_2(one, one, 1001)), 2), round(average_lip_2(1001), 2)
    (9.03, 58.43)
    """
    c = _odd_phi(n)
    inner = value.mT if output is None else value.mT @ output
    return (2 * c + 1 / (1 + c)) / query.shape[-2] ** 0.5 * spectral(query.mT @ query @ inner)


def average_lower_inf(n: int) -> float:
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


def _odd_phi(n: int) -> float:
    return phi_inverse((n - 1) // 2 * 2)


def sight_of(attention: AttentionMap) -> Sight:
    """What a mask lets tokens see, as far as the bounds care."""
    if not hides(attention):
        return "full"
    return "ordered" if all(isinstance(t, Causal) or _looks_back(t) for t in attention.logit_terms()) else "any"


def _looks_back(term: object) -> bool:
    return isinstance(term, SlidingWindow) and term.causal


def _seen(where: Setting) -> float:
    """How many tokens a token sees, and is seen by, at most: n, or what a window leaves."""
    windows = [term for term in where.map.logit_terms() if isinstance(term, SlidingWindow)]
    return min([where.count, *(term.window if term.causal else 2 * term.window - 1 for term in windows)])


def _lip_2(where: Setting, folded: bool) -> Tensor:
    query, value, output = l2_weights(where)
    return lip_2(query, value, _seen(where), sight_of(where.map), output if folded else None)


def _lower_2(where: Setting, folded: bool) -> Tensor:
    query, value, output = l2_weights(where)
    return lower_2(query, value, int(where.count), output if folded else None)


def _lower_inf(where: Setting) -> Tensor:
    query, value, output = l2_weights(where)
    scale = matrix_norm((query @ value.mT @ output).sum(0), 1) * query.abs().sum()
    return average_lower_inf(int(where.count)) * scale


_LINE = Assumption(
    "there is one head, and it and the tokens have width one",
    lambda where: where.map.query_weight.numel() == 1,
)
_entry = partial(Bound, reference=REFERENCE, scope="global", kinds=("l2",), needs=("n",))
register(
    _entry(
        name="howsmooth.l2_lip_2",
        statement=r"\bigl(\sqrt q+2c+2\sqrt{cv}\bigr)\,\|W_h\|\,\|W_h^\top W_h^VW_h^O\|/s,\quad c=\varphi^{-1}(N-1)",
        side="upper",
        norm=2,
        assumptions=L2_ASSUMPTIONS,
        evaluate=_lip_2,
    )
)
register(
    _entry(
        name="howsmooth.l2_lip_inf",
        statement=r"\bigl((2+\tfrac2s)c+\tfrac1s\bigr)\max_o\sum_h\|W_h^\top\|_\infty"
        r"\sum_a|(W_h^\top W_h^VW_h^O)_{ao}|,\quad c=\varphi^{-1}(N-1)",
        side="upper",
        norm=math.inf,
        assumptions=L2_ASSUMPTIONS,
        evaluate=lambda where: lip_inf(*l2_weights(where), _seen(where)),
        combine="block",
    )
)
register(
    _entry(
        name="howsmooth.l2_lower_2",
        statement=r"\bigl(2c+\tfrac1{1+c}\bigr)\,\|A_hW_h^VW_h^O\|,\quad c=\varphi^{-1}(2\lfloor(N-1)/2\rfloor)",
        side="lower",
        norm=2,
        assumptions=(*L2_ASSUMPTIONS, UNMASKED_OR_CAUSAL),
        evaluate=_lower_2,
    )
)
register(
    _entry(
        name="howsmooth.l2_tight_lower",
        statement=r"\bigl(4c-1+\tfrac2{1+c}\bigr)\,|W|\,\|(WW^VW^O)^\top\|_\infty,"
        r"\quad c=\varphi^{-1}(2\lfloor(N-1)/2\rfloor)",
        side="lower",
        norm=math.inf,
        assumptions=(*L2_ASSUMPTIONS, UNMASKED_OR_CAUSAL, _LINE),
        evaluate=_lower_inf,
        combine="block",
    )
)
