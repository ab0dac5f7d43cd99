"""
Watching σ while a model trains
===============================

The monitor measures every attention layer at the batch it has just seen and changes nothing. Here a small encoder
learns to reverse its input at two learning rates.
"""

import torch
from torch import nn

from howsmooth.nn import SmoothnessMonitor
from howsmooth.reports.figures import new_figure

figure, (ax,) = new_figure()
for rate, style in [(1e-3, "-o"), (1e-2, "--s")]:
    _ = torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    seen: dict[int, float] = {}

    def log(values: dict[str, float], step: int, seen: dict[int, float] = seen) -> None:
        seen[step] = max(values.values())

    with SmoothnessMonitor(model, every=10, log=log) as monitor:
        for _step in range(121):
            x = torch.randn(8, 12, 32)
            (model(x) - x.flip(1)).square().mean().backward()
            _ = monitor.step()
            optimiser.step()
            optimiser.zero_grad()
    ax.plot(list(seen), list(seen.values()), style, label=f"learning rate {rate}")
ax.set(xlabel="step", ylabel="largest σ over layers (lower bound)", title="Smoothness during training")
_ = ax.legend(frameon=False)
