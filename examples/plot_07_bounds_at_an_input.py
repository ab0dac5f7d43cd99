"""
How far is every bound?
=======================

Bounds that look at the input are within a small factor of what is measured; those that hold for all tokens of a
ball pay for it. A head of MiniLM on real text.
"""

import howsmooth as hs
from howsmooth.models import alice, capture, open_model
from howsmooth.reports.figures import new_figure

opened = open_model("minilm")
[window] = opened.windows(alice(), length=32, count=1, seed=0)
[site] = capture(opened.model, opened.inputs(window), layers=[2])

table = hs.bounds.table(site.attention, over=site.x, per_head=True)
rows = [row for row in table if row.head == 0 and row.kind == "upper" and row.value < 1e9]
rows.sort(key=lambda row: row.value)
measured = next(row.value for row in table if row.head == 0 and row.kind == "measured")

figure, (ax,) = new_figure(1, 7.6, 3.6)
ax.barh([row.name for row in rows], [row.value / measured for row in rows], color="#31688e")
ax.invert_yaxis()
ax.set(xscale="log", xlabel="upper bound / measured σ", title="Layer 2, head 0 of MiniLM, 32 tokens")
_ = ax.spines[["top", "right"]].set_visible(False)
