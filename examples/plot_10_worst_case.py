"""
Climbing to the worst input
===========================

The search follows the gradient of :math:`\\sigma_{\\max}(J(X))` through fixed singular vectors, from several starts
at once. The value it ends with is measured anew: a true lower bound, with its witness. Here it starts without the
theorems' own constructions, to show the climb.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import new_figure

head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
figure, (ax,) = new_figure()
for seed, style in enumerate(["-", "--", ":"]):
    witness = hs.worst_case(head, 8, over=hs.sets.Ball(2.0), constructions=False, starts=1, steps=60, seed=seed)
    ax.plot(witness.history, style, color="crimson", label=f"one random start, seed {seed}: {witness.value:.2f}")
best = hs.worst_case(head, 8, over=hs.sets.Ball(2.0), steps=20)
ax.axhline(best.value, color="0.5", linestyle="-.", label=f"with the theorems' constructions: {best.value:.2f}")
upper = float(hs.bounds.get("howsmooth.unified")(head, n=8, over=hs.sets.Ball(2.0)))
ax.axhline(upper, color="#31688e", label=f"howsmooth.unified: no input is above {upper:.2f}")
ax.set(xlabel="step", ylabel="largest σ so far (lower bound)", title="8 tokens of norm at most 2", yscale="log")
_ = ax.legend(frameon=False)

# %%
# The witness itself: eight tokens in the plane.

print(best.x.round(decimals=2).tolist())
