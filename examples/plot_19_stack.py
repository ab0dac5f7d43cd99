"""
What makes a product of constants large?
========================================

The chain rule multiplies the constants of all parts of a model. In digits, for a small encoder: everywhere, and on
inputs whose tokens have at least the variance that a real input shows.
"""

import torch

from howsmooth.bounds import measured_variances, stack
from howsmooth.reports.figures import new_figure
from howsmooth.sets import Ball

_ = torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", dropout=0.0)
model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
everywhere = stack(model, n=16, over=Ball(8.0))
here = stack(model, n=16, over=Ball(8.0), variance=measured_variances(model, x))

figure, (ax,) = new_figure(1, 7.6, 3.6)
kinds = list(everywhere.kinds)
for found, name, shift, colour in [(everywhere, "everywhere", 0, "#31688e"), (here, "on this set", 0.4, "crimson")]:
    places = [shift + k for k in range(len(kinds))]
    ax.bar(places, [found.kinds[kind] for kind in kinds], 0.4, color=colour, label=f"{name}: 10^{found.log10:.1f}")
ax.set_xticks([0.2 + k for k in range(len(kinds))], kinds)
ax.set(ylabel="decimal digits of the bound", title="A product of constants, by kind of part")
_ = ax.legend(frameon=False)
