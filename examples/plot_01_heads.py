"""
Which head is roughest?
=======================

All 72 heads of MiniLM, a real encoder, at the tokens they see when it reads the opening of a chapter. The framed
head reacts most: if its input moves by ε, its output can move by that many ε.
"""

import torch

import howsmooth as hs
from howsmooth.models import alice, capture, open_model
from howsmooth.reports.figures import heads_heatmap

opened = open_model("minilm")
[window] = opened.windows(alice(), length=32, count=1, seed=0)
sites = capture(opened.model, opened.inputs(window))

values = torch.stack([hs.measure_heads(site.attention, site.x, rtol=1e-2).value for site in sites])
figure = heads_heatmap(values)

# %%
# Trained heads differ by an order of magnitude; a norm of the weights would not tell.

print(f"{float(values.min()):.1f} to {float(values.max()):.1f}, median {float(values.median()):.1f}")
