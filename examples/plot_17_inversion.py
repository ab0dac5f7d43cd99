"""
Undoing attention
=================

:math:`y = x + f(x)` can be undone when f is a contraction: iterate :math:`x \\leftarrow y - f(x)`. Each step
shrinks the error by the constant c, at least; with the inverse comes a bound on what is left.
"""

import torch

from howsmooth.nn import ContractiveL2Attention, InvertibleResidual
from howsmooth.reports.figures import new_figure

figure, (ax,) = new_figure()
for c, marker in [(0.5, "o"), (0.7, "s"), (0.9, "v")]:
    _ = torch.manual_seed(0)
    f = ContractiveL2Attention(16, num_heads=2, coefficient=c).double().eval()
    block = InvertibleResidual(f)
    x = torch.randn(1, 24, 16, dtype=torch.float64)
    with torch.no_grad():
        y = block(x)
        guess, errors = y, []
        for _step in range(12):
            errors.append(float((guess - x).norm()))
            guess = y - f(guess)[0]
        inverted = block.inverse(y)
    ax.semilogy(errors, marker=marker, label=f"c = {c}; error bound of the inverse {float(inverted.error_bound):.0e}")
ax.set(xlabel="plain iterations", ylabel="error of x (Frobenius norm)", title="x + f(x), undone")
_ = ax.legend(frameon=False)
