"""The base of all trainable attention layers: the call of `torch.nn.MultiheadAttention`, masks, heads, bounds.

Weights are computed over blocks of queries, so that neither direction holds all n × n of them at once. Tensors of a
`BlockwiseAttention` are ``(maps, n, width)``, one map per item and head, as in `howsmooth.attention.masks`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from howsmooth._util.validation import check_count, check_number, check_weights, shown, validated
from howsmooth.attention import AttentionMap, Causal, DenseBias, LogitBias, Padding
from howsmooth.attention.conversion import check_no_dropout
from howsmooth.attention.masks import HIDDEN, Maps, Terms, softmax
from howsmooth.bounds import least_upper_bound, setting
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.sets import Ball


@dataclass(frozen=True)
class CallMasks:
    """Masks and padding of one call.

    Attributes:
        n: number of tokens, padded ones included.
        terms: masks and other additive terms, without padding.
        keep: ``(batch, n)``, False for padded tokens; None when there are none.
    """

    n: int
    terms: Terms = field(default_factory=Terms)
    keep: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        attn_mask: Tensor | LogitBias | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
    ) -> CallMasks:
        """Read the arguments of a layer; ``shape`` is (batch, n, heads).

        >>> list(CallMasks.of((1, 3, 2), torch.ones(3, 3).triu(1).bool(), False, None).terms)
        [Causal()]
        """
        batch, n, heads = shape
        mask = _dense(attn_mask, batch, heads) if isinstance(attn_mask, Tensor) else attn_mask
        repeated = is_causal and mask is not None and mask.is_causal  # torch then reads the flag, not the mask
        terms = Terms([] if mask is None or repeated else [mask])
        if any(isinstance(term, Padding) for term in terms):
            raise InvalidInput("padding cannot be an attn_mask here: pass key_padding_mask, True for padded tokens.")
        terms.check(n, heads, batch)
        if terms.is_causal or is_causal:
            terms = Terms([Causal(), *(term for term in terms if not term.is_causal)])
        return cls(n, terms, None if key_padding_mask is None else _keep(key_padding_mask, batch, n))

    @property
    def padded_keys(self) -> Tensor | None:
        """``(batch, n)``: padded tokens, except where an item holds nothing else (its outputs are zero anyway)."""
        return None if self.keep is None else ~self.keep & self.keep.any(-1, keepdim=True)

    def zero_padding(self, tokens: Tensor) -> Tensor:
        """Set padded tokens to zero; ``tokens`` is ``(batch, n, ·)``."""
        return tokens if self.keep is None else tokens.masked_fill(~self.keep[..., None], 0.0)

    def require_self(self, heads: int, batch: int) -> None:
        """Refuse masks that hide a token from itself, or that add numbers: L2 attention is then not Lipschitz.

        The bounds need P_ii > 0: the weight of the token itself keeps Σ_j P_ij|z_i − z_j|² below φ⁻¹(n − 1).
        """
        if not self.terms.hides_only:
            raise InvalidInput(
                "L2 attention takes masks that hide (booleans, or 0 and −inf), but this one adds other numbers to "
                "the logits, and no Lipschitz bound holds then."
            )
        if not self.terms.sees_itself(self.n, heads, batch):
            raise InvalidInput(
                "this mask hides a token from itself, and L2 attention is then not Lipschitz: let every token see "
                "itself (padded tokens belong in key_padding_mask)."
            )


def _dense(mask: Tensor, batch: int, heads: int) -> DenseBias:
    """Convert a mask of torch, where True hides, to a term."""
    if mask.dim() == 3:
        if len(mask) != batch * heads:
            raise InvalidInput(
                f"a mask of three axes has one matrix for each of the {batch} item(s) and {heads} head(s), got "
                f"{tuple(mask.shape)}: give (n, n) or (batch, 1, n, n) instead."
            )
        mask = mask.unflatten(0, (batch, heads))
    return DenseBias(~mask if mask.dtype == torch.bool else mask)


def _keep(padding: Tensor, batch: int, n: int) -> Tensor:
    """Return True for real tokens, from torch's mask of padded ones (True, or −∞)."""
    padding = padding[None] if padding.dim() == 1 else padding
    if padding.shape != (batch, n):
        raise InvalidInput(f"the padding mask has shape {tuple(padding.shape)}, but there are {batch} × {n} tokens.")
    if padding.dtype == torch.bool:
        return ~padding
    if not padding.is_floating_point() or not bool(((padding == 0) | (padding == HIDDEN)).all()):
        raise InvalidInput("a padding mask holds booleans (True = padded), or 0 and −inf.")
    return padding == 0


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


_NORMS = {2: 2.0, "2": 2.0, "inf": math.inf, math.inf: math.inf}
Mask = LogitBias | Tensor | str | None
NormOrder = float | Literal["2", "inf"]


class AttentionLayer(nn.Module, ABC):
    """Trainable self-attention, called like `torch.nn.MultiheadAttention`, that knows its Lipschitz bound.

    Args:
        embed_dim: width d of a token.
        num_heads: number of heads, each of width d / num_heads.
        bias: whether projections have biases.
        batch_first: inputs are ``(batch, n, d)``; with False ``(n, batch, d)``. A single sequence is ``(n, d)``.
        dropout: share of attention weights dropped in training. Bounds are those of the map without dropout.

    Padded tokens (``key_padding_mask``) are hidden from all others, and their own output is zero before the output
    bias: the Jacobian is that of the sequence without padding, bordered by zeros. Bounds grow with n, so the one for n
    tokens also holds when some of the n are padded.
    """

    in_proj_bias = None
    """`torch.nn.TransformerEncoderLayer` then skips its fused dot-product path."""
    refusal = "this attention has no global Lipschitz bound: give a radius"
    """The message when no bound of the catalogue applies to all inputs."""

    @validated
    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = False, batch_first: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.embed_dim = check_count(embed_dim, "embed_dim")
        self.num_heads = check_count(num_heads, "num_heads")
        if self.embed_dim % self.num_heads:
            raise InvalidInput(f"a width of {embed_dim!r} does not split into {num_heads!r} heads.")
        check_weights(2 * self.embed_dim**2, "the layer")
        self.head_dim = self.embed_dim // self.num_heads
        self.batch_first = batch_first
        self.dropout = check_number(dropout, "dropout", least=0, below=1)
        self.make_weights(bias)

    def make_weights(self, bias: bool) -> None:
        """Make the projections, with or without biases."""

    @abstractmethod
    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output of a batch ``(batch, n, d)``, and on request the weights ``(batch, heads, n, ·)``."""

    @abstractmethod
    def attached_map(self, mask: Mask, n: int | None) -> nn.Module:
        """Return `map` without detaching its weights."""

    def map(self, mask: Mask = None, n: int | None = None) -> AttentionMap:
        """Return this layer without dropout as an attention map: for measurements, bounds and worst cases.

        The map shares weights but holds products of weights as they are now: make a new one after training.

        Args:
            mask: None, "causal", booleans (True = may look) or a `LogitBias`, as in `howsmooth.SelfAttention`.
            n: number of tokens, for layers that depend on it.
        """
        with torch.no_grad():
            attached = self.attached_map(mask, n)
        for module in attached.modules():  # views of parameters require gradients, even those made under no_grad
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach()
        return attached  # type: ignore[return-value]

    def attention_map(self, n: int | None = None, mask: Mask = None) -> AttentionMap:
        """Return `map`, and refuse a layer in training with dropout; `howsmooth.measure` and others call it."""
        check_no_dropout(self, self.dropout)
        return self.map(mask, n)

    def lipschitz_bound(self, n: int, radius: float | None = None, norm: NormOrder = 2, mask: Mask = None) -> Tensor:
        """Return an upper bound on the Lipschitz constant: the smallest applicable one of the catalogue, in float64.

        Args:
            n: number of tokens.
            radius: maximum norm of a token; None for all inputs.
            norm: 2 (Frobenius norm of the tokens) or "inf" (largest entry).
            mask: as in `map`.
        """
        check_length(n)
        where, order = setting(self.map(mask, n), n=n, over=None if radius is None else Ball(radius)), as_norm(norm)
        found = least_upper_bound(where, order)
        if found is not None:
            return found[1]
        if order != 2:
            raise DoesNotApply("no bound in the ∞-norm is known for this attention and mask: choose norm=2.")
        raise DoesNotApply(f"{self.refusal}." if radius is None else "no bound is known for this attention and mask.")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | LogitBias | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the self-attention of the tokens, and on request the weights P.

        Args:
            query: the tokens; ``key`` and ``value`` are None or the same tensor.
            key_padding_mask: ``(batch, n)``, True (or −∞) for padded tokens.
            need_weights, average_attn_weights: whether to return P, and whether as its mean over heads.
            attn_mask: booleans (True = hidden, as in torch) or logits to add, ``(n, n)``, ``(batch·heads, n, n)`` or
                ``(batch, heads or 1, n, n)``; or a `LogitBias` such as `howsmooth.SlidingWindow`.
            is_causal: token i sees the tokens j ≤ i, also in addition to ``attn_mask``.
        """
        self._check(query, key, value)
        single = query.dim() == 2
        x = query[None] if single else query if self.batch_first else query.transpose(0, 1)
        masks = CallMasks.of((*x.shape[:2], self.num_heads), attn_mask, is_causal, key_padding_mask)
        out, weights = self.attend(masks.zero_padding(x), masks, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if any(other is not None and other is not query for other in (key, value)):
            raise InvalidInput(
                f"{type(self).__name__} is self-attention: leave key and value out, or pass the tensor of the query "
                "(its bounds hold for tokens that attend to each other)."
            )
        if query.dim() not in (2, 3) or query.shape[-1] != self.embed_dim or not query.is_floating_point():
            raise InvalidInput(
                f"tokens must be floating, of shape (n, {self.embed_dim}) or (batch, n, {self.embed_dim}), got "
                f"{query.dtype} of shape {tuple(query.shape)}."
            )
        if query.shape[-2 if query.dim() == 2 or self.batch_first else 0] == 0:
            raise InvalidInput("attention needs at least one token, got a sequence of length 0.")

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}"


@dataclass(frozen=True)
class ProjectedTokens:
    """Projected tokens, each ``(batch, heads, n, ·)``, and a term for the logits of each key (or of all).

    Attributes:
        shift: broadcasts with ``(batch, heads, 1, n)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor | None = None


class ProjectedAttention(AttentionLayer):
    """A layer with queries, keys and values: projection, weighted sums, output projection.

    Attributes:
        scale: factor on the dot products of queries and keys.
        weighting: "softmax" or "sigmoid".
        exact_logits: whether logits have the dtype of the queries also under autocast.
    """

    out_proj: nn.Linear
    scale: float = 1.0
    weighting: str = "softmax"
    exact_logits: bool = False

    @abstractmethod
    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        """Return queries, keys and values of x, ``(batch, n, d)``."""

    def by_head(self, projected: Tensor) -> Tensor:
        """Reshape projected tokens, ``(batch, n, heads·k)``, to ``(batch, heads, n, k)``."""
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def combine(self, mixed: Tensor, masks: CallMasks) -> Tensor:
        """Apply the output projection to the weighted sums of all heads side by side, ``(batch, n, d)``."""
        return self.out_proj(mixed)

    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output of a batch ``(batch, n, d)``, and on request the weights ``(batch, heads, n, n)``."""
        batch, n, _ = x.shape
        heads = self.project(x, masks)
        query, key, value = (tokens.flatten(0, 1) for tokens in (heads.query, heads.key, heads.value))
        attention = BlockwiseAttention(
            query,
            key,
            Maps.every(batch, self.num_heads, n, query),
            self._shift(heads.shift, masks, batch, query),
            masks.terms,
            self.scale,
            self.weighting,
            self.dropout if self.training else 0.0,
            masks.keep is not None,
        )
        with without_autocast(query) if self.exact_logits else nullcontext():
            mixed = attention.apply(value)
            weights = attention.weights(slice(0, n), slice(0, n)) if need_weights else None

        def by_token(of_heads: Tensor) -> Tensor:
            side_by_side = of_heads.unflatten(0, (batch, self.num_heads)).transpose(1, 2).flatten(2)
            return masks.zero_padding(side_by_side)

        out = self.combine(by_token(mixed).to(x.dtype), masks)
        if weights is not None:
            weights = by_token(weights).unflatten(2, (self.num_heads, n)).transpose(1, 2)
        return out, weights

    def _shift(self, shift: Tensor | None, masks: CallMasks, batch: int, like: Tensor) -> Tensor | None:
        """Return the term for the logits of each key, padding included, as ``(maps, 1, n)``."""
        hidden = masks.padded_keys
        if hidden is not None:
            zero = like.new_zeros(()) if shift is None else shift
            shift = zero.masked_fill(hidden[:, None, None], HIDDEN)
        return None if shift is None else shift.expand(batch, self.num_heads, 1, masks.n).reshape(-1, 1, masks.n)


def check_length(n: float) -> None:
    """Refuse a value that is no number of tokens.

    >>> check_length(0)
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: n must be at least 1, got 0.
    """
    check_count(int(n) if isinstance(n, float) and n.is_integer() else n, "n")


def as_norm(norm: NormOrder) -> float:
    """Return the norm 2 or ∞ as a number.

    >>> as_norm("inf"), as_norm("2")
    (inf, 2.0)
    """
    try:
        return _NORMS[norm]
    except (KeyError, TypeError):  # another norm, or an unhashable value
        raise InvalidInput(f"layers are bounded in norm 2 or 'inf', got {shown(norm)}.") from None


def precise(x: Tensor) -> Tensor:
    """Return a tensor in float32 or more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(like: Tensor) -> torch.autocast:
    """Return a context in which matrix products have the dtype of their factors."""
    return torch.autocast(like.device.type, enabled=False)


def glorot(rows: int, columns: int, parts: int = 1, bias: bool = False) -> nn.Linear:
    """Make a linear map of ``parts`` stacked blocks, each with Glorot's uniform weights, and a bias of zero."""
    linear = nn.Linear(columns, rows * parts, bias=bias)
    for block in linear.weight.detach().chunk(parts):
        nn.init.xavier_uniform_(block)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
