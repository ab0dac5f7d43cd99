r"""L2 attention divided by its own Lipschitz bound: a layer with a constant of at most c, whatever its weights.

The bound depends on the weights, on n and on the mask. In the 2-norm it is `block_lip_2`: two spectral norms times
the constant κ(n) of the Gaussian average. In the ∞-norm, which Kim, Papamakarios and Mnih (2021) divide by, it is
`howsmooth.bounds.own.l2_bounds.l2_lip_inf` or the paper's own `howsmooth.bounds.kim2021.lip_inf`, a thousand times
larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from howsmooth._util.validation import check_count, check_positive, validated
from howsmooth.attention.logit_terms import as_mask
from howsmooth.bounds import get, kim2021, l2_bounds, setting
from howsmooth.bounds.own.l2_bounds import balanced, block_lip_2, mixing_matrix
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.attention_layer import Mask, NormOrder, as_norm, check_length, without_autocast
from howsmooth.nn.layers.call_masks import CallMasks
from howsmooth.nn.layers.l2_layer import L2Attention, Weights, average_2
from howsmooth.nn.layers.weight_norms import SpectralNorm
from howsmooth.sets import Ball


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
            form = l2_bounds.l2_lip_inf if self.bound == "howsmooth" else kim2021.lip_inf
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
