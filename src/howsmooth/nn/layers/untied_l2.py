"""L2 attention with keys of its own, which Kim et al. (2021) compare with: a baseline that is not Lipschitz."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.nn.layers.attention_layer import ProjectedTokens, glorot
from howsmooth.nn.layers.call_masks import CallMasks
from howsmooth.nn.layers.l2_layer import L2Attention


class UntiedL2Attention(L2Attention):
    """`L2Attention` with P_ij ∝ exp(−|W^Q_hᵀx_i − W^K_hᵀx_j|²/s), W^Q_h ≠ W^K_h; the values keep their factor A_h.

    **Not Lipschitz**: with q = 1, k = ½ and three tokens x_1 = 100b, k·x_{2,3} = q·x_1 ± b its Jacobian grows like b².
    `lipschitz_bound` says so.

    >>> UntiedL2Attention(8, num_heads=2).lipschitz_bound(n=10)
    Traceback (most recent call last):
    howsmooth.errors.DoesNotApply: L2 attention whose keys have weights of their own is not Lipschitz...
    """

    refusal = (
        "L2 attention whose keys have weights of their own is not Lipschitz (Kim et al. 2021): tie queries and keys, "
        "as L2Attention does"
    )

    def make_weights(self, bias: bool) -> None:
        super().make_weights(bias)
        self.k_proj = glorot(self.embed_dim, self.embed_dim)

    @property
    def key_weight(self) -> Tensor:  # type: ignore[override]
        return self.k_proj.weight.to(torch.promote_types(self.k_proj.weight.dtype, torch.float32))

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        return self.meet(self.by_head(self.qk_proj(x)), self.by_head(self.k_proj(x)))
