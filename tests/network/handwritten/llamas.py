"""Llama and its relatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Division by the root mean square, by rsqrt; in single precision where the model's own was half."""

    def __init__(self, dim: int, eps: float = 1e-6, cast: bool = False) -> None:
        super().__init__()
        self.eps, self.cast = eps, cast
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()).type_as(x) if self.cast else self._norm(x)) * self.weight


class SwiGLU(nn.Module):
    """A gated MLP without biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotate_half(x: Tensor) -> Tensor:
    """The two halves of the channels exchanged, one of them negated."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Every head of keys or values repeated for the queries that share it, tokens before heads."""
    b, n, heads, size = x.shape
    return x[:, :, :, None, :].expand(b, n, heads, n_rep, size).reshape(b, n, heads * n_rep, size)


class GroupedRotaryAttention(nn.Module):
    """Grouped heads with rotary positions, in real or in complex numbers, under a triangle of minus infinity."""

    cos: Tensor
    sin: Tensor
    freqs_cis: Tensor

    def __init__(self, dim: int, heads: int, kv_heads: int, rotary: str, length: int = 16) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.rotary = heads, kv_heads, dim // heads, rotary
        self.wq = nn.Linear(dim, heads * self.size, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, dim, bias=False)
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, self.size, 2).float() / self.size))
        freqs = torch.outer(torch.arange(length).float(), inv_freq)
        if rotary == "real":
            emb = torch.cat((freqs, freqs), dim=-1)
            self.register_buffer("cos", emb.cos(), persistent=False)
            self.register_buffer("sin", emb.sin(), persistent=False)
        else:
            self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.rotary == "real":
            cos, sin = self.cos[:n].unsqueeze(1), self.sin[:n].unsqueeze(1)
            return x * cos + rotate_half(x) * sin
        source = x.float() if self.rotary == "cast" else x
        x_ = torch.view_as_complex(source.reshape(*x.shape[:-1], -1, 2))
        freqs_cis = self.freqs_cis[:n].view(1, n, 1, x_.shape[-1])
        return torch.view_as_real(x_ * freqs_cis).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        xq = self.wq(x).view(b, n, self.heads, self.size)
        xk = self.wk(x).view(b, n, self.kv_heads, self.size)
        xv = self.wv(x).view(b, n, self.kv_heads, self.size)
        xq, xk = self.rotate(xq), self.rotate(xk)
        keys = repeat_kv(xk, self.heads // self.kv_heads).transpose(1, 2)
        values = repeat_kv(xv, self.heads // self.kv_heads).transpose(1, 2)
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.size)
        mask = torch.full((n, n), float("-inf"), device=x.device)
        scores = scores + torch.triu(mask, diagonal=1).type_as(x)
        scores = F.softmax(scores.float(), dim=-1).type_as(xq) if self.rotary == "cast" else F.softmax(scores, dim=-1)
        return self.wo(torch.matmul(scores, values).transpose(1, 2).contiguous().view(b, n, -1))


class HandLlama(nn.Module):
    """Two blocks of RMSNorm, grouped rotary attention and SwiGLU, and an untied head."""

    def __init__(self, rotary: str, dim: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        cast = rotary == "cast"
        self.tok_embeddings = nn.Embedding(31, dim)
        self.attention = nn.ModuleList([GroupedRotaryAttention(dim, heads, kv_heads, rotary) for _ in range(2)])
        self.feed_forward = nn.ModuleList([SwiGLU(dim, 44) for _ in range(2)])
        self.attention_norm = nn.ModuleList([RMSNorm(dim, cast=cast) for _ in range(2)])
        self.ffn_norm = nn.ModuleList([RMSNorm(dim, cast=cast) for _ in range(2)])
        self.norm = RMSNorm(dim, cast=cast)
        self.output = nn.Linear(dim, 31, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)
        for i in range(2):
            h = h + self.attention[i](self.attention_norm[i](h))
            h = h + self.feed_forward[i](self.ffn_norm[i](h))
        return self.output(self.norm(h)).to(h.dtype)


def rotate_every_two(x: Tensor) -> Tensor:
    """Neighbouring channels exchanged, the even ones negated."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class OneNormParallelBlock(nn.Module):
    """Attention and MLP side by side from one norm, with interleaved rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.ln = nn.LayerNorm(dim)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.fc_in, self.fc_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        y = self.ln(x)
        q, k, v = (p(y).view(b, n, self.heads, self.size) for p in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.einsum("i,j->ij", torch.arange(n), 10000 ** -(torch.arange(0, self.size, 2) / self.size))
        sin, cos = (
            torch.repeat_interleave(t.to(x.dtype), 2, 1)[None, :, None, :] for t in (angles.sin(), angles.cos())
        )
        q, k = ((t * cos) + (rotate_every_two(t) * sin) for t in (q, k))
        weights = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) / torch.sqrt(torch.tensor(float(self.size)))
        causal = torch.tril(torch.ones((n, n), dtype=torch.bool)).view(1, 1, n, n)
        weights = torch.where(causal, weights, torch.tensor(torch.finfo(weights.dtype).min, dtype=weights.dtype))
        attended = torch.matmul(nn.Softmax(dim=-1)(weights), v.transpose(1, 2)).transpose(1, 2).reshape(b, n, d)
        return self.out_proj(attended) + self.fc_out(F.gelu(self.fc_in(y), approximate="tanh")) + x


class TwoNormParallelBlock(nn.Module):
    """Attention and MLP side by side, each behind its norm; rotary on a part, with a cache made at first use."""

    def __init__(self, dim: int, heads: int, rotary: int) -> None:
        super().__init__()
        self.heads, self.size, self.rotary = heads, dim // heads, rotary
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.dense = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.cached: tuple[Tensor, Tensor] | None = None

    def cos_sin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[-2]
        if self.cached is None or self.cached[0].shape[0] < n or self.cached[0].dtype != x.dtype:
            inverse = 1.0 / (10000 ** (torch.arange(0, self.rotary, 2, dtype=x.dtype) / self.rotary))
            t = torch.arange(n, dtype=x.dtype)[:, None] * inverse[None, :]
            emb = torch.cat((t, t), dim=-1)
            self.cached = (emb.cos(), emb.sin())
        return self.cached[0][:n], self.cached[1][:n]

    def attention(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.query_key_value(x).view(b, n, self.heads, 3 * self.size)
        q = qkv[..., : self.size].permute(0, 2, 1, 3)
        k = qkv[..., self.size : 2 * self.size].permute(0, 2, 1, 3)
        v = qkv[..., 2 * self.size :].permute(0, 2, 1, 3)
        cos, sin = self.cos_sin(v)
        q_rot, q_pass = q[..., : self.rotary], q[..., self.rotary :]
        k_rot, k_pass = k[..., : self.rotary], k[..., self.rotary :]
        q = torch.cat((q_rot * cos + rotate_half(q_rot) * sin, q_pass), dim=-1)
        k = torch.cat((k_rot * cos + rotate_half(k_rot) * sin, k_pass), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / math.sqrt(self.size))
        return self.dense(out.permute(0, 2, 1, 3).contiguous().view(b, n, d))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x)) + self.attention(self.input_layernorm(x)) + x


def bare_norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class SpeedrunGPT(nn.Module):
    """Norms without gains, also of queries and keys, squared ReLU, mixing with the first input, capped logits."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_w = nn.Parameter(torch.empty(3, dim, dim))
        self.c_proj = nn.Linear(dim, dim, bias=False)
        self.fc, self.proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.skip_weights = nn.Parameter(torch.ones(1))
        self.lm_head = nn.Linear(dim, 31, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1)).view(b, n, 3 * self.heads, -1).chunk(3, dim=-2)
        q, k = bare_norm(q), bare_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = bare_norm(x)
        skips = []
        for _ in range(2):
            x = self.lambdas[0] * x + self.lambdas[1] * x0
            x = x + self.attention(bare_norm(x))
            x = x + self.proj(F.relu(self.fc(bare_norm(x))).square())
            skips.append(x)
        x = x + self.skip_weights * skips.pop(0)
        logits = self.lm_head(bare_norm(x))
        return 30 * torch.tanh(logits / 30)


class LowRankAttention(nn.Module):
    """Keys and values from a narrow normed latent, with one rotary part of the keys shared by all heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, rank: int = 12, nope: int = 6, rope: int = 4, v_size: int = 8) -> None:
        super().__init__()
        self.heads, self.rank, self.nope, self.rope, self.v_size = heads, rank, nope, rope, v_size
        self.q_a_proj, self.q_a_layernorm = nn.Linear(dim, rank, bias=False), RMSNorm(rank)
        self.q_b_proj = nn.Linear(rank, heads * (nope + rope), bias=False)
        self.kv_a_proj, self.kv_a_layernorm = nn.Linear(dim, rank + rope, bias=False), RMSNorm(rank)
        self.kv_b_proj = nn.Linear(rank, heads * (nope + v_size), bias=False)
        self.o_proj = nn.Linear(heads * v_size, dim, bias=False)
        freqs = torch.outer(torch.arange(16.0), 100.0 ** -(torch.arange(0, rope, 2) / rope)).repeat(1, 2)
        self.register_buffer("cos", freqs.cos(), persistent=False)
        self.register_buffer("sin", freqs.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        cos, sin = self.cos[:n], self.sin[:n]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, n, self.heads, -1).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        latent, k_pe = torch.split(self.kv_a_proj(x), [self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, n, self.heads, -1).transpose(1, 2)
        k_nope, v = torch.split(kv, [self.nope, self.v_size], dim=-1)
        q_pe = q_pe * cos + rotate_half(q_pe) * sin
        k_pe = (k_pe * cos + rotate_half(k_pe) * sin).unsqueeze(1).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q_nope, q_pe), dim=-1), torch.cat((k_nope, k_pe), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))
