"""
More than one singular value
============================

``k=`` asks for the largest k. They agree with a dense decomposition of the Jacobian, here a matrix of 640 × 640;
the solver makes a few products with it and never forms it.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

attention = hs.SelfAttention.random(16, heads=2, dtype=torch.float64)
x = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
dense = torch.linalg.svdvals(hs.jacobian(attention, x).dense())
measured = hs.measure(attention, x, k=12)

figure, (ax,) = new_figure()
ax.semilogy(range(1, 61), dense[:60], color="0.6", label="dense singular values")
ax.semilogy(range(1, 13), measured.values, "o", color="crimson", label=f"measured, {measured.products} products")
ax.set(xlabel="number of the singular value", ylabel="singular value of the Jacobian", title="The top of the spectrum")
_ = ax.legend(frameon=False)
