"""Other ways to mix tokens; adapted weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.network.handwritten.llamas import SwiGLU
from tests.network.handwritten.plain import PlainAttention, Stack


class MixerBlock(nn.Module):
    """An MLP over tokens, one over channels."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tokens = nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * n, n))
        self.channels = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class SpatialGateBlock(nn.Module):
    """Half of the channels, mixed over tokens by a convolution of width one, gates the other half."""

    def __init__(self, n: int, d: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(d), nn.LayerNorm(hidden)
        self.proj_in, self.proj_out = nn.Linear(d, 2 * hidden), nn.Linear(hidden, d)
        self.spatial = nn.Conv1d(n, n, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.proj_in(self.norm(x))).chunk(2, dim=-1)
        return x + self.proj_out(u * self.spatial(self.gate_norm(v)))


class ConvolutionalPositions(nn.Module):
    """A depthwise convolution over tokens before the blocks, the largest token value behind them."""

    def __init__(self, pool: str, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.pool = pool
        self.pos_conv = nn.Conv1d(d, d, kernel_size=3, padding=1, groups=d)
        self.blocks = Stack(partial(PlainAttention, d, heads), d)
        self.head = nn.Linear(d, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.pos_conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.blocks(x)
        return self.head(x.amax(dim=1) if self.pool == "max" else x.mean(dim=1))


class ExpertsBlock(nn.Module):
    """Each token goes to the two experts that its router likes best."""

    def __init__(self, d: int, experts: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList([SwiGLU(d, 2 * d) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).view(-1, x.shape[-1])
        weights, selected = torch.topk(self.gate(flat), 2)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            results[token] += weights[token, nth, None] * expert(flat[token])
        return x + results.view_as(x)


class LowRankAdapted(nn.Module):
    """A linear map with a scaled low-rank addition."""

    def __init__(self, inner: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.inner, self.scaling = inner, alpha / rank
        self.lora_dropout = nn.Dropout(0.1)
        self.lora_A = nn.Parameter(torch.empty(rank, inner.in_features))
        self.lora_B = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (self.lora_dropout(x) @ self.lora_A.T @ self.lora_B.T) * self.scaling


class AdaptedWeights(Stack):
    """Low-rank additions, and a weight that a parametrisation computes at each use."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__(partial(PlainAttention, d, heads), d)
        attention: Any
        for attention in self.attentions:
            attention.q, attention.v = LowRankAdapted(attention.q), LowRankAdapted(attention.v)
            nn.utils.parametrizations.weight_norm(attention.o)


class UnusedParts(nn.Sequential):
    """Modules of which some are never used, and one whose result is thrown away."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__(*(Stack(partial(PlainAttention, d, heads), d) for _ in range(2)))
        self.unused = nn.TransformerEncoderLayer(d, heads, 2 * d, batch_first=True)
        self.probe = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.probe(x).softmax(-1)
        return self[0](x)
