"""What layers with a Lipschitz bound cost beside plain dot-product attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds
from howsmooth import nn as layers

TEXT = """Milliseconds of one layer on one sequence, 8 heads × 64, float32, eager mode, and in brackets the time over
that of plain dot-product attention: one fused projection, softmax(q kᵀ/√k) v as three operations, output projection.
`nn.MultiheadAttention` uses torch's fused kernel. Contractive layers are in training, their norms kept current."""
MOST = 1.3
D, HEADS = 512, 8
Layer = Callable[[Tensor], Tensor]


class PlainAttention(nn.Module):
    """Dot-product attention as written in a tutorial."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads, self.in_proj, self.out_proj = heads, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q * q.shape[-1] ** -0.5 @ k.mT, dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def contestants(d: int = D, heads: int = HEADS) -> dict[str, Layer]:
    """Every layer as a function of the tokens; the plain one first."""
    theirs = nn.MultiheadAttention(d, heads, bias=False, batch_first=True)
    ours: dict[str, layers.AttentionLayer] = {
        "DotProductAttention": layers.DotProductAttention(d, heads),
        "L2Attention": layers.L2Attention(d, heads),
        "ContractiveL2Attention, 2": layers.ContractiveL2Attention(d, heads),
        "ContractiveL2Attention, ∞": layers.ContractiveL2Attention(d, heads, norm="inf"),
        "SigmoidAttention": layers.SigmoidAttention(d, heads),
        "CosineAttention": layers.CosineAttention(d, heads),
        "LipschitzNormAttention": layers.LipschitzNormAttention(d, heads),
        "NormControlledAttention": layers.NormControlledAttention(d, heads),
    }
    called: dict[str, Layer] = {name: lambda x, layer=layer: layer(x)[0] for name, layer in ours.items()}  # type: ignore[misc]
    return {
        "plain": PlainAttention(d, heads),
        "nn.MultiheadAttention": lambda x: theirs(x, x, x, need_weights=False)[0],
    } | called


def task(layer: Layer, x: Tensor, backward: bool) -> Callable[[], None]:
    """One forward pass without gradients, or one with the way back to tokens and weights."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer(x.detach().requires_grad_()).sum().backward()

    return both if backward else forward


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time all layers in turns, forward alone and with the way back, at three lengths."""
    lengths, rounds = ((32,), 2) if quick else ((256, 512, 1024), 30)
    found = contestants()
    rows: dict[str, list[str]] = {name: [name] for name in found}
    worst = 0.0
    for n in lengths:
        x = torch.randn(1, n, D, generator=torch.Generator().manual_seed(0))
        for backward in (False, True):
            report(f"n = {n}, {'forward and backward' if backward else 'forward'}")
            best = best_seconds({name: task(layer, x, backward) for name, layer in found.items()}, rounds, budget=60)
            for name, seconds in best.items():
                rows[name].append(f"{1e3 * seconds:.1f} ({seconds / best['plain']:.2f})")
            worst = max(worst, best["L2Attention"] / best["plain"])
    columns = ["layer", *(f"n = {n}, {way}" for n in lengths for way in ("forward", "both ways"))]
    section = Section("attention_layers", "Layers to train with", TEXT, [Table(columns, list(rows.values()))])
    claim = f"L2Attention ÷ plain dot-product attention, n = {', '.join(map(str, lengths))}, both ways"
    section.targets = [Target(claim, f"≤ {MOST}", f"{worst:.2f}", worst <= MOST)]
    return section
