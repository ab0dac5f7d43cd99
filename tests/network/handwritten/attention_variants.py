"""Variants of the logits and weights, within plain blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.network.handwritten.llamas import RMSNorm
from tests.network.handwritten.plain import PlainAttention


class LinearBiasAttention(nn.Module):
    """Logits and biases that fall with distance in one baddbmm, heads folded into the batch."""

    slopes: Tensor

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, d // heads
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.query_key_value(x).view(b, n, self.heads, 3, self.size).unbind(3)
        q = q.transpose(1, 2).reshape(b * self.heads, n, self.size)
        k = k.permute(0, 2, 3, 1).reshape(b * self.heads, self.size, n)
        v = v.transpose(1, 2).reshape(b * self.heads, n, self.size)
        alibi = (self.slopes[:, None, None] * torch.arange(n)[None, None, :]).repeat(b, 1, 1)
        scores = alibi.baddbmm(q, k, beta=1.0, alpha=1.0 / math.sqrt(self.size)).view(b, self.heads, n, n)
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        scores = torch.masked_fill(scores, causal, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).view(b * self.heads, n, n)
        out = torch.bmm(probs, v).view(b, self.heads, n, self.size)
        return self.dense(out.permute(0, 2, 1, 3).reshape(b, n, d))


class BucketBiasAttention(PlainAttention):
    """A table of biases by buckets of relative position, logits without a scale, no biases in the maps."""

    def __init__(self, d: int, heads: int, buckets: int = 8, farthest: int = 12) -> None:
        super().__init__(d, heads)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        self.buckets, self.farthest = buckets, farthest

    def bucket(self, offset: Tensor) -> Tensor:
        half = self.buckets // 2
        side = (offset > 0).to(torch.long) * half
        distance = offset.abs()
        exact = half // 2
        ratio = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.farthest / exact)
        far = (exact + (ratio * (half - exact)).to(torch.long)).clamp(max=half - 1)
        return side + torch.where(distance < exact, distance, far)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[-2])
        bias = self.relative_attention_bias(self.bucket(positions[None, :] - positions[:, None]))
        return torch.matmul(q, k.transpose(3, 2)) + bias.permute([2, 0, 1]).unsqueeze(0)


class SoftCappedAttention(PlainAttention):
    """Logits that tanh keeps below a cap, under a causal mask added afterwards."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q * self.size**-0.5, k.transpose(2, 3)) / 5.0
        scores = torch.tanh(scores) * 5.0
        n = scores.shape[-1]
        return scores + torch.triu(torch.full((n, n), -2.3819763e38, dtype=scores.dtype), diagonal=1)


class SlidingWindowAttention(nn.Module):
    """Grouped heads by the kernel under a Boolean band."""

    def __init__(self, d: int, heads: int, kv_heads: int, window: int) -> None:
        super().__init__()
        self.size, self.window = d // heads, window
        self.q_proj = nn.Linear(d, d)
        self.k_proj, self.v_proj = (nn.Linear(d, kv_heads * self.size) for _ in range(2))
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        i = torch.arange(x.shape[1])
        band = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MultiQueryAttention(nn.Module):
    """Many heads of queries, one of keys and values, by broadcasting."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, d // heads
        self.query, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * self.size), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q = self.query(x).reshape(b, n * self.heads, self.size)
        k, v = self.kv(x).split((self.size, self.size), dim=-1)
        scores = torch.bmm(q, k.mT).mul_(self.size**-0.5).view(b, n, self.heads, n)
        return self.out(torch.bmm(scores.softmax(-1).view(b, n * self.heads, n), v).view(b, n, d))


class ShawAttention(PlainAttention):
    """Queries that also meet a learned vector for every relative position."""

    def __init__(self, d: int, heads: int, farthest: int = 4) -> None:
        super().__init__(d, heads)
        self.farthest = farthest
        self.rel_pos_emb = nn.Embedding(2 * farthest + 1, self.size)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        distance = (i[:, None] - i[None, :]).clamp(-self.farthest, self.farthest) + self.farthest
        extra = torch.einsum("bhnd,nrd->bhnr", q, self.rel_pos_emb(distance))
        return super().logits(q, k) + extra * self.size**-0.5


class TalkingHeadsAttention(PlainAttention):
    """Heads mixed before and after the softmax."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads)
        self.before = nn.Conv2d(heads, heads, 1, bias=False)
        self.after = nn.Linear(heads, heads)

    def weights(self, scores: Tensor) -> Tensor:
        probs = self.before(scores).softmax(dim=-1)
        return self.after(probs.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GatedAttention(PlainAttention):
    """A sigmoid of the input gates what the heads have gathered."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads)
        self.gate = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        gathered = F.scaled_dot_product_attention(q, k, v)
        return self.o(self.merge(gathered) * torch.sigmoid(self.gate(x)))


class SinkAttention(PlainAttention):
    """A learned logit for each head that takes weight and gives nothing."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads, causal=True)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def weights(self, scores: Tensor) -> Tensor:
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        return F.softmax(combined, dim=-1)[..., :-1]


class WrittenSoftmaxAttention(PlainAttention):
    """Softmax from exp and sum, less a maximum that is cut from the graph."""

    def weights(self, scores: Tensor) -> Tensor:
        top = scores.max(dim=-1, keepdim=True)[0].detach()
        e = torch.exp(scores - top)
        return e / e.sum(dim=-1, keepdim=True)


class SoftmaxPlusOneAttention(PlainAttention):
    """Softmax with a one in the denominator."""

    def weights(self, scores: Tensor) -> Tensor:
        e = torch.exp(scores)
        return e / (1 + e.sum(dim=-1, keepdim=True))


class DifferentialAttention(nn.Module):
    """The difference of two softmaxes, with a norm of each head behind it."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size, self.lambda_init = heads, d // heads // 2, 0.5
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(self.size)) for _ in range(4)
        )
        self.subln = RMSNorm(2 * self.size, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q = self.q(x).view(b, n, 2 * self.heads, self.size).transpose(1, 2) * self.size**-0.5
        k = self.k(x).view(b, n, 2 * self.heads, self.size).transpose(1, 2)
        v = self.v(x).view(b, n, self.heads, 2 * self.size).transpose(1, 2)
        weights = F.softmax(q @ k.transpose(-1, -2), dim=-1).view(b, self.heads, 2, n, n)
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1))
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1))
        weights = weights[:, :, 0] - (first - second + self.lambda_init) * weights[:, :, 1]
        out = self.subln(torch.matmul(weights, v)) * (1 - self.lambda_init)
        return self.o(out.transpose(1, 2).reshape(b, n, d))


class TopAttention(PlainAttention):
    """Every query keeps its three largest logits."""

    def weights(self, scores: Tensor) -> Tensor:
        kth = scores.topk(3, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < kth, float("-inf")).softmax(dim=-1)


class DistanceAttention(PlainAttention):
    """Logits are negative squared distances, keys the same map as queries."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return -(torch.cdist(q, k, p=2) ** 2) / math.sqrt(self.size)


class TiedDistanceAttention(DistanceAttention):
    """Squared distances between points of one map, zero on the diagonal."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads)
        self.k = self.q


class CosineAttention(PlainAttention):
    """Queries and keys of length one, with a learned temperature below a ceiling."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return cosines * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()


class SigmoidAttention(PlainAttention):
    """Each weight a sigmoid of its own logit, less the logarithm of the number of tokens."""

    def weights(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores - math.log(scores.shape[-1]))


class LinearAttention(PlainAttention):
    """Positive features of queries and keys, summed over keys before the queries come."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhnd,bhnm->bhmd", k, v)
        z = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=2)) + 1e-6)
        return self.o(self.merge(torch.einsum("bhnd,bhmd,bhn->bhnm", q, kv, z)))


class SoftmaxOverQueries(PlainAttention):
    """The weights of each key sum to one, not those of each query."""

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-2)


class SlotAttention(PlainAttention):
    """Softmax over queries, then divided by the sum over keys."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(dim=-2) + 1e-8
        return weights / weights.sum(dim=-1, keepdim=True)


class MixedUpHeads(PlainAttention):
    """Heads by one view without a transpose, so that a head holds parts of the sequence."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.heads, -1, self.size)

    def merge(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self.heads * self.size)


class WrongAxisBatch(nn.Module):
    """nn.MultiheadAttention that expects tokens first and is given the batch first, so that tokens never meet."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d, heads, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]
