"""
Five kinds of attention, larger and larger tokens
=================================================

The same random weights in five maps. Some grow with the tokens, some must not.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

draw = torch.Generator().manual_seed(0)
query, key, value = torch.randn(3, 8, 8, generator=draw) / 8**0.5
kinds = {
    "dot product": hs.SelfAttention(query, key, value),
    "L2, tied": hs.L2SelfAttention(query, value),
    "sigmoid": hs.SigmoidAttention(query, key, value),
    "cosine": hs.CosineAttention(query, key, value, temperature=2.0, value_scale=1.0, eps=0.1),
    "LipschitzNorm": hs.LipschitzNormAttention(query, key, value),
}
x = torch.randn(32, 8, generator=draw)
sizes = [0.1, 0.3, 1.0, 3.0, 10.0]
figure, (ax,) = new_figure()
for (name, attention), marker in zip(kinds.items(), "osv^D", strict=True):
    ax.loglog(sizes, [float(hs.measure(attention, c * x, rtol=1e-2)) for c in sizes], marker=marker, label=name)
ax.set(xlabel="factor on the tokens", ylabel="local Lipschitz constant σ (estimate)", title="32 tokens of width 8")
_ = ax.legend(frameon=False)
