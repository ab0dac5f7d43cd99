"""Pictures. Every function draws on the axes it is given, or on a new figure, and returns the figure.

>>> import torch
>>> figure = head_bars(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 1.9]), torch.tensor([1.1, 2.1]))
>>> figure.axes[0].get_xlabel()
'head'
"""

# ruff: noqa: E402  (what is missing is said before anything asks for it)
from howsmooth._util.optional_deps import require

require(("matplotlib",), "a picture")

from howsmooth.reports.figures.bound_curves import bounds_against_n, random_tokens
from howsmooth.reports.figures.certificate_panels import certificate_ratios
from howsmooth.reports.figures.early_warnings import leads_figure
from howsmooth.reports.figures.growth_curve import growth_figure
from howsmooth.reports.figures.head_figures import head_bars, heads_heatmap
from howsmooth.reports.figures.quantisation_curves import quantisation_figure
from howsmooth.reports.figures.sandwich_curves import sandwich_figure
from howsmooth.reports.figures.scan_panels import bound_ratios, depth_lines, scanned_growth, scanned_heads
from howsmooth.reports.figures.style import FORMATS, check_figure_path, literal, new_figure, save_figure
from howsmooth.reports.figures.token_figures import chosen_labels, influence_map, token_energies

__all__ = [
    "FORMATS",
    "bound_ratios",
    "bounds_against_n",
    "certificate_ratios",
    "check_figure_path",
    "chosen_labels",
    "depth_lines",
    "growth_figure",
    "head_bars",
    "heads_heatmap",
    "influence_map",
    "leads_figure",
    "literal",
    "new_figure",
    "quantisation_figure",
    "random_tokens",
    "sandwich_figure",
    "save_figure",
    "scanned_growth",
    "scanned_heads",
    "token_energies",
]
