"""The order of tokens and channels in memory.

For one input of few tokens in float32, a BLAS multiplies by weights up to a third faster when the product comes out
channel by channel: Wᵀxᵀ, not x W. So do the batched products of attention, where the narrow matrix is then the first.
Element-wise functions preserve the order of their input, so that one arrangement at the beginning lasts for a whole
model. Shapes are always ``(…, n, channels)``; only the running time depends on the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FEW_TOKENS = 256
"""Number of tokens up to which this order is faster; beyond it there is no gain, and masked tiles are slower."""


def prefers_channels_first(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether channels before tokens are faster: for one input of few tokens; float64 is slower so."""
    one = len(shape) >= 2 and math.prod(shape[:-2]) == 1
    return one and shape[-2] <= FEW_TOKENS and dtype != torch.float64


def to_preferred_layout(x: Tensor) -> Tensor:
    """x with its channels before its tokens in memory, where that pays.

    >>> to_preferred_layout(torch.ones(2, 3)).stride(), to_preferred_layout(torch.ones(4, 2, 3)).stride()
    ((1, 2), (6, 3, 1))
    """
    return channels_first(x) if prefers_channels_first(x.shape, x.dtype) else x


def channels_first(x: Tensor) -> Tensor:
    """x with its channels before its tokens in memory."""
    return x.mT.contiguous().mT


def is_channels_first(x: Tensor) -> bool:
    """Whether channels lie before tokens."""
    return x.stride(-2) == 1


def in_layout(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function that treats tokens and channels alike, in the order that x has."""
    return function(x.mT).mT if is_channels_first(x) else function(x)


def matmul(tokens: Tensor, matrix: Tensor) -> Tensor:
    """tokens @ matrix, channel by channel where that pays.

    >>> matmul(torch.ones(2, 3), torch.ones(3, 4)).stride()
    (1, 2)
    """
    if not prefers_channels_first(tokens.shape, tokens.dtype):
        return tokens @ matrix
    n, width = tokens.shape[-2:]
    return (matrix.mT @ tokens.reshape(n, width).mT).mT.reshape(*tokens.shape[:-1], matrix.shape[-1])


def zeros_in_layout(x: Tensor) -> Tensor:
    """Zeros of the shape of x without gaps, whatever x is a view of: batched products add to nothing else at once."""
    return in_layout(x, lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right of every map, in the order that ``total`` has."""
    if is_channels_first(total):
        total.mT.baddbmm_(right.mT, left.mT)
    else:
        total.baddbmm_(left, right)


def join_channels(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The channels of several tensors one after the other, in the order of the first."""
    if is_channels_first(parts[0]):
        return torch.cat([part.mT for part in parts], dim=-2, out=None if out is None else out.mT).mT
    return torch.cat(list(parts), dim=-1, out=out)


def interleave_channels(a: Tensor, b: Tensor) -> Tensor:
    """The channels of a and b in turn: a₀, b₀, a₁, b₁, …"""
    if is_channels_first(a):
        return torch.stack([a.mT, b.mT], dim=-2).flatten(-3, -2).mT
    return torch.stack([a, b], dim=-1).flatten(-2)


def join_heads(heads: Tensor) -> Tensor:
    """The channels of all heads of a token, ``(batch, heads, n, width)`` → ``(batch, n, heads · width)``."""
    return heads.mT.flatten(1, 2).mT if is_channels_first(heads) else heads.transpose(1, 2).flatten(2)
