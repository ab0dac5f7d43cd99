"""Plain attention, whose logits and weights others change, within plain blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Self-attention of which the variants below change one step."""

    def __init__(self, d: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.causal = heads, d // heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.size).transpose(-3, -2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.size)
        if self.causal:
            n = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        return scores

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.merge(self.weights(self.logits(q, k)) @ v))


class Stack(nn.Module):
    """Two pre-norm blocks about any attention."""

    def __init__(
        self, attention: Callable[[], nn.Module], d: int, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([attention() for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d)) for _ in range(2)]
        )
        self.norms = nn.ModuleList([norm(d) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return x
