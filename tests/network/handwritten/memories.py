"""Encoders, memories and latents."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.network.handwritten.plain import PlainAttention, Stack


class SharedLayers(nn.Module):
    """Factorised embeddings and one BERT layer applied three times, with an additive mask and a tanh pooler."""

    def __init__(self, embedding: int = 12, hidden: int = 24, heads: int = 3, times: int = 3) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.times = heads, hidden // heads, times
        self.word_embeddings = nn.Embedding(31, embedding)
        self.position_embeddings = nn.Embedding(16, embedding)
        self.token_type_embeddings = nn.Embedding(2, embedding)
        self.embedding_norm = nn.LayerNorm(embedding, eps=1e-12)
        self.embedding_hidden_mapping_in = nn.Linear(embedding, hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.attention_norm, self.full_norm = (nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))
        self.ffn, self.ffn_output = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.pooler = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def layer(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size) + attention_mask
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer).transpose(2, 1).flatten(2)
        attended = self.attention_norm(hidden_states + self.dropout(self.dense(context_layer)))
        fed = self.ffn_output(F.gelu(self.ffn(attended), approximate="tanh"))
        return self.full_norm(fed + attended)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = input_ids if input_ids.is_floating_point() else self.word_embeddings(input_ids)
        n = words.size(1)
        types = torch.zeros(1, n, dtype=torch.long, device=words.device)
        x = words + self.token_type_embeddings(types) + self.position_embeddings(torch.arange(n, device=words.device))
        x = self.embedding_hidden_mapping_in(self.dropout(self.embedding_norm(x)))
        extended = (1.0 - attention_mask[:, None, None, :]) * -10000.0
        for _ in range(self.times):
            x = self.layer(x, extended)
        return torch.tanh(self.pooler(x[:, 0]))


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another, by the kernel."""

    def __init__(self, dim: int, context: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(context, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.to_out(out.transpose(1, 2).flatten(-2))


class GatedGELU(nn.Module):
    """One half of the channels, gated by GELU of the other."""

    def forward(self, x: Tensor) -> Tensor:
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class LatentQueries(nn.Module):
    """Learned latents that attend to the input, then to each other."""

    def __init__(self, dim: int = 16, context: int = 24, latents: int = 5, heads: int = 2) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim))
        self.norm_context = nn.LayerNorm(context)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
        self.cross = CrossAttention(dim, context, heads)
        self.inner = CrossAttention(dim, dim, heads)
        self.feeds = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 4 * dim), GatedGELU(), nn.Linear(2 * dim, dim)) for _ in range(2)]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3))

    def forward(self, data: Tensor) -> Tensor:
        x = self.latents.unsqueeze(0).repeat(data.shape[0], 1, 1)
        x = self.cross(self.norms[0](x), self.norm_context(data)) + x
        x = self.feeds[0](self.norms[1](x)) + x
        x = self.inner(self.norms[2](x)) + x
        x = self.feeds[1](self.norms[3](x)) + x
        return self.to_logits(x.mean(dim=-2))


class LearnedMemory(nn.Module):
    """Tokens that attend to a memory of parameters, the same for every input."""

    def __init__(self, dim: int = 24, heads: int = 3, slots: int = 6) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, slots, dim))
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.layers = nn.ModuleList([CrossAttention(dim, dim, heads) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), self.memory.expand(x.size(0), -1, -1))
        return x


class CrossDecoder(nn.Module):
    """Causal attention, attention to an encoder's output, and an MLP, each behind its norm."""

    def __init__(self, dim: int = 24, context: int = 16, heads: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(6)])
        self.selves = nn.ModuleList([CrossAttention(dim, dim, heads, causal=True) for _ in range(2)])
        self.crosses = nn.ModuleList([CrossAttention(dim, context, heads) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(2)]
        )

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        for i in range(2):
            x = x + self.selves[i](self.norms[3 * i](x))
            x = x + self.crosses[i](self.norms[3 * i + 1](x), encoded)
            x = x + self.mlps[i](self.norms[3 * i + 2](x))
        return x


class SetBlock(nn.Module):
    """Attention between sets: heads split and put along the batch, projected queries as the residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(dim, dim) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = self.fc_q(queries), self.fc_k(keys), self.fc_v(keys)
        size = self.dim // self.heads
        q_, k_, v_ = (torch.cat(t.split(size, 2), 0) for t in (q, k, v))
        weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.dim), 2)
        out = self.ln0(torch.cat((q_ + weights.bmm(v_)).split(q.size(0), 0), 2))
        return self.ln1(out + F.relu(self.fc_o(out)))


class SetTransformer(nn.Module):
    """Induced points between the tokens, and pooling by a learned seed."""

    def __init__(self, dim: int = 16, heads: int = 2, points: int = 3) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(1, points, dim))
        self.seed = nn.Parameter(torch.empty(1, 1, dim))
        self.gather, self.spread, self.pool = (SetBlock(dim, heads) for _ in range(3))
        self.out = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        induced = self.gather(self.points.repeat(x.size(0), 1, 1), x)
        x = self.spread(x, induced)
        return self.out(self.pool(self.seed.repeat(x.size(0), 1, 1), x)).squeeze(1)


class PrefixAttention(nn.Module):
    """Learned keys and values put before those of the tokens."""

    def __init__(self, dim: int, heads: int, prefix: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.past = nn.Parameter(torch.empty(2, heads, prefix, dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past_k, past_v = (t.unsqueeze(0).expand(b, -1, -1, -1) for t in self.past)
        k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class SentenceEmbedder(nn.Module):
    """A masked mean over tokens and a vector of length one."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.block = Stack(partial(PlainAttention, d, heads), d)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.block(x)
        expanded = attention_mask.unsqueeze(-1).expand(x.size()).to(x.dtype)
        mean = torch.sum(x * expanded, 1) / torch.clamp(expanded.sum(1), min=1e-9)
        return F.normalize(mean, p=2, dim=1)
