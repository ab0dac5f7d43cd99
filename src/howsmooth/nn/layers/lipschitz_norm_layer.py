"""LipschitzNorm attention to train with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from howsmooth import attention
from howsmooth.attention.autodiff_maps import divisor_of
from howsmooth.errors import InvalidInput
from howsmooth.nn.layers.attention_layer import Mask, ProjectedAttention, ProjectedTokens, glorot
from howsmooth.nn.layers.call_masks import CallMasks


class LipschitzNormAttention(ProjectedAttention):
    """softmax(QKᵀ/c)V with the divisor c of Dasoulas, Scaman and Virmaux (2021): Lipschitz on all of space.

    c = max(‖Q‖_F‖K‖, ‖Q‖_F‖V‖, ‖K‖‖V‖), ‖K‖ and ‖V‖ being the longest token of each, head by head. c depends
    on all tokens, so every token influences every other: masks are refused, padding is not. The bound holds for
    every n.

    Arguments as in `AttentionLayer`; ``bias`` adds one to the output only, which the map omits.

    >>> bool(LipschitzNormAttention(8, num_heads=2).lipschitz_bound(n=16).isfinite())
    True
    """

    def make_weights(self, bias: bool) -> None:
        self.in_proj = glorot(self.embed_dim, self.embed_dim, parts=3)
        self.out_proj = glorot(self.embed_dim, self.embed_dim, bias=bias)

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        if masks.terms:
            raise InvalidInput(_NO_MASKS)
        by_head = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        query, key, value = (projected.transpose(1, 2) for projected in by_head)
        divisor = divisor_of(query, key, value)  # padded tokens are zero, and zero is never the longest
        return ProjectedTokens(query / torch.where(divisor > 0, divisor, 1.0)[..., None, None], key, value)

    def attached_map(self, mask: Mask, n: int | None) -> nn.Module:
        if mask is not None:
            raise InvalidInput(_NO_MASKS)
        weights = *self.in_proj.weight.chunk(3), self.out_proj.weight
        return attention.LipschitzNormAttention(*weights, heads=self.num_heads)


_NO_MASKS = (
    "the divisor of LipschitzNorm depends on all tokens, hidden ones included: leave the mask out, or use L2Attention."
)
