"""
Layers with a promise
=====================

The Lipschitz bound of layers to train with, against the number of tokens. The contractive layer is divided
by its own bound, so it has none that grows.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

lengths = [2**k for k in range(1, 13)]
figure, (ax,) = new_figure()
for kind, marker in [
    (hs.nn.L2Attention, "o"),
    (hs.nn.CosineAttention, "s"),
    (hs.nn.LipschitzNormAttention, "v"),
    (hs.nn.ContractiveL2Attention, "D"),
]:
    _ = torch.manual_seed(0)
    layer = kind(64, 4).eval()
    ax.loglog(lengths, [float(layer.lipschitz_bound(n)) for n in lengths], marker=marker, label=kind.__name__)
ax.set(xlabel="number of tokens n", ylabel="Lipschitz bound, all inputs", title="Width 64, 4 heads")
_ = ax.legend(frameon=False)
