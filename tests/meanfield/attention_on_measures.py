"""Attention on measures written out, and maps and measures to try it on: what the tests of this folder share."""

from __future__ import annotations

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.meanfield import Measure

KINDS = ("dot_product", "l2", "cosine")


def build(kind: str, width: int = 3, causal: bool = False, seed: int = 0) -> hs.SelfAttention | hs.L2SelfAttention:
    """Two heads of width 2 and an output projection."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(4, width, generator=generator, dtype=torch.float64) for _ in range(3))
    output = torch.randn(width, 4, generator=generator, dtype=torch.float64)
    mask = "causal" if causal else None
    if kind == "l2":
        return hs.L2SelfAttention(q, v, output, heads=2, mask=mask)
    if kind == "cosine":
        return hs.CosineAttention(q, k, v, output, heads=2, temperature=3.0, mask=mask)
    return hs.SelfAttention(q, k, v, output, heads=2, mask=mask)


def draw(weights: list[float], width: int = 3, positions: list[float] | None = None, seed: int = 0) -> Measure:
    """Normal atoms with these weights, made to sum to one."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(weights)
    x = torch.randn(len(weights), width, generator=generator, dtype=torch.float64)
    return Measure(x, [w / total for w in weights], positions)


def by_hand(attention: hs.SelfAttention | hs.L2SelfAttention, mu: Measure, atoms: Tensor, points: Tensor) -> Tensor:
    """Γ_μ at points, for the measure moved to ``atoms``, head by head and without the library's masks and stages."""
    out = torch.zeros(len(points), attention.out_features, dtype=torch.float64)
    for h in range(attention.heads):
        q = points @ attention.query_weight[h].T
        k, v = (atoms @ weight[h].T for weight in (attention.key_weight, attention.value_weight))
        if attention.kind == "l2":
            logits = -(q[:, None] - k).square().sum(-1) / 2**0.5
        elif attention.kind == "cosine":
            q, k, v = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k, v))
            logits = 3.0 * q @ k.T
        else:
            logits = q @ k.T / 2**0.5
        density = mu.weights * logits.exp()
        if mu.positions is not None:  # the points are the atoms then, at their positions
            density = density * (mu.positions <= mu.positions[:, None])
        out = out + density @ v / density.sum(-1, keepdim=True) @ attention.output_weight[h]
    return out
