"""
Dot-product attention is not Lipschitz, L2 attention is
=======================================================

Kim, Papamakarios and Mnih (2021): with one token at 0 and the others at ±t the constant of dot-product attention
grows like t². Squared distances in place of dot products, with the factor :math:`A_h` in the values, end that.
"""

import torch

import howsmooth as hs
from howsmooth.bounds.l2_bounds import not_lipschitz_witness
from howsmooth.reports.figures import new_figure

one = torch.eye(1, dtype=torch.float64)
maps = {"dot product": hs.SelfAttention(one, one, one), "L2": hs.L2SelfAttention(one, one)}
sizes = [0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
figure, (ax,) = new_figure()
for (name, attention), style in zip(maps.items(), ("-o", "--s"), strict=True):
    values = [float(hs.measure(attention, not_lipschitz_witness(9, t), norm="inf")) for t in sizes]
    ax.loglog(sizes, values, style, label=name)
ax.set(xlabel="t: how far the tokens are from zero", ylabel="∞-norm of the Jacobian", title="Nine tokens: 0 and ±t")
_ = ax.legend(frameon=False)
