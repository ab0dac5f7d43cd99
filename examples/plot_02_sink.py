"""
An attention sink makes a head rough
====================================

With the attention weights held fixed a head is :math:`P \\otimes V`, and the norm of the weights obeys

.. math:: \\|P\\|_2 \\le \\sqrt{\\text{sink}}, \\qquad \\text{sink} = \\max_j \\sum_i P_{ij},

the attention that one token receives. In trained heads it is often the first token or a separator.
"""

import howsmooth as hs
from howsmooth.models import alice, capture, open_model
from howsmooth.reports.figures import new_figure

opened = open_model("minilm")
[window] = opened.windows(alice(), length=48, count=1, seed=0)
sites = capture(opened.model, opened.inputs(window), layers=[1, 4])

figure, (ax,) = new_figure()
for site, marker in zip(sites, "os", strict=True):
    story = hs.explain(site.attention, site.x, per_head=True, influence=False, rtol=1e-2)
    ax.scatter(story.sink.sqrt(), story.total.value, marker=marker, label=f"layer {site.layer}: 12 heads")
ax.set(xlabel="√sink: root of the attention one token receives", ylabel="local Lipschitz constant σ (estimate)")
ax.set_title("The more one token is looked at, the rougher the head")
_ = ax.legend(frameon=False)
