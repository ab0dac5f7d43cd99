"""
Any number of tokens at once
============================

Two atoms stand for two groups of tokens of any size. A smaller group moves the rest by less mass, until it is too small
to be seen: in between, the local constant in the Wasserstein distance passes
:math:`\\tfrac12(1+\\gamma R^2)e^{\\gamma R^2}`. No measure passes the mean-field bound.
"""

import torch

import howsmooth as hs
from howsmooth import meanfield
from howsmooth.reports.figures import new_figure

strength = 4.0
head = hs.SelfAttention.from_bilinear(-strength * torch.eye(1), torch.eye(1))
places = torch.tensor([[-1.0], [1.0]])
shares = torch.logspace(-6, -0.5, 23, dtype=torch.float64).tolist()
values = [float(meanfield.local_constant(head, meanfield.Measure(places, [s, 1 - s])).value) for s in shares]

figure, (ax,) = new_figure()
ax.loglog(shares, values, color="crimson", label="two atoms: local constant in W₂")
for name, style in [("howsmooth.two_atom", ":"), ("howsmooth.mean_field", "--"), ("castin2024.mean_field", "-.")]:
    ax.axhline(float(hs.bounds.get(name)(head, over=hs.sets.Ball(1.0))), linestyle=style, color="#31688e", label=name)
ax.set(xlabel="share of tokens at −R", ylabel="Lipschitz constant on measures", title="A = −4, V = 1, R = 1")
_ = ax.legend(frameon=False)
