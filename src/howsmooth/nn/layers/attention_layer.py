"""What every trainable attention layer shares: the call of `torch.nn.MultiheadAttention`, heads, bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_number, check_weights, shown, validated
from howsmooth.attention import AttentionMap, LogitBias
from howsmooth.attention.conversion import check_no_dropout
from howsmooth.attention.masks import HIDDEN, Maps
from howsmooth.bounds import least_upper_bound, setting
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.blockwise_attention import BlockwiseAttention
from howsmooth.nn.layers.call_masks import CallMasks
from howsmooth.sets import Ball

_NORMS = {2: 2.0, "2": 2.0, "inf": math.inf, math.inf: math.inf}
Mask = LogitBias | Tensor | str | None
NormOrder = float | Literal["2", "inf"]


class AttentionLayer(nn.Module, ABC):
    """Trainable self-attention, called like `torch.nn.MultiheadAttention`, that knows its Lipschitz bound.

    Args:
        embed_dim: width d of a token.
        num_heads: heads, which share the width between them.
        bias: whether projections have biases.
        batch_first: inputs are ``(batch, n, d)``; with False ``(n, batch, d)``. A single sequence is ``(n, d)``.
        dropout: share of attention weights dropped in training. Bounds are those of the map without dropout.

    Padded tokens (``key_padding_mask``) are hidden from all others, and their own output is zero before the output
    bias: the Jacobian is that of the sequence without padding, bordered by zeros. Bounds grow with n, so the one for n
    tokens also holds when some of the n are padded.
    """

    in_proj_bias = None
    """`torch.nn.TransformerEncoderLayer` sees by it that its fused dot-product path does not apply."""
    refusal = "this attention has no global Lipschitz bound: give a radius"
    """Said when no bound of the catalogue applies to all inputs."""

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
        """Make the projections, with biases or without, once the sizes are known."""

    @abstractmethod
    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Output and, when asked for, weights ``(batch, heads, n, ·)`` of a batch ``(batch, n, d)``."""

    @abstractmethod
    def attached_map(self, mask: Mask, n: int | None) -> nn.Module:
        """`map` on weights that autograd still follows."""

    def map(self, mask: Mask = None, n: int | None = None) -> AttentionMap:
        """This layer without dropout as an attention map: for measuring, for bounds, for worst cases.

        It shares the weights where it can and is a snapshot of products of them: take it anew after training.

        Args:
            mask: None, "causal", booleans (True = may look) or a `LogitBias`, as in `howsmooth.SelfAttention`.
            n: number of tokens, for layers that depend on it.
        """
        with torch.no_grad():
            attached = self.attached_map(mask, n)
        for module in attached.modules():  # views of parameters still ask for gradients, even when made without
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach()
        return attached  # type: ignore[return-value]

    def attention_map(self, n: int | None = None, mask: Mask = None) -> AttentionMap:
        """`map`, but refused while dropout is at work: as what `howsmooth.measure` and its like take this layer."""
        check_no_dropout(self, self.dropout)
        return self.map(mask, n)

    def lipschitz_bound(self, n: int, radius: float | None = None, norm: NormOrder = 2, mask: Mask = None) -> Tensor:
        """A proved upper bound on the Lipschitz constant: the least of those in the catalogue that apply.

        Args:
            n: number of tokens.
            radius: no token is longer than this; without, tokens are any.
            norm: 2 (Frobenius norm of the tokens) or "inf" (largest entry).
            mask: as in `map`.
        """
        check_length(n)
        where, order = setting(self.map(mask, n), n=n, over=None if radius is None else Ball(radius)), as_norm(norm)
        least = least_upper_bound(where, order)
        if least is not None:
            return least[1]
        if order != 2:
            raise DoesNotApply("no bound in the ∞-norm is known for this attention and mask: ask for norm=2.")
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
        """Self-attention of the tokens, and the weights P when asked for.

        Args:
            query: the tokens; ``key`` and ``value`` are None or the same tensor.
            key_padding_mask: ``(batch, n)``, True (or −∞) for padded tokens.
            need_weights, average_attn_weights: whether to return P, and as the mean over heads.
            attn_mask: booleans (True = hidden, as in torch) or logits to add, ``(n, n)``, ``(batch·heads, n, n)`` or
                ``(batch, heads or 1, n, n)``; or a `LogitBias` such as `howsmooth.SlidingWindow`.
            is_causal: token i sees the tokens j ≤ i, on its own or on top of ``attn_mask``.
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
                "(its bounds speak of tokens that see each other)."
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
    """Projected tokens, each ``(batch, heads, n, ·)``, and what is added to the logits of each key (or of all).

    Attributes:
        shift: broadcasts with ``(batch, heads, 1, n)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor | None = None


class ProjectedAttention(AttentionLayer):
    """A layer in which tokens are projected, meet, and are combined.

    Attributes:
        scale: factor on the dot products of queries and keys.
        weighting: "softmax" or "sigmoid".
        exact_logits: whether logits stay in the dtype of the queries also under autocast.
    """

    out_proj: nn.Linear
    scale: float = 1.0
    weighting: str = "softmax"
    exact_logits: bool = False

    @abstractmethod
    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        """Queries, keys and values of x, ``(batch, n, d)``, ready to meet."""

    def combine(self, mixed: Tensor, masks: CallMasks) -> Tensor:
        """The output, from the weighted sums of all heads side by side, ``(batch, n, d)``: their output projection."""
        return self.out_proj(mixed)

    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Output and, when asked for, weights ``(batch, heads, n, n)`` of a batch ``(batch, n, d)``."""
        batch, n, _ = x.shape
        heads = self.project(x, masks)
        query, key, value = (
            tokens.reshape(-1, n, tokens.shape[-1]) for tokens in (heads.query, heads.key, heads.value)
        )
        maps = Maps.every(batch, self.num_heads, n, query)
        shift = self._shift(heads.shift, masks, batch, query)
        dropout = self.dropout if self.training else 0.0
        mixing = BlockwiseAttention(masks.terms, self.scale, self.weighting, dropout, masks.keep is not None)
        with without_autocast(query) if self.exact_logits else nullcontext():
            mixed = mixing(query, key, value, maps, shift)
            weights = mixing.weights(query, key, maps, shift) if need_weights else None
        mixed = mixed.unflatten(0, (batch, self.num_heads)).transpose(1, 2).flatten(2)
        out = self.combine(masks.zero_padding(mixed).to(x.dtype), masks)
        if weights is not None:
            weights = masks.zero_padding(weights.unflatten(0, (batch, self.num_heads)).transpose(1, 2).flatten(2))
            weights = weights.unflatten(2, (self.num_heads, n)).transpose(1, 2)
        return out, weights

    def _shift(self, shift: Tensor | None, masks: CallMasks, batch: int, like: Tensor) -> Tensor | None:
        """What is added to logits, padding included, as ``(maps, 1, n)``."""
        hidden = masks.padded_keys
        if hidden is not None:
            zero = like.new_zeros(()) if shift is None else shift
            shift = zero.masked_fill(hidden[:, None, None], HIDDEN)
        return None if shift is None else shift.expand(batch, self.num_heads, 1, masks.n).reshape(-1, 1, masks.n)


def check_length(n: float) -> None:
    """Refuse what is not a number of tokens.

    >>> check_length(0)
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: n must be at least 1, got 0.
    """
    check_count(int(n) if isinstance(n, float) and n.is_integer() else n, "n")


def as_norm(norm: NormOrder) -> float:
    """2 or ∞ as a number.

    >>> as_norm("inf"), as_norm("2")
    (inf, 2.0)
    """
    try:
        return _NORMS[norm]
    except (KeyError, TypeError):  # another one, or nothing that could be looked up
        raise InvalidInput(f"layers are bounded in norm 2 or 'inf', got {shown(norm)}.") from None


def without_autocast(like: Tensor) -> torch.autocast:
    """A context in which matrix products keep the dtype of their factors."""
    return torch.autocast(like.device.type, enabled=False)


def glorot(rows: int, columns: int, parts: int = 1, bias: bool = False) -> nn.Linear:
    """A linear map of ``parts`` blocks on top of each other, each with Glorot's uniform weights, and no bias yet."""
    linear = nn.Linear(columns, rows * parts, bias=bias)
    for block in linear.weight.detach().chunk(parts):
        nn.init.xavier_uniform_(block)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
