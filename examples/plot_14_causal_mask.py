"""
A causal mask breaks the mean-field constant
============================================

With :math:`A = 0` attention is a mean. Without a mask its norm is 1 for every n; a causal mask turns it into
running means, the Cesàro matrix, whose norm tends to 2. So the constants for unmasked attention are false under a
mask, and ``howsmooth.masked_mean_field`` is sharp.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

zero, one = torch.zeros(1, 1), torch.ones(1, 1)
lengths = [1, 3, 10, 30, 100, 300, 1000, 3000]
figure, (ax,) = new_figure()
for mask, style in [(None, "--s"), ("causal", "-o")]:
    attention = hs.SelfAttention.from_bilinear(zero, one, mask=mask)
    values = [float(hs.measure(attention, torch.zeros(n, 1))) for n in lengths]
    ax.semilogx(lengths, values, style, label="no mask" if mask is None else "causal mask")
ax.axhline(2.0, color="0.6", linewidth=1)
ax.set(xlabel="number of tokens n", ylabel="local Lipschitz constant σ", title="A = 0, V = 1: plain and running means")
_ = ax.legend(frameon=False)
