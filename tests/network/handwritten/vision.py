"""Vision transformers."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attend(nn.Module):
    """Attention behind its own norm, chunked in three and scaled before the softmax module."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.1)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.reshape(b, n, self.heads, -1).permute(0, 2, 1, 3) for t in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.dropout(self.attend(dots))
        return self.to_out((attn @ v).permute(0, 2, 1, 3).reshape(b, n, -1))


class PooledViT(nn.Module):
    """Patches by a convolution, a class token, and pooling by it or by the mean."""

    def __init__(self, pool: str, dim: int = 24, heads: int = 3, patch: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.pool = pool
        self.to_patches = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, 7, dim))
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList([])
        for _ in range(2):
            feed = nn.Sequential(
                nn.LayerNorm(dim),
                nn.Linear(dim, 2 * dim),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(2 * dim, dim),
                nn.Dropout(0.1),
            )
            self.layers.append(nn.ModuleList([Attend(dim, heads, 6), feed]))
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patches(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.pos_embedding[:, : x.shape[1]])
        for layer in self.layers:
            attn, ff = layer.children()
            x = attn(x) + x
            x = ff(x) + x
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        return self.mlp_head(self.to_latent(x))


class ChannelBatchNorm(nn.Module):
    """BatchNorm over the channels of tokens, by a transpose before and after."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class BatchNormViT(nn.Module):
    """Patches by nn.Unfold, BatchNorm where others have LayerNorm, ReLU, the mean over tokens."""

    def __init__(self, dim: int = 16, heads: int = 2, patch: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.unfold = nn.Unfold(kernel_size=patch, stride=patch)
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.pos = nn.Parameter(torch.zeros(1, 6, dim))
        self.norms = nn.ModuleList([ChannelBatchNorm(dim) for _ in range(4)])
        self.qkvs = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 3 * dim), nn.ReLU(inplace=True), nn.Linear(3 * dim, dim)) for _ in range(2)]
        )
        self.head = nn.Linear(dim, classes)
        self.heads = heads

    def forward(self, img: Tensor) -> Tensor:
        x = self.embed(self.unfold(img).transpose(1, 2)) + self.pos
        B, N, D = x.shape
        for i in range(2):
            q, k, v = self.qkvs[i](self.norms[2 * i](x)).view(B, N, 3, self.heads, -1).unbind(dim=2)
            weights = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / (D // self.heads) ** 0.5, -1)
            x = x + self.outs[i]((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class NestedLoopsBlock(nn.Module):
    """Heads that see slices of the token, looped over sequences and heads, put together by hstack and cat."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d // n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q_mappings = nn.ModuleList([nn.Linear(self.d_head, self.d_head) for _ in range(n_heads)])
        self.k_mappings = nn.ModuleList([nn.Linear(self.d_head, self.d_head) for _ in range(n_heads)])
        self.v_mappings = nn.ModuleList([nn.Linear(self.d_head, self.d_head) for _ in range(n_heads)])
        self.softmax = nn.Softmax(dim=-1)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def attention(self, sequences: Tensor) -> Tensor:
        result = []
        for sequence in sequences:
            found = []
            for head in range(self.n_heads):
                part = sequence[:, head * self.d_head : (head + 1) * self.d_head]
                q, k, v = self.q_mappings[head](part), self.k_mappings[head](part), self.v_mappings[head](part)
                found.append(self.softmax(q @ k.T / (self.d_head**0.5)) @ v)
            result.append(torch.hstack(found))
        return torch.cat([torch.unsqueeze(r, dim=0) for r in result])

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.attention(self.norm1(x))
        return out + self.mlp(self.norm2(out))


class ReshapeViT(nn.Module):
    """Patches by reshape and a linear map, a class token stacked on each image, fixed sine positions, softmax last."""

    positions: Tensor

    def __init__(self, d: int = 16, heads: int = 2, patch: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.patch = patch
        self.linear_mapper = nn.Linear(3 * patch * patch, d)
        self.class_token = nn.Parameter(torch.rand(1, d))
        angles = torch.arange(7.0)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
        self.register_buffer(
            "positions", torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1), persistent=False
        )
        self.blocks = nn.ModuleList([NestedLoopsBlock(d, heads) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(d, classes), nn.Softmax(dim=-1))

    def forward(self, images: Tensor) -> Tensor:
        b, c, h, w = images.shape
        p = self.patch
        patches = images.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        tokens = self.linear_mapper(patches)
        tokens = torch.stack([torch.vstack((self.class_token, tokens[i])) for i in range(len(tokens))])
        out = tokens + self.positions.repeat(b, 1, 1)
        for block in self.blocks:
            out = block(out)
        return self.mlp(out[:, 0])


class LayerScale(nn.Module):
    """A gain for each channel."""

    def __init__(self, dim: int, init_values: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Drops a whole residual branch in training and does nothing afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.9)
        return x * keep.div_(0.9)


class ImageModelAttention(nn.Module):
    """Fused and permuted in one go, with norms of queries and keys, and the kernel or the written-out softmax."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, fused
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.1)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            x = self.attn_drop((q @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class ImageModelBlock(nn.Module):
    """Norm, branch, layer scale and drop path, twice."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ImageModelAttention(dim, num_heads, qk_norm, fused)
        self.ls1, self.drop_path1 = LayerScale(dim), DropPath()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), drop=nn.Dropout(0.1), fc2=nn.Linear(4 * dim, dim))
        )
        self.ls2, self.drop_path2 = LayerScale(dim), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class QuickGELU(nn.Module):
    """The sigmoid approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ContrastiveBlock(nn.Module):
    """nn.MultiheadAttention over tokens that come first, with QuickGELU."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", nn.Linear(d_model, 4 * d_model)),
                    ("gelu", QuickGELU()),
                    ("c_proj", nn.Linear(4 * d_model, d_model)),
                ]
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=None)[0]
        return x + self.mlp(self.ln_2(x))


class ContrastiveViT(nn.Module):
    """A class embedding added to zeros, a norm before all blocks, and a projection as a bare parameter."""

    def __init__(self, width: int = 16, heads: int = 2, patch: int = 4, output_dim: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn(7, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.resblocks = nn.Sequential(*[ContrastiveBlock(width, heads) for _ in range(2)])
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, output_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        zeros = torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([self.class_embedding.to(x.dtype) + zeros, x], dim=1)
        x = self.ln_pre(x + self.positional_embedding.to(x.dtype)).permute(1, 0, 2)
        x = self.resblocks(x).permute(1, 0, 2)
        return self.ln_post(x[:, 0, :]) @ self.proj


class ShiftedWindowBlock(nn.Module):
    """Attention within windows of a grid, shifted by a roll, with a table of relative biases."""

    index: Tensor
    mask: Tensor

    def __init__(self, dim: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.window, self.shift = heads, side, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offsets = (grid[:, :, None] - grid[:, None, :]) + window - 1
        self.register_buffer("index", offsets[0] * (2 * window - 1) + offsets[1])
        region = torch.zeros(1, side, side, 1)
        cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None)) if shift else (slice(None),)
        for number, (rows, columns) in enumerate((a, b) for a in cuts for b in cuts):
            region[:, rows, columns, :] = number
        regions = self.partition(region).squeeze(-1)
        apart = regions.unsqueeze(1) - regions.unsqueeze(2)
        self.register_buffer("mask", apart.masked_fill(apart != 0, -100.0))

    def partition(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        return x.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, C)

    def reverse(self, windows: Tensor, channels: int) -> Tensor:
        count, w = self.side // self.window, self.window
        x = windows.view(-1, count, count, w, w, channels).permute(0, 1, 3, 2, 4, 5)
        return x.contiguous().view(-1, self.side, self.side, channels)

    def attention(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = q * (C // self.heads) ** -0.5 @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        count = self.mask.shape[0]
        attn = attn.view(B // count, count, self.heads, N, N) + self.mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, self.heads, N, N).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        y = self.norm1(x).view(B, self.side, self.side, C)
        y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2)) if self.shift else y
        y = self.reverse(self.attention(self.partition(y)), C)
        y = torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2)) if self.shift else y
        x = x + y.view(B, L, C)
        return x + self.mlp(self.norm2(x))
