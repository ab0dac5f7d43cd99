"""The layers of torch itself, in modules of one's own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with an input projection and sine positions, its tokens first or second."""

    positions: Tensor

    def __init__(self, norm_first: bool, batch_first: bool, activation: str, causal: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            24, 4, 48, dropout=0.1, activation=activation, norm_first=norm_first, batch_first=batch_first
        )
        nested = batch_first and not norm_first  # elsewhere torch warns
        last = nn.LayerNorm(24) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, norm=last, enable_nested_tensor=nested)
        self.embed = nn.Linear(12, 24)
        self.out = nn.Linear(24, 3)
        position = torch.arange(16).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, 24, 2) * (-math.log(10000.0) / 24))
        pe = torch.zeros(16, 24)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("positions", pe)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, src: Tensor) -> Tensor:
        x = self.embed(src) * math.sqrt(24) + self.positions[: src.size(1)]
        if not self.batch_first:
            x = x.transpose(0, 1)
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(src.size(1), device=x.device, dtype=x.dtype)
        x = self.encoder(x, mask=mask)
        if not self.batch_first:
            x = x.transpose(0, 1)
        return self.out(x)


class TorchDecoder(nn.Module):
    """nn.TransformerDecoder on a memory that is a second input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, num_layers=2)

    def forward(self, tgt: Tensor, memory: Tensor) -> Tensor:
        n = tgt.size(1)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=tgt.device), diagonal=1)
        return self.decoder(tgt, memory, tgt_mask=mask)


class OwnMultiheadBlock(nn.Module):
    """nn.MultiheadAttention in a block of one's own, the norms after, in one of its many calls."""

    def __init__(
        self, d: int, heads: int, batch_first: bool, need_weights: bool, mask: str, extra: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(
            d, heads, dropout=0.1, batch_first=batch_first, add_bias_kv=extra, add_zero_attn=extra
        )
        self.linear1, self.linear2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(0.1)
        self.need_weights, self.mask = need_weights, mask

    def attn_mask(self, n: int) -> Tensor | None:
        if self.mask == "bool":
            return torch.triu(torch.ones(n, n), diagonal=1).bool()
        if self.mask == "float":
            distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
            return torch.where(distance.abs() <= 2, 0.0, float("-inf"))
        return None

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1 if self.self_attn.batch_first else 0]
        mask = self.attn_mask(n)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(x.dtype)
        y, _ = self.self_attn(x, x, x, attn_mask=mask, need_weights=self.need_weights)
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class SequenceFirst(nn.Module):
    """Transposes tokens to the front for the modules within, and back."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)
