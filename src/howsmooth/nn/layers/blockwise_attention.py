"""Attention over blocks of queries: the n × n weights are never held at once, in either direction.

Tensors are ``(maps, n, width)``, one map per item of the batch and head, as `howsmooth.attention.masks` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from howsmooth.attention.logit_terms import Terms
from howsmooth.attention.masks import Maps, softmax

BLOCK_WEIGHTS = 2**20
"""Weights in a block of queries, over all maps: few enough to stay in the cache between softmax and product."""
STORED_WEIGHTS = 2**26
"""Weights kept for the way back; from here on they are computed again, block by block."""


@dataclass(frozen=True)
class BlockwiseAttention:
    """P·v with P = softmax(scale·q kᵀ + shift + masks), or the sigmoid of the same logits.

    Attributes:
        terms: masks and other additive terms.
        scale: factor on the dot products.
        weighting: "softmax", or "sigmoid" for weights that are not normalised over the keys.
        dropout: share of the weights set to zero; the others grow to make up for it.
        padded: whether ``shift`` may hide keys, with −∞.
        block, kept: see `BLOCK_WEIGHTS` and `STORED_WEIGHTS`.

    >>> q = torch.zeros(1, 3, 2)
    >>> BlockwiseAttention()(q, q, torch.tensor([[[3.0], [6.0], [0.0]]]), Maps.every(1, 1, 3, q)).flatten()
    tensor([3., 3., 3.])
    """

    terms: Terms = field(default_factory=Terms)
    scale: float = 1.0
    weighting: str = "softmax"
    dropout: float = 0.0
    padded: bool = False
    block: int = BLOCK_WEIGHTS
    kept: int = STORED_WEIGHTS

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, maps: Maps, shift: Tensor | None = None) -> Tensor:
        """The weighted sums, ``(maps, n, v)``; ``shift`` ``(maps or 1, 1, n)`` is added to the logits of each key."""
        n = maps.n
        rows = max(1, self.block // max(1, len(query) * n))
        if rows >= n:
            return self._block(query, key, value, shift, maps, slice(0, n))
        again = len(query) * n * n > self.kept and torch.is_grad_enabled()
        again = again and torch._C._functorch.peek_interpreter_stack() is None  # torch.func cannot recompute
        parts = []
        for start in range(0, n, rows):
            inputs = query, key, value, shift, maps, slice(start, min(start + rows, n))
            parts.append(checkpoint(self._block, *inputs, use_reentrant=False) if again else self._block(*inputs))
        return torch.cat(parts, dim=1)

    def weights(self, query: Tensor, key: Tensor, maps: Maps, shift: Tensor | None = None) -> Tensor:
        """All of P, ``(maps, n, n)``, without dropout."""
        return self._weights(query, key, shift, maps, slice(0, maps.n), slice(0, maps.n))

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, maps: Maps, rows: slice
    ) -> Tensor:
        low, high = self.terms.key_range(rows.start, rows.stop, maps.n)
        if low >= high:
            return torch.zeros_like(query[:, rows, :1]) * value[:, :1]
        weights = self._weights(query, key, shift, maps, rows, slice(low, high))
        if self.dropout:
            weights = functional.dropout(weights, self.dropout)
        return weights @ value[:, low:high]

    def _weights(
        self, query: Tensor, key: Tensor, shift: Tensor | None, maps: Maps, rows: slice, cols: slice
    ) -> Tensor:
        if shift is None:
            logits = self.scale * query[:, rows] @ key[:, cols].mT
        else:
            logits = torch.baddbmm(shift[..., cols], query[:, rows], key[:, cols].mT, alpha=self.scale)
        logits = self.terms.added_to(logits, maps, rows, cols)
        if self.weighting == "sigmoid":
            return torch.sigmoid(logits)
        # A row of −∞ alone has weights of NaN, and so have all gradients then. A padded token under a mask that lets it
        # see itself may see nothing but padding.
        may_be_blind = not self.terms.keeps_self or (self.padded and self.terms.hides)
        return softmax(logits) if may_be_blind else torch.softmax(logits, dim=-1)
