r"""L2 self-attention to train with: tied queries and keys, the factor A_h, masks that let a token see itself.

.. math:: F(X) = \sum_h P_h X A_h W_h^V W_h^O, \quad P_{ij} \propto e^{-|W_h^\top(x_i - x_j)|^2/s},
          \quad A_h = W_hW_h^\top/s, \quad s = \sqrt{d/H}

(Kim, Papamakarios, Mnih 2021). With one projection :math:`z_h = XW_h` for queries, keys and values, and
:math:`M_h = W_h^\top W_h^VW_h^O`, it is :math:`\sum_h P_h z_h M_h/s`; logits are
:math:`(2z_i\cdot z_j - |z_j|^2)/s` up to a constant of row i.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth.attention import L2SelfAttention
from howsmooth.attention.logit_terms import as_mask
from howsmooth.attention.masks import Sight
from howsmooth.bounds.l2_bounds import average_lip_2, block_lip_2, mixing_matrix
from howsmooth.nn.layers.attention_layer import (
    Mask,
    NormOrder,
    ProjectedAttention,
    ProjectedTokens,
    as_norm,
    glorot,
    without_autocast,
)
from howsmooth.nn.layers.call_masks import CallMasks

Weights = tuple[Tensor, Tensor, Tensor]


class L2Attention(ProjectedAttention):
    """L2 self-attention, Lipschitz on all of space, with the call of `torch.nn.MultiheadAttention`.

    Arguments as in `AttentionLayer`; ``bias`` adds one to the output (on queries and keys it would cancel, on values
    it is a constant). Masks may hide tokens from each other, but none from itself. Logits are computed in float32 or
    more also under autocast: rounding a squared distance to half precision would change the weights.

    >>> layer = L2Attention(8, num_heads=2)
    >>> out, weights = layer(torch.zeros(5, 8), is_causal=True)
    >>> out.shape, weights
    (torch.Size([5, 8]), None)
    """

    key_weight: Tensor | None = None
    """Weights of untied keys; None where keys are tied to the queries."""
    refusal = "L2 attention is bounded only when every token sees itself and nothing is added to the logits"

    def make_weights(self, bias: bool) -> None:
        self.qk_proj = glorot(self.embed_dim, self.embed_dim)
        self.v_proj = glorot(self.embed_dim, self.embed_dim)
        self.out_proj = glorot(self.embed_dim, self.embed_dim, bias=bias)
        self.temperature = self.head_dim**0.5
        self.scale, self.exact_logits = 2 / self.temperature, True

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        masks.require_self(self.num_heads, len(x))
        tokens = self.by_head(self.qk_proj(x))
        return self.from_distances(tokens, tokens)

    def by_head(self, projected: Tensor) -> Tensor:
        """Reshape projected tokens to ``(batch, heads, n, k)``, in float32 or more."""
        tokens = projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return tokens.to(torch.promote_types(tokens.dtype, torch.float32)).contiguous()

    def from_distances(self, query: Tensor, key: Tensor) -> ProjectedTokens:
        """Return tokens with logits −|q_i − k_j|²/s, up to a constant of row i; the queries are the values."""
        # Distances do not depend on the origin; near the keys squares round least.
        centre = key.detach().mean(-2, keepdim=True)
        centred = key - centre
        shift = -centred.square().sum(-1)[:, :, None] / self.temperature
        return ProjectedTokens(centred if query is key else query - centre, centred, query, shift)

    def combine(self, mixed: Tensor, masks: CallMasks) -> Tensor:
        weights = self.weights_by_head()
        with without_autocast(mixed):
            mixing = mixing_matrix(*weights)
        out = functional.linear(mixed, (mixing.mT / self.temperature).to(mixed.dtype))
        factor, bias = self.factor(masks, weights, mixing), self.out_proj.bias
        out = out if factor is None else out * factor.to(out.dtype)
        return out if bias is None else out + bias

    def factor(self, masks: CallMasks, weights: Weights, mixing: Tensor, follow: bool = True) -> Tensor | None:
        """Return a factor of the output, one number or ``(batch, 1, 1)``; None for one."""
        return None

    def weights_by_head(self) -> Weights:
        """Return W_hᵀ, W^V_hᵀ and W^O_h, each ``(heads, k, d)`` as in the bounds, in float32 or more."""
        query, value = (w.weight.unflatten(0, (self.num_heads, -1)) for w in (self.qk_proj, self.v_proj))
        output = self.out_proj.weight.mT.unflatten(0, (self.num_heads, -1))
        dtype = torch.promote_types(query.dtype, torch.float32)
        return query.to(dtype), value.to(dtype), output.to(dtype)

    def attached_map(self, mask: Mask, n: int | None) -> L2SelfAttention:
        weights, bias = self.weights_by_head(), self.out_proj.bias
        factor = self.factor(CallMasks(n or 0, as_mask(mask)), weights, mixing_matrix(*weights), follow=False)
        query, value, output = (weight.flatten(0, 1) for weight in weights)
        output = output if factor is None else output * factor
        attention_map = L2SelfAttention(query, value, output.mT, heads=self.num_heads, key=self.key_weight, mask=mask)
        return attention_map.replace(output_bias=None if bias is None else bias[:].to(query.dtype))

    def lipschitz_bound(self, n: int, radius: float | None = None, norm: NormOrder = 2, mask: Mask = None) -> Tensor:
        least = super().lipschitz_bound(n, radius, norm, mask)
        if as_norm(norm) != 2:
            return least
        attention = self.map(mask, n)
        assert isinstance(attention, L2SelfAttention)
        query, value, output = attention.query_weight, attention.plain_value, attention.output_weight
        average = average_2(CallMasks(n, as_mask(mask)))
        return torch.minimum(least, block_lip_2(query.double(), value.double(), output.double(), average))


def average_2(masks: CallMasks, n: int | None = None) -> float:
    """Return κ of the Gaussian average under the masks of a call, for its n tokens or for another number."""
    return _average_2(masks.terms.most_seen(masks.n if n is None else n), masks.terms.sight)


@torch.compiler.assume_constant_result
def _average_2(n: float, sight: Sight) -> float:
    """Return `average_lip_2` as a constant to `torch.compile`, which cannot trace scipy."""
    return average_lip_2(n, sight)


class UntiedL2Attention(L2Attention):
    """`L2Attention` with untied keys, a baseline of Kim et al. (2021).

    P_ij ∝ exp(−|W^Q_hᵀx_i − W^K_hᵀx_j|²/s), W^Q_h ≠ W^K_h; the values have the factor A_h as before.

    **Not Lipschitz**: with q = 1, k = ½ and three tokens x_1 = 100b, k·x_{2,3} = q·x_1 ± b its Jacobian grows like b².
    `lipschitz_bound` refuses it.

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
        return self.from_distances(self.by_head(self.qk_proj(x)), self.by_head(self.k_proj(x)))
