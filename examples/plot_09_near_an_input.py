"""
A promise around an input
=========================

``howsmooth.three_path_ball`` bounds the constant at *every* input whose tokens are within ε of the given ones. At ε
= 0 it is the three-path bound.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

attention = hs.SelfAttention.random(16, heads=2)
x = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
distances = [0.0, 0.003, 0.01, 0.03, 0.1, 0.2]
bound = hs.bounds.get("howsmooth.three_path_ball")
promised = [float(bound(attention, over=hs.sets.Around(x, eps))) for eps in distances]
reached = [hs.worst_case(attention, over=hs.sets.Around(x, eps), starts=1, steps=12).value
           for eps in distances[1:]]  # fmt: skip

figure, (ax,) = new_figure()
ax.plot(distances, promised, "-o", color="#31688e", label="theorem: no input this near is rougher")
ax.plot(distances[1:], reached, "--s", color="crimson", label="reached by a search")
ax.axhline(float(hs.measure(attention, x)), color="0.6", linewidth=1, label="at the input itself")
ax.set(xlabel="ε: how far every token may move", ylabel="local Lipschitz constant", title="Near an input", yscale="log")
_ = ax.legend(frameon=False)
