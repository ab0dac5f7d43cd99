r"""Gradient-step attention x ↦ x − η Σ_j softmax_j(⟨x, Ay_j⟩)Ay_j with a step of any length, as a map of its queries.

By the proof of `howsmooth.bounds.furuya2026` the Jacobian of a row is symmetric with eigenvalues in
:math:`[1 - \eta\rho^2,\ 1]`, ρ half the largest distance between two points :math:`Ay_j`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.furuya2026 import GRADIENT_STEP, steps_of
from howsmooth.bounds.question_setting import Setting


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
def _evaluate(where: Setting) -> Tensor:
    return torch.stack([gradient_step(head.points, head.step) for head in steps_of(where)]).mean()
