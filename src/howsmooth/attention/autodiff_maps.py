"""Maps without a Jacobian in closed form, differentiated as functions: gradient-step and LipschitzNorm attention."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from howsmooth._util.validation import shown, validated
from howsmooth.attention.attention_map import batched
from howsmooth.attention.dot_product_map import SelfAttention
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


class LipschitzNormAttention(nn.Module):
    r"""softmax(QKᵀ/c)V·W with a divisor c that makes attention globally Lipschitz (Dasoulas, Scaman, Virmaux 2021).

    For each head

    .. math:: c = \max(\|Q\|_F\|K\|_{\infty,2},\ \|Q\|_F\|V\|_{\infty,2},\ \|K\|_{\infty,2}\|V\|_{\infty,2}),

    with :math:`\|\cdot\|_{\infty,2}` the norm of the largest token. c depends on all tokens, so this is no
    `AttentionMap`: `howsmooth.measure` treats it as a function.

    The map is continuous everywhere, but smooth only piece by piece: it has kinks where another product, or another
    token, becomes the largest, and where two of Q, K, V vanish. There c = 0, and every token gets the plain mean of the
    values, which is the limit of the map; derivatives there are those of the mean.

    Args:
        query, key, value, output: weights as in `torch.nn.Linear`; ``output=None`` leaves the heads side by side.
        heads: number of heads, each with a divisor of its own.

    Attributes:
        in_features, out_features: widths of a token and of an output token.

    >>> import torch
    >>> attention = LipschitzNormAttention(*torch.eye(4).repeat(4, 1, 1), heads=2)
    >>> attention(torch.ones(3, 4)).shape, attention.divisor(torch.ones(3, 4))
    (torch.Size([3, 4]), tensor([3.4641, 3.4641]))
    """

    kind = "lipschitz_norm"

    @validated
    def __init__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor | None = None, *, heads: int = 1):
        super().__init__()
        self.projections = SelfAttention(query, key, value, output, heads=heads, scale=1.0)
        self.heads = heads
        self.in_features, self.out_features = self.projections.in_features, self.projections.out_features

    def divisor(self, x: Tensor) -> Tensor:
        """c of every head, ``(heads,)`` or ``(batch, heads)``."""
        return batched(lambda x: divisor_of(*self.projections.project(x)), x)

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(n, d)`` or ``(batch, n, d)``."""
        return batched(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projections.project(x)  # (batch, heads, n, ·)
        c = divisor_of(query, key, value)
        # c = 0 only when two of Q, K, V vanish; then QKᵀ = 0 as well, and any divisor gives uniform weights.
        scores = query @ key.mT / torch.where(c > 0, c, 1.0)[..., None, None]
        return self.projections.projected_out(torch.softmax(scores, dim=-1) @ value)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, heads={self.heads}"


def divisor_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The c of each item and head, from Q, K, V of shape ``(batch, heads, n, ·)``."""
    queries = torch.linalg.vector_norm(query, dim=(-2, -1))
    largest_key = torch.linalg.vector_norm(key, dim=-1).amax(-1)
    largest_value = torch.linalg.vector_norm(value, dim=-1).amax(-1)
    return torch.stack([queries * largest_key, queries * largest_value, largest_key * largest_value]).amax(0)
