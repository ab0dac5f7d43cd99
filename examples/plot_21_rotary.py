"""
Rotary positions (RoPE)
=======================

Rotary positions turn queries and keys by an angle that grows with the position. Lengths stay, so the closed form of
the Jacobian stays; what changes is which tokens meet. Left without, right with RoPE: the influence of token j on
token i.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import influence_map, new_figure

x = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)) + 0.1 * torch.randn(
    32, 16, generator=torch.Generator().manual_seed(1)
)
plain = hs.SelfAttention.random(16, scale=2.0)
turned = hs.SelfAttention.random(16, scale=2.0, rotary=hs.Rotary.standard(16))
figure, panels = new_figure(2)
for ax, name, attention in zip(panels, ("no positions", "RoPE"), (plain, turned), strict=True):
    title = f"{name}: σ = {float(hs.measure(attention, x)):.2f}"
    _ = influence_map(hs.token_influence(attention, x), title=title, ax=ax)
