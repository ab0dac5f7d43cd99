"""Attention over blocks of queries: neither direction holds all n × n weights at once.

Tensors are ``(maps, n, width)``, one map per item of the batch and head, as `howsmooth.attention.masks` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from howsmooth.attention.masks import Maps, Terms, softmax

BLOCK_WEIGHTS = 2**20
"""Weights in a block of queries, over all maps: few enough to stay in the cache between softmax and product."""
STORED_WEIGHTS = 2**26
"""Maximum number of weights stored for the backward pass; beyond it they are recomputed block by block."""


@dataclass(frozen=True)
class BlockwiseAttention:
    """The weights P = softmax(scale·q kᵀ + shift + masks), or the sigmoid of the same logits.

    Attributes:
        shift: ``(maps or 1, 1, n)``, added to the logits of each key.
        terms: masks and other additive terms.
        scale: factor on the dot products.
        weighting: "softmax", or "sigmoid" for weights that are not normalised over the keys.
        dropout: share of the weights set to zero; the others grow to preserve the mean.
        padded: whether ``shift`` may hide keys, with −∞.

    >>> q = torch.zeros(1, 3, 2)
    >>> BlockwiseAttention(q, q, Maps.every(1, 1, 3, q)).apply(torch.tensor([[[3.0], [6.0], [0.0]]])).flatten()
    tensor([3., 3., 3.])
    """

    query: Tensor
    key: Tensor
    maps: Maps
    shift: Tensor | None = None
    terms: Terms = field(default_factory=Terms)
    scale: float = 1.0
    weighting: str = "softmax"
    dropout: float = 0.0
    padded: bool = False

    def apply(self, value: Tensor) -> Tensor:
        """Return the weighted sums P·v, ``(maps, n, v)``, after dropout."""
        n, maps = self.maps.n, len(self.query)
        rows = max(1, BLOCK_WEIGHTS // max(1, maps * n))
        if rows >= n:
            return self._block(value, slice(0, n))
        again = maps * n * n > STORED_WEIGHTS and torch.is_grad_enabled()
        again = again and torch._C._functorch.peek_interpreter_stack() is None  # torch.func cannot recompute
        parts = []
        for start in range(0, n, rows):
            inputs = value, slice(start, min(start + rows, n))
            parts.append(checkpoint(self._block, *inputs, use_reentrant=False) if again else self._block(*inputs))
        return torch.cat(parts, dim=1)

    def _block(self, value: Tensor, rows: slice) -> Tensor:
        low, high = self.terms.key_range(rows.start, rows.stop, self.maps.n)
        if low >= high:
            return torch.zeros_like(self.query[:, rows, :1]) * value[:, :1]
        weights = self.weights(rows, slice(low, high))
        if self.dropout:
            weights = functional.dropout(weights, self.dropout)
        return weights @ value[:, low:high]

    def weights(self, rows: slice, cols: slice) -> Tensor:
        """Return a block of P, without dropout."""
        query, key = self.query[:, rows], self.key[:, cols].mT
        if self.shift is None:
            logits = self.scale * query @ key
        else:
            logits = torch.baddbmm(self.shift[..., cols], query, key, alpha=self.scale)
        logits = self.terms.added_to(logits, self.maps, rows, cols)
        if self.weighting == "sigmoid":
            return torch.sigmoid(logits)
        # A row of −∞ alone has weights of NaN, and so have all gradients then. A padded token under a mask that lets it
        # see itself may see nothing but padding.
        may_be_blind = not self.terms.keeps_self or (self.padded and self.terms.hides)
        return softmax(logits) if may_be_blind else torch.softmax(logits, dim=-1)
