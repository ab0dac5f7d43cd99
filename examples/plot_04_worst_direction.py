"""
Where does the worst perturbation sit?
======================================

The top right singular vector of the Jacobian is the change of the tokens that moves the output most, the left one
is where it shows. Their shares per token, for the roughest head of a layer of MiniLM.
"""

import howsmooth as hs
from howsmooth.models import alice, capture, open_model
from howsmooth.reports.figures import token_energies

opened = open_model("minilm")
[window] = opened.windows(alice(), length=24, count=1, seed=0)
[site] = capture(opened.model, opened.inputs(window), layers=[4])

story = hs.explain(site.attention, site.x, per_head=True, influence=False, rtol=1e-2)
roughest = int(story.total.value.argmax())
figure = token_energies(story.input_energy[roughest], story.output_energy[roughest], window.tokens)
