r"""Gradient-step attention x ↦ x − η Σ_j softmax_j(⟨x, Ay_j⟩)Ay_j (Furuya et al. 2026), as a map of its queries.

Proof of both statements. The map is :math:`x - \eta\nabla\log\sum_j e^{\langle x, z_j\rangle}` with :math:`z_j = Ay_j`,
and the Hessian of log-sum-exp is the covariance C of the :math:`z_j` under the weights. So the Jacobian of a row is the
symmetric matrix I − ηC. A variance is at most a quarter of the squared range (Popoviciu), hence
:math:`0 \preceq C \preceq \rho^2 I` with ρ half the largest distance between two :math:`z_j`, and the eigenvalues lie
in :math:`[1 - \eta\rho^2,\ 1]`. Since :math:`\rho \le \max_j|z_j|`, the step of the paper keeps them in [−1, 1]. ∎
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from howsmooth.attention.gradient_step import GradientStepAttention, MeanOfSteps
from howsmooth.bounds.catalogue import Assumption, Bound, register
from howsmooth.bounds.settings import Setting

REFERENCE = "Furuya et al. 2026"


def longest_step(points: Tensor) -> Tensor:
    r"""2/max|Ay_j|²: up to this step the map is non-expansive.

    >>> float(longest_step(torch.tensor([[2.0, 0.0], [0.0, 1.0]])))
    0.5
    """
    return 2 / points.double().square().sum(-1).amax()


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


def _steps(where: Setting) -> list[GradientStepAttention]:
    """One step per head: a mean of maps is bounded by the mean of their bounds."""
    steps = where.attention.steps if isinstance(where.attention, MeanOfSteps) else [where.attention]
    return [step for step in steps if isinstance(step, GradientStepAttention)]


def _mean(where: Setting) -> Tensor:
    return torch.stack([gradient_step(head.points, head.step) for head in _steps(where)]).mean()


SHORT_STEP = Assumption(
    "the step is at most 2/max|Ay_j|²",
    lambda where: all(head.step <= float(longest_step(head.points)) for head in _steps(where)),
)
_entry = partial(Bound, side="upper", norm=2, scope="global", kinds=("gradient_step",), combine="block", needs=())
register(
    _entry(
        name="furuya2026.nonexpansive",
        statement=r"1\quad\text{for}\ 0\le\eta\le 2/\max_j|Ay_j|^2",
        reference=REFERENCE,
        assumptions=(SHORT_STEP,),
        evaluate=lambda where: torch.ones((), dtype=torch.float64),
    )
)
register(
    _entry(
        name="howsmooth.gradient_step",
        statement=r"\max\bigl(1,\ \eta\rho^2-1\bigr),\quad \rho=\tfrac12\max_{jk}|Ay_j-Ay_k|",
        reference="howsmooth",
        assumptions=(),
        evaluate=_mean,
    )
)
