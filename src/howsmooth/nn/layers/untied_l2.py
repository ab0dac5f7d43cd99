"""L2 attention with keys of its own, which Kim et al. (2021) compare with: a baseline that is not Lipschitz."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import L2SelfAttention
from howsmooth.nn.layers.base import Heads, Mask, glorot
from howsmooth.nn.layers.l2 import L2Attention
from howsmooth.nn.layers.sight import Sight


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

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = False, batch_first: bool = True, dropout: float = 0.0
    ):
        super().__init__(embed_dim, num_heads, bias, batch_first, dropout)
        self.k_proj = glorot(embed_dim, embed_dim)

    def project(self, x: Tensor, sight: Sight) -> Heads:
        query, key = (
            tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
            for tokens in (self.qk_proj(x), self.k_proj(x))
        )
        query, key = (tokens.to(torch.promote_types(tokens.dtype, torch.float32)) for tokens in (query, key))
        centre = key.detach().mean(-2, keepdim=True)
        centred = key - centre
        shift = -centred.square().sum(-1)[:, :, None] / self.temperature
        return Heads(query - centre, centred, query, shift)

    def attached_map(self, mask: Mask, n: int | None) -> L2SelfAttention:
        found = L2SelfAttention(
            self.qk_proj.weight,
            self.v_proj.weight,
            self.out_proj.weight,
            heads=self.num_heads,
            key=self.k_proj.weight,
            mask=mask,
        )
        found.output_bias = None if self.out_proj.bias is None else self.out_proj.bias[:]
        return found
