"""How early signals warn, in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth._util.annotations import fits
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import ACCENT, BLUE, axes, light_grid


@validated
def leads_figure(leads: Mapping[str, Sequence[int | None]], *, ax: Axes | None = None) -> Figure:
    """Steps from a signal's warning to divergence, one dot per run and a line at the median of those warned of.

    Args:
        leads: of every signal, for each run; None where it did not warn.

    >>> figure = leads_figure({"σ": [12, 30, None], "loss": [4, 6, 5]})
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['loss (3 of 3)', 'σ (2 of 3)']
    """
    if not all(fits(steps, Sequence[int | None]) for steps in leads.values()):
        raise InvalidInput("leads holds, for every signal, a list of steps or None, one for each run.")
    figure, ax = axes(ax, 7.6, 0.5 * len(leads) + 1.6)
    names = list(leads)[::-1]
    for row, name in enumerate(names):
        warned = [lead for lead in leads[name] if lead is not None and lead > 0]
        ax.plot(warned, [row] * len(warned), "o", color=BLUE, alpha=0.6, markersize=5)
        if warned:
            ax.plot([median(warned)] * 2, [row - 0.3, row + 0.3], color=ACCENT, linewidth=2.5)
    counts = {name: sum(lead is not None and lead > 0 for lead in leads[name]) for name in names}
    ax.set_yticks(range(len(names)), labels=[f"{name} ({counts[name]} of {len(leads[name])})" for name in names])
    ax.set_xlim(left=0)
    ax.set(xlabel="steps from the warning to divergence (median: line)", title="How early does each signal warn?")
    light_grid(ax)
    return figure
