r"""Attention with one constant for all inputs of all lengths: gradient steps, and LipschitzNorm.

**Gradient-step attention** x ↦ x − η Σ_j softmax_j(⟨x, Ay_j⟩)Ay_j (Furuya et al. 2026), as a map of its queries.

Proof. The map is :math:`x - \eta\nabla\log\sum_j e^{\langle x, z_j\rangle}` with :math:`z_j = Ay_j`,
and the Hessian of log-sum-exp is the covariance C of the :math:`z_j` under the weights. So the Jacobian of a row is the
symmetric matrix I − ηC. A variance is at most a quarter of the squared range (Popoviciu), hence
:math:`0 \preceq C \preceq \rho^2 I` with ρ half the largest distance between two :math:`z_j`, and the eigenvalues lie
in :math:`[1 - \eta\rho^2,\ 1]`. Since :math:`\rho \le \max_j|z_j|`, the step of the paper keeps them in [−1, 1]. ∎

**LipschitzNorm attention** (Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers*, ICML 2021,
arXiv 2103.04886). The paper introduces the divisor c and bounds the map (Q, K, V) ↦ softmax(QKᵀ/c)V by the constant
e√3 + 2√6 ≈ 9.61. It follows from a smaller one in terms of the weights, `lipschitz_norm`.

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
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.gradient_step_map import GradientStepAttention, MeanOfSteps
from howsmooth.attention.lipschitz_norm_map import LipschitzNormAttention
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.head_constants import output_factor, value_matrices
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral

FURUYA = "Furuya et al. 2026"


def longest_step(points: Tensor) -> Tensor:
    r"""2/max|Ay_j|²: up to this step the map is non-expansive.

    >>> float(longest_step(torch.tensor([[2.0, 0.0], [0.0, 1.0]])))
    0.5
    """
    return 2 / points.double().square().sum(-1).amax()


def steps_of(where: Setting) -> list[GradientStepAttention]:
    """One step per head: a mean of maps is bounded by the mean of their bounds."""
    steps = where.attention.steps if isinstance(where.attention, MeanOfSteps) else [where.attention]
    return [step for step in steps if isinstance(step, GradientStepAttention)]


GRADIENT_STEP: dict[str, Any] = {"scope": "global", "kinds": ("gradient_step",), "combine": "block", "needs": ()}
SHORT_STEP = Assumption(
    "the step is at most 2/max|Ay_j|²",
    lambda where: all(head.step <= float(longest_step(head.points)) for head in steps_of(where)),
)


@theorem(
    "furuya2026.nonexpansive",
    r"1\quad\text{for}\ 0\le\eta\le 2/\max_j|Ay_j|^2",
    reference=FURUYA,
    assumptions=(SHORT_STEP,),
    **GRADIENT_STEP,
)
def _nonexpansive(where: Setting) -> Tensor:
    return torch.ones((), dtype=torch.float64)


def gradient_step(points: Tensor, step: float) -> Tensor:
    r""":math:`\max(1,\ \eta\rho^2 - 1)`, ρ half the diameter of the points Ay_j, for every step η ≥ 0.

    With two points it is attained: at a query they tie for, C has the eigenvalue ρ². The 1 is needed from the outset:
    far out one point takes all the weight, and the map becomes a translation.

    >>> float(gradient_step(torch.tensor([[5.0, 1.0], [5.0, -1.0]]), step=2.0))  # far from the origin, close together
    1.0
    """
    points = points.double()
    apart = (points[:, None] - points).square().sum(-1).amax()
    return (step * apart / 4 - 1).clamp(min=1.0)


@theorem(
    "howsmooth.gradient_step",
    r"\max\bigl(1,\ \eta\rho^2-1\bigr),\quad \rho=\tfrac12\max_{jk}|Ay_j-Ay_k|",
    **GRADIENT_STEP,
)
def _gradient_step(where: Setting) -> Tensor:
    return torch.stack([gradient_step(head.points, head.step) for head in steps_of(where)]).mean()


def joint(output: Tensor | float, stacked: Tensor) -> Tensor:
    r""":math:`(e\sqrt3 + 2\sqrt6)\,\|W\|\,\|(W_Q, W_K, W_V)\|`: the paper's constant for the map of (Q, K, V).

    Args:
        output: ‖W‖. stacked: the norm of the three weights on top of each other. Both of each head.

    >>> round(float(joint(1.0, torch.ones(()))), 2)
    9.61
    """
    return (math.e * 3**0.5 + 2 * 6**0.5) * output * stacked


def projections_of(where: Setting) -> AttentionMap:
    """The attention map whose projections this attention takes."""
    assert isinstance(where.attention, LipschitzNormAttention)
    return where.attention.projections


LIPSCHITZ_NORM: dict[str, Any] = {"scope": "global", "kinds": ("lipschitz_norm",), "needs": ()}


@theorem(
    "dasoulas2021.joint",
    r"(e\sqrt3+2\sqrt6)\,\|W\|\,\|(W_Q,W_K,W_V)\|",
    reference="after Dasoulas, Scaman, Virmaux 2021",
    **LIPSCHITZ_NORM,
)
def _joint(where: Setting, folded: bool) -> Tensor:
    maps = projections_of(where)
    stacked = torch.cat([maps.query_weight, maps.key_weight, maps.value_weight], dim=1).double()
    return joint(spectral(maps.output_weight.double()) if folded else 1.0, spectral(stacked))


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
