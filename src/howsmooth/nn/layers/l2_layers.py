r"""L2 self-attention to train with: tied queries and keys, the factor A_h, masks that let a token see itself.

.. math:: F(X) = \sum_h P_h X A_h W_h^V W_h^O, \quad P_{ij} \propto e^{-|W_h^\top(x_i - x_j)|^2/s},
          \quad A_h = W_hW_h^\top/s, \quad s = \sqrt{d/H}

(Kim, Papamakarios, Mnih 2021). With one projection :math:`z_h = XW_h` for queries, keys and values, and
:math:`M_h = W_h^\top W_h^VW_h^O`, it is :math:`\sum_h P_h z_h M_h/s`; logits are
:math:`(2z_i\cdot z_j - |z_j|^2)/s` up to a constant of row i.

`ContractiveL2Attention` divides it by its own Lipschitz bound, which depends on the weights, on n and on the mask. In
the 2-norm that is `block_lip_2`: two spectral norms times the constant κ(n) of the Gaussian average. In the ∞-norm,
which Kim, Papamakarios and Mnih (2021) divide by, it is `howsmooth.bounds.l2_bounds.l2_lip_inf` or the paper's own
`howsmooth.bounds.l2_bounds.lip_inf`, a thousand times larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth._util.validation import check_count, check_positive, validated
from howsmooth.attention import L2SelfAttention
from howsmooth.attention.masks import Sight, as_mask
from howsmooth.bounds import get, l2_bounds, setting
from howsmooth.bounds.l2_bounds import average_lip_2, balanced, block_lip_2, mixing_matrix
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.attention_layer import (
    CallMasks,
    Mask,
    NormOrder,
    ProjectedAttention,
    ProjectedTokens,
    as_norm,
    check_length,
    glorot,
    precise,
    without_autocast,
)
from howsmooth.nn.layers.weight_norms import SpectralNorm
from howsmooth.sets import Ball

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
        """Reshape as other layers do, in float32 or more."""
        return precise(super().by_head(projected)).contiguous()

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
        weights = self.qk_proj.weight, self.v_proj.weight, self.out_proj.weight.mT
        query, value, output = (precise(weight.unflatten(0, (self.num_heads, -1))) for weight in weights)
        return query, value, output

    def attached_map(self, mask: Mask, n: int | None) -> L2SelfAttention:
        weights, bias = self.weights_by_head(), self.out_proj.bias
        factor = self.factor(CallMasks(n or 0, as_mask(mask)), weights, mixing_matrix(*weights), follow=False)
        query, value, output = (weight.flatten(0, 1) for weight in weights)
        output = output if factor is None else output * factor
        attention_map = L2SelfAttention(query, value, output.mT, heads=self.num_heads, key=self.key_weight, mask=mask)
        return attention_map.replace(output_bias=None if bias is None else bias[:].to(query.dtype))

    def lipschitz_bound(self, n: int, radius: float | None = None, norm: NormOrder = 2, mask: Mask = None) -> Tensor:
        bound = super().lipschitz_bound(n, radius, norm, mask)
        if as_norm(norm) != 2:
            return bound
        attention = self.map(mask, n)
        assert isinstance(attention, L2SelfAttention)
        query, value, output = attention.query_weight, attention.plain_value, attention.output_weight
        average = average_2(CallMasks(n, as_mask(mask)))
        return torch.minimum(bound, block_lip_2(query.double(), value.double(), output.double(), average))


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
        return precise(self.k_proj.weight)

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        return self.from_distances(self.by_head(self.qk_proj(x)), self.by_head(self.k_proj(x)))


class ContractiveL2Attention(L2Attention):
    """c·F/bound with F an `L2Attention`: Lipschitz with constant at most c for every input and every weights.

    **In training** with norm 2 the two spectral norms of the bound are lower estimates from a warm-started iteration
    (`layers.weight_norms`): the constant may exceed c slightly, in trials by at most 0.1 %. **At evaluation** the norms
    are exact, from a singular value decomposition that is cached until the weights change. `lipschitz_bound` is an
    upper bound in either mode. In the ∞-norm the bound is always exact. Gradients flow through the division.

    Padded tokens do not count: an item is divided by the bound for its own number of tokens.

    Args:
        coefficient: c > 0; below 1 the layer contracts, and x + layer(x) can be inverted.
        norm: "2" (Frobenius norm of the tokens) or "inf" (largest entry) in which the constant is c.
        bound: "howsmooth", or with norm "inf" "kim2021" for the bound printed in the paper.
        max_tokens: divide by the bound for so many tokens, whatever the length of the input, and refuse more. By
            default outputs of the same tokens change with the length of the sequence, which matters in generation.
        embed_dim, num_heads, bias, batch_first: as in `L2Attention`. Dropout is refused: it breaks the bound.

    >>> layer = ContractiveL2Attention(8, num_heads=2, coefficient=0.9).eval()
    >>> bool(layer.lipschitz_bound(n=100) <= 0.9 * (1 + 1e-6))
    True
    """

    @validated
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        coefficient: float = 0.9,
        norm: NormOrder = "2",
        bias: bool = False,
        batch_first: bool = True,
        dropout: float = 0.0,
        *,
        bound: Literal["howsmooth", "kim2021"] = "howsmooth",
        max_tokens: int | None = None,
    ):
        super().__init__(embed_dim, num_heads, bias, batch_first)
        if dropout != 0:
            raise InvalidInput("dropout on attention weights breaks the Lipschitz bound: leave it out here.")
        self.coefficient = check_positive(coefficient, "coefficient")
        self.norm = as_norm(norm)
        if bound not in ("howsmooth", "kim2021") or (bound == "kim2021" and self.norm == 2):
            raise InvalidInput(
                f"the bound is 'howsmooth', or with norm='inf' 'kim2021', got {bound!r} (in the 2-norm the corrected "
                "bound of the paper is never smaller)."
            )
        self.bound, self.max_tokens = bound, None if max_tokens is None else check_count(max_tokens, "max_tokens")
        if self.norm == 2:
            self.tied_norm = SpectralNorm(embed_dim, embed_dim)
            self.mixing_norm = SpectralNorm(embed_dim, embed_dim)
            self.follow_weights()

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Update the estimates after weights were set from outside; training updates them in every call."""
        if self.norm == 2:
            weights = self.weights_by_head()
            tied, mixing = balanced(weights[0], mixing_matrix(*weights))
            self.tied_norm.follow(tied)
            self.mixing_norm.follow(mixing)

    def factor(self, masks: CallMasks, weights: Weights, mixing: Tensor, follow: bool = True) -> Tensor:
        """Return c over the bound, for all items together or, with padding, for each."""
        bound = self._bound(masks, weights, mixing, follow)
        counts = self._counts(masks)
        bounds = {n: bound(n) for n in set(counts)}
        tiny = torch.finfo(mixing.dtype).tiny  # weights of zero give a bound of zero, and an output of zero
        if len(counts) == 1:
            return self.coefficient / bounds[counts[0]].clamp(min=tiny)
        return self.coefficient / torch.stack([bounds[n] for n in counts]).clamp(min=tiny)[:, None, None]

    def lipschitz_bound(self, n: int, radius: float | None = None, norm: NormOrder = 2, mask: Mask = None) -> Tensor:
        """At most c in the layer's own norm at evaluation; an upper bound in both, in training too, padded or not.

        An item of m ≤ n tokens is divided by the bound for m, so this is the largest over m of the bound of the L2
        attention in the requested norm times c over that divisor. Both grow with m, so beyond a few tokens intervals of
        m stand for their members, with the last one above and the first one below.
        """
        check_length(n)
        masks, order = CallMasks(n, as_mask(mask)), as_norm(norm)
        theorem = get("howsmooth.l2_lip_2" if order == 2 else "howsmooth.l2_lip_inf")
        if theorem.refusal(setting(self.map(mask, n), n=n, over=None if radius is None else Ball(radius))) is not None:
            raise DoesNotApply(f"{self.refusal}.")
        with torch.no_grad():
            weights = self.weights_by_head()
            divisor = self._bound(masks, weights, mixing_matrix(*weights), follow=False)
            query, value, output = (weight.double() for weight in weights)
            size = (
                block_lip_2(query, value, output, 1.0) if order == 2 else l2_bounds.l2_lip_inf(query, value, output, 1)
            )
            if self.max_tokens is not None or (order == self.norm and self.bound == "howsmooth"):
                spans = [(self._counts(masks)[0], n)]  # one divisor for all, or one that grows as the bound does
            else:
                spans = list(_spans(n))
            tiny = torch.finfo(torch.float64).tiny
            slopes = [self._growth(masks, order, m) / divisor(k).double().clamp(min=tiny) for k, m in spans]
            return self.coefficient * size * torch.stack(slopes).amax()

    def _growth(self, masks: CallMasks, order: float, n: int) -> float:
        """Return the constant of the Gaussian average of n tokens, on which the bound of L2 attention depends."""
        return average_2(masks, n) if order == 2 else l2_bounds.average_lip_inf(masks.terms.most_seen(n), self.head_dim)

    def _bound(self, masks: CallMasks, weights: Weights, mixing: Tensor, follow: bool) -> Callable[[int], Tensor]:
        """Return the Lipschitz bound of the L2 attention as a function of n."""
        with without_autocast(mixing):
            if self.norm == 2:
                tied, mixed = balanced(weights[0], mixing)
                size = self.tied_norm(tied, follow) * self.mixing_norm(mixed, follow) / self.temperature
                return lambda n: average_2(masks, n) * size
            form = l2_bounds.l2_lip_inf if self.bound == "howsmooth" else l2_bounds.lip_inf
            return lambda n: form(*weights, masks.terms.most_seen(n))

    def _counts(self, masks: CallMasks) -> list[int]:
        """Return the numbers of tokens of the items: one number when all are equal."""
        if self.max_tokens is None:
            if masks.n == 0:
                raise InvalidInput("this layer divides by a bound that depends on n: call map(mask, n=...).")
            return [masks.n] if masks.keep is None else masks.keep.sum(-1).clamp(min=1).tolist()
        if masks.n > self.max_tokens:
            raise InvalidInput(
                f"this layer was made for at most {self.max_tokens} tokens, got {masks.n}: set max_tokens higher."
            )
        return [self.max_tokens]

    def extra_repr(self) -> str:
        norm = "2" if self.norm == 2 else f"inf, bound={self.bound}"
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}, norm={norm}"


def _spans(n: int) -> Iterator[tuple[int, int]]:
    """Yield intervals that cover 1 … n: single numbers at first, then growing by a twentieth.

    >>> list(_spans(3)), list(_spans(1000))[-1]
    ([(1, 1), (2, 2), (3, 3)], (992, 1000))
    """
    first = 1
    while first <= n:
        last = min(n, max(first, int(1.05 * first)))
        yield first, last
        first = last + 1
