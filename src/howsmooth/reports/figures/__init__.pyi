from .bound_curves import bounds_against_n
from .growth_curve import growth_figure
from .head_and_token_figures import head_bars, heads_heatmap, influence_map, token_energies
from .style import new_figure, save_figure

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
