"""
Not the same number
===================

Power iteration that keeps the value f(X) of a forward-mode product, instead of its tangent, returns
:math:`\\sqrt{\\|J^\\top f(X)\\|}`. It is no norm of the Jacobian, and it grows with n in another way.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

lengths = [8, 16, 32, 64, 128, 256]
attention = hs.SelfAttention.random(32, heads=4, mask="causal")
tokens = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
right, other = [], []
for n in lengths:
    x = tokens[:n]
    right.append(float(hs.measure(attention, x)))
    other.append(float(hs.jacobian(attention, x).rmatvec(attention(x)).norm().sqrt()))

figure, (ax,) = new_figure()
ax.loglog(lengths, right, "-o", color="#31688e", label="σ_max(J), measured")
ax.loglog(lengths, other, "--s", color="crimson", label="√‖Jᵀf(X)‖")
ax.set(xlabel="number of tokens n", ylabel="value", title="Two quantities on the same inputs")
_ = ax.legend(frameon=False)
