r"""Gradient-step attention x ↦ x − η Σ_j softmax_j(⟨x, Ay_j⟩)Ay_j (Furuya et al. 2026), as a map of its queries.

Proof. The map is :math:`x - \eta\nabla\log\sum_j e^{\langle x, z_j\rangle}` with :math:`z_j = Ay_j`,
and the Hessian of log-sum-exp is the covariance C of the :math:`z_j` under the weights. So the Jacobian of a row is the
symmetric matrix I − ηC. A variance is at most a quarter of the squared range (Popoviciu), hence
:math:`0 \preceq C \preceq \rho^2 I` with ρ half the largest distance between two :math:`z_j`, and the eigenvalues lie
in :math:`[1 - \eta\rho^2,\ 1]`. Since :math:`\rho \le \max_j|z_j|`, the step of the paper keeps them in [−1, 1]. ∎
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from howsmooth.attention.autodiff_maps import GradientStepAttention, MeanOfSteps
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.question_setting import Setting

REFERENCE = "Furuya et al. 2026"


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
    reference=REFERENCE,
    assumptions=(SHORT_STEP,),
    **GRADIENT_STEP,
)
def _nonexpansive(where: Setting) -> Tensor:
    return torch.ones((), dtype=torch.float64)
