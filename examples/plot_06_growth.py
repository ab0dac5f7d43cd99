"""
Does it grow with the number of tokens?
=======================================

Five random inputs at each length, and a power law with its interval. Random tokens are the mild case: the worst
inputs grow like :math:`\\sqrt n`, see the examples on the worst case.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

lengths = [8, 16, 32, 64, 128, 256]
attention = hs.SelfAttention.random(32, heads=4, mask="causal")
draw = torch.Generator().manual_seed(0)
values = [hs.measure(attention, torch.randn(5, n, 32, generator=draw), rtol=1e-2).value.tolist() for n in lengths]
grown = hs.growth(values, lengths)

figure, (ax,) = new_figure()
for n, row in zip(lengths, values, strict=True):
    ax.loglog([n] * len(row), row, "o", color="#31688e", markersize=4)
ax.loglog(lengths, [grown.at(n) for n in lengths], color="crimson", label=repr(grown))
ax.set(xlabel="number of tokens n", ylabel="local Lipschitz constant σ (estimate)", title="Growth on random tokens")
_ = ax.legend(frameon=False)

# %%
# What the data can say, and what they cannot:

print(grown.sentence)
