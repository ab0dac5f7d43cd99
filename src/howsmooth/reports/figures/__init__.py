"""Pictures. Every function draws on the axes it is given, or on a new figure, and returns the figure.

`style` has the shared look and writes files; the other modules each draw one result. No pyplot, no global state.

>>> import torch
>>> figure = head_bars(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 1.9]), torch.tensor([1.1, 2.1]))
>>> figure.axes[0].get_xlabel()
'head'
"""

# ruff: noqa: E402  (a missing matplotlib is reported before a module imports it)
from howsmooth._util.optional_deps import require

require(("matplotlib",), "a picture")

from howsmooth.reports.figures.bound_curves import bounds_against_n
from howsmooth.reports.figures.growth_curve import growth_figure
from howsmooth.reports.figures.head_figures import head_bars, heads_heatmap
from howsmooth.reports.figures.style import new_figure, save_figure
from howsmooth.reports.figures.token_figures import influence_map, token_energies

__all__ = [
    "bounds_against_n",
    "growth_figure",
    "head_bars",
    "heads_heatmap",
    "influence_map",
    "new_figure",
    "save_figure",
    "token_energies",
]
