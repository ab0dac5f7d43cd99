r"""Gradient-step attention to train with: non-expansive, whatever the weights and however many tokens.

.. math:: x \mapsto \frac1H\sum_h\Big(x - \eta_h\sum_j \mathrm{softmax}_j(\langle x, A_hy_{hj}\rangle)\,A_hy_{hj}\Big)

with a learned context y_h (Furuya et al. 2026). A token attends to the context, not to other tokens: the theorem
bounds the step in the query for a fixed context. The mean of non-expansive maps is non-expansive.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from howsmooth import attention
from howsmooth._util.validation import check_count, check_positive, check_weights, shown, validated
from howsmooth.attention.autodiff_maps import MeanOfSteps
from howsmooth.bounds.other_attentions import longest_step
from howsmooth.errors import InvalidInput
from howsmooth.nn.layers.attention_layer import AttentionLayer, CallMasks, Mask

CONTEXT = 64
"""Default number of learned points per head."""


class GradientStepAttention(AttentionLayer):
    """The mean of H gradient steps in the full width; masks and padding do not change the other tokens.

    Steps are η_h = step·2/max_j|A_hy_hj|², so that the layer is non-expansive for every context. Returned
    weights are those of the context, ``(batch, n, context_size)``.

    Args:
        context_size: learned points per head.
        step: share of the longest step that is non-expansive, above 0 and at most 1.
        embed_dim, num_heads, bias, batch_first: as in `AttentionLayer`; A_h has rank d/H. Dropout is refused.

    >>> bool(GradientStepAttention(8, num_heads=2).lipschitz_bound(n=100) == 1)
    True
    """

    @validated
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = False,
        batch_first: bool = True,
        dropout: float = 0.0,
        *,
        context_size: int = CONTEXT,
        step: float = 0.5,
    ):
        super().__init__(embed_dim, num_heads, bias, batch_first)
        if dropout != 0:
            raise InvalidInput("dropout makes a gradient step expansive: leave it out here.")
        check_weights(check_count(context_size, "context_size") * self.embed_dim, "the context")
        self.step = check_positive(step, "step")
        if self.step > 1:
            raise InvalidInput(f"step must be a share from above 0 to 1, got {shown(step)}.")
        self.context = nn.Parameter(torch.randn(num_heads, context_size, self.head_dim))
        # Points of length about one: logits of tokens of variance one then have variance one.
        self.matrix = nn.Parameter(
            torch.randn(num_heads, embed_dim, self.head_dim) * (embed_dim * self.head_dim) ** -0.5
        )
        self.bias = nn.Parameter(torch.zeros(embed_dim)) if bias else None

    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        points = self.context @ self.matrix.mT  # (heads, m, d)
        weights = torch.softmax(x[:, None] @ points.mT, dim=-1)  # (batch, heads, n, m)
        steps = torch.stack([self._length(head) for head in points]).to(points.dtype)
        pull = (weights * steps[:, None, None] / self.num_heads).transpose(1, 2).flatten(2) @ points.flatten(0, 1)
        out = masks.zero_padding(x - pull)
        return out if self.bias is None else out + self.bias, weights if need_weights else None

    def _length(self, points: Tensor) -> Tensor:
        """Return η of a head; zero where all points are at zero or too close to it."""
        far = longest_step(points.detach()) <= torch.finfo(points.dtype).max
        # Chosen before the division: where it divides by zero the gradient would be NaN, chosen or not.
        return torch.where(far, self.step * longest_step(torch.where(far, points, 1.0)), 0.0)

    def attached_map(self, mask: Mask, n: int | None) -> nn.Module:
        heads = [
            attention.GradientStepAttention(matrix, context, float(self._length(context @ matrix.mT)))
            for matrix, context in zip(self.matrix, self.context, strict=True)
        ]
        return heads[0] if len(heads) == 1 else MeanOfSteps(heads)
