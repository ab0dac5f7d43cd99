"""GPT-2 and its children."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedCausalAttention(nn.Module):
    """One projection split in three; the mask is the kernel's own, or a registered triangle."""

    bias: Tensor

    def __init__(self, n_embd: int, n_head: int, block_size: int, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_head, self.n_embd, self.flash = n_head, n_embd, flash
        if not flash:
            triangle = torch.tril(torch.ones(block_size, block_size))
            self.register_buffer("bias", triangle.view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = 0.1 if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class OptionalBiasLayerNorm(nn.Module):
    """A LayerNorm whose bias may be missing."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoMLP(nn.Module):
    """Two affine maps about a GELU."""

    def __init__(self, n_embd: int, approximate: str) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU(approximate=approximate)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, n_embd: int, n_head: int, block_size: int, flash: bool) -> None:
        super().__init__()
        self.ln_1 = OptionalBiasLayerNorm(n_embd, bias=not flash)
        self.attn = FusedCausalAttention(n_embd, n_head, block_size, flash)
        self.ln_2 = OptionalBiasLayerNorm(n_embd, bias=not flash)
        self.mlp = NanoMLP(n_embd, "none" if flash else "tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT with tied embeddings, of whose logits all are returned, or those of the last token."""

    def __init__(self, flash: bool, n_embd: int = 24, n_head: int = 3, block_size: int = 16, words: int = 31) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([NanoBlock(n_embd, n_head, block_size, flash) for _ in range(2)]),
                "ln_f": OptionalBiasLayerNorm(n_embd, bias=not flash),
            }
        )
        self.lm_head = nn.Linear(n_embd, words, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.all_logits = flash

    def forward(self, idx: Tensor) -> Tensor:
        tok_emb = idx if idx.is_floating_point() else self.transformer["wte"](idx)
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](tok_emb + self.transformer["wpe"](pos))
        for block in self.transformer["h"].children():
            x = block(x)
        x = self.transformer["ln_f"](x)
        return self.lm_head(x if self.all_logits else x[:, [-1], :])


class Conv1D(nn.Module):
    """An affine map whose weight stands the other way round, as addmm over flattened tokens."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class FirstGPT2Block(nn.Module):
    """The earliest form: Conv1D, a mask by multiplication and subtraction, and GELU as a formula of tanh."""

    b: Tensor

    def __init__(self, nx: int, n_head: int, n_ctx: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(nx), nn.LayerNorm(nx)
        self.c_attn, self.attn_proj = Conv1D(nx, 3 * nx), Conv1D(nx, nx)
        self.c_fc, self.mlp_proj = Conv1D(nx, 4 * nx), Conv1D(4 * nx, nx)
        self.attn_dropout = nn.Dropout(0.1)
        self.split_size, self.n_head = nx, n_head
        self.register_buffer("b", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))

    def split_heads(self, x: Tensor, k: bool = False) -> Tensor:
        x = x.view(*x.size()[:-1], self.n_head, x.size(-1) // self.n_head)
        return x.permute(0, 2, 3, 1) if k else x.permute(0, 2, 1, 3)

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(x).split(self.split_size, dim=2)
        w = torch.matmul(self.split_heads(query), self.split_heads(key, k=True)) / math.sqrt(8)
        nd, ns = w.size(-2), w.size(-1)
        b = self.b[:, :, ns - nd : ns, :ns]
        w = self.attn_dropout(nn.Softmax(dim=-1)(w * b - 1e4 * (1 - b)))
        a = torch.matmul(w, self.split_heads(value)).permute(0, 2, 1, 3).contiguous()
        return self.attn_proj(a.view(*a.size()[:-2], a.size(-2) * a.size(-1)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))
        return x + self.mlp_proj(h)


class Head(nn.Module):
    """One head of its own, whose scale is that of the whole width."""

    tril: Tensor

    def __init__(self, n_embd: int, head_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        _, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * C**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class LectureBlock(nn.Module):
    """Heads as a list of modules whose outputs are put side by side."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // n_head) for _ in range(n_head)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(0.1)
        self.ffwd = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1)
        )
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.dropout(self.proj(torch.cat([h(y) for h in self.heads], dim=-1)))
        return x + self.ffwd(self.ln2(x))


class FoldedHeadsBlock(nn.Module):
    """Heads folded into the batch, queries and keys scaled apart, the mask written in place; norms after."""

    def __init__(self, emb: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokeys = nn.Linear(emb, emb, bias=False)
        self.toqueries = nn.Linear(emb, emb, bias=False)
        self.tovalues = nn.Linear(emb, emb, bias=False)
        self.unifyheads = nn.Linear(emb, emb)
        self.norm1, self.norm2 = nn.LayerNorm(emb), nn.LayerNorm(emb)
        self.ff = nn.Sequential(nn.Linear(emb, 4 * emb), nn.ReLU(), nn.Linear(4 * emb, emb))
        self.do = nn.Dropout(0.1)

    def attention(self, x: Tensor) -> Tensor:
        b, t, e = x.size()
        h, s = self.heads, e // self.heads
        keys = self.tokeys(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        queries = self.toqueries(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        values = self.tovalues(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        dot = torch.bmm(queries / s ** (1 / 4), (keys / s ** (1 / 4)).transpose(1, 2))
        rows, columns = torch.triu_indices(t, t, offset=1)
        dot[..., rows, columns] = float("-inf")
        out = torch.bmm(F.softmax(dot, dim=2), values).view(b, h, t, s)
        return self.unifyheads(out.transpose(1, 2).contiguous().view(b, t, s * h))

    def forward(self, x: Tensor) -> Tensor:
        x = self.do(self.norm1(self.attention(x) + x))
        return self.do(self.norm2(self.ff(x) + x))
