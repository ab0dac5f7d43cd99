"""
Two regimes on a ball
=====================

On the ball of radius R, with :math:`a = \\|A\\|R^2`,

.. math:: \\mathrm{Lip} \\le \\|V\\|\\,\\bigl[a + (1 + a)\\min(\\sqrt n,\\ e^{a})\\bigr]:

growth like :math:`\\sqrt n` that ends at :math:`n = e^{2a}`, where the mean-field bound takes over. The lower
bounds show that it is no artefact.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

head = hs.SelfAttention.from_bilinear(-2.0 * torch.eye(2), torch.eye(2))
lengths = [2**k for k in range(1, 16)]
figure, (ax,) = new_figure()
for name, style in [
    ("castin2024.sqrt_n", "--"),
    ("howsmooth.sqrt_n", "-."),
    ("howsmooth.unified", "-"),
    ("howsmooth.two_cluster", ":"),
]:
    bound = hs.bounds.get(name)
    values = [float(bound(head, n=n, over=hs.sets.Ball(1.0))) for n in lengths]
    ax.loglog(lengths, values, style, label=f"{bound.side}: {name}")
ax.axvline(torch.e**4, color="0.7", linewidth=1)
ax.set(xlabel="number of tokens n", ylabel="bound on the Lipschitz constant", title="A = −2 I, V = I, R = 1")
_ = ax.legend(frameon=False)
