"""Gradient-step attention: a query moves downhill on the log-sum-exp of its scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from howsmooth._util.validation import shown, validated
from howsmooth.errors import InvalidInput


class GradientStepAttention(nn.Module):
    r"""x ↦ x − η Σ_j softmax_j(⟨x, A y_j⟩) A y_j for every row x of the input, with a fixed context y.

    It is one step of length η down the gradient of :math:`\log\sum_j e^{\langle x, Ay_j\rangle}` (Furuya et al. 2026).
    Rows do not see each other, so the Jacobian has one block per row.

    Args:
        matrix: A, ``(d, e)``.
        context: y, ``(m, e)``, one row per key.
        step: η ≥ 0.

    Attributes:
        in_features, out_features: width d of a token, before and after.

    >>> import torch
    >>> attention = GradientStepAttention(torch.eye(2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), step=1.0)
    >>> attention(torch.zeros(1, 2))
    tensor([[0., 0.]])
    """

    kind = "gradient_step"
    matrix: Tensor
    context: Tensor

    @validated
    def __init__(self, matrix: Tensor, context: Tensor, step: float):
        super().__init__()
        sizes = (*matrix.shape, *context.shape)
        if not matrix.dim() == context.dim() == 2 or 0 in sizes or matrix.shape[1] != context.shape[1]:
            raise InvalidInput(
                "gradient-step attention needs a matrix (d, e) and a context of at least one row (m, e), got shapes "
                f"{tuple(matrix.shape)} and {tuple(context.shape)}."
            )
        if not 0 <= step <= sys.float_info.max:
            raise InvalidInput(f"the step must be finite and not negative, got {shown(step)}.")
        self.step, self.in_features, self.out_features = float(step), len(matrix), len(matrix)
        self.register_buffer("matrix", matrix)
        self.register_buffer("context", context)

    @property
    def points(self) -> Tensor:
        """A y_j, ``(m, d)``: the points from which a query moves away."""
        return self.context @ self.matrix.mT

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(…, n, d)``."""
        points = self.points
        return x - self.step * (torch.softmax(x @ points.mT, dim=-1) @ points)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, keys={len(self.context)}, step={self.step:g}"


class MeanOfSteps(nn.Module):
    """x ↦ the mean of several gradient steps, one per head."""

    kind = "gradient_step"

    @validated
    def __init__(self, steps: Sequence[GradientStepAttention]):
        super().__init__()
        if not len(steps):
            raise InvalidInput("a mean of gradient steps needs at least one step.")
        self.steps = nn.ModuleList(steps)
        self.in_features = self.out_features = steps[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(…, n, d)``."""
        return torch.stack([step(x) for step in self.steps]).mean(0)
