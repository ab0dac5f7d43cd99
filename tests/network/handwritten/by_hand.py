"""Everything by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class WrittenLayerNorm(nn.Module):
    """LayerNorm from mean, variance and square root."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(var + self.eps) + self.shift


class EinsumBlock(nn.Module):
    """A tensor of weights for every head, contractions by einsum, GELU by the error function."""

    def __init__(self, d: int, heads: int, size: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = WrittenLayerNorm(d), WrittenLayerNorm(d)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(heads, d, size)) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(heads, size)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.empty(heads, size, d)), nn.Parameter(torch.zeros(d))
        self.W_in, self.b_in = nn.Parameter(torch.empty(d, 3 * d)), nn.Parameter(torch.zeros(3 * d))
        self.W_out, self.b_out = nn.Parameter(torch.empty(3 * d, d)), nn.Parameter(torch.zeros(d))

    def attention(self, x: Tensor) -> Tensor:
        q = torch.einsum("bnd,hdk->bnhk", x, self.W_Q) + self.b_Q
        k = torch.einsum("bnd,hdk->bnhk", x, self.W_K) + self.b_K
        v = torch.einsum("bnd,hdk->bnhk", x, self.W_V) + self.b_V
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        z = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        h = torch.einsum("bnd,dm->bnm", self.ln2(x), self.W_in) + self.b_in
        h = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return x + torch.einsum("bnm,md->bnd", h, self.W_out) + self.b_out


class SharedHeadMapsBlock(nn.Module):
    """One small map of queries, keys and values for all heads, the mask a large number, norms after."""

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.embed_size, self.heads, self.head_dim = embed_size, heads, embed_size // heads
        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(embed_size, embed_size)
        self.norm1, self.norm2 = nn.LayerNorm(embed_size), nn.LayerNorm(embed_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, 2 * embed_size), nn.LeakyReLU(), nn.Linear(2 * embed_size, embed_size)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        N, length, _ = x.shape
        split = x.reshape(N, length, self.heads, self.head_dim)
        values, keys, queries = self.values(split), self.keys(split), self.queries(split)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        mask = torch.tril(torch.ones((length, length))).expand(N, 1, length, length)
        energy = energy.masked_fill(mask == 0, -1e20)
        attention = torch.softmax(energy / (self.embed_size ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, length, self.embed_size)
        x = self.dropout(self.norm1(self.fc_out(out) + x))
        return self.dropout(self.norm2(self.feed_forward(x) + x))


def clones(module: nn.Module, count: int) -> nn.ModuleList:
    """Copies with parameters of their own."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


class UnbiasedLayerNorm(nn.Module):
    """Almost a LayerNorm: the unbiased standard deviation, and eps added to it."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """A residual about a norm and any sublayer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = UnbiasedLayerNorm(size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class ClonedLinearsAttention(nn.Module):
    """Four copies of one linear map, three of them zipped with queries, keys and values."""

    def __init__(self, h: int, d_model: int) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(p=0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.attn = scores.softmax(dim=-1)
        x = torch.matmul(self.dropout(self.attn), value)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k))


class AnnotatedEncoder(nn.Module):
    """An encoder layer cloned twice, each with two residual connections, and the unusual norm throughout."""

    def __init__(self, d: int = 24, heads: int = 3) -> None:
        super().__init__()
        layer = nn.ModuleDict(
            {
                "self_attn": ClonedLinearsAttention(heads, d),
                "feed_forward": nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * d, d)),
                "sublayer": clones(SublayerConnection(d), 2),
            }
        )
        self.layers = clones(layer, 2)
        self.norm = UnbiasedLayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(1, x.size(1), x.size(1)), diagonal=1).type(torch.uint8) == 0
        layer: Any
        for layer in self.layers:
            attend = partial(self.attend, layer["self_attn"], mask)
            x = layer["sublayer"][0](x, attend)
            x = layer["sublayer"][1](x, layer["feed_forward"])
        return self.norm(x)

    @staticmethod
    def attend(attention: nn.Module, mask: Tensor, x: Tensor) -> Tensor:
        return attention(x, x, x, mask)
