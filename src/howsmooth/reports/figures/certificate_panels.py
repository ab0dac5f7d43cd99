"""Proved bounds around inputs against the radius, as multiples of the value at the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth._util.annotations import fits
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import ACCENT, BLUE, CRIMSON, axes, light_grid, literal

_COLOURS = (BLUE, ACCENT, CRIMSON)


@validated
def certificate_ratios(
    radii: Sequence[float], ratios: Mapping[str, Sequence[Sequence[float]]], ax: Axes | None = None
) -> Figure:
    """Upper bound on a ball ÷ value at its centre, for the heads of some models: median, and from least to most.

    Args:
        radii: of the balls, as shares of the token norm. ratios: for each model one row of heads per radius.

    >>> figure = certificate_ratios([0.001, 0.01], {"a model": [[1.1, 1.2], [2.0, 4.0]]})
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [1.15, 3.0]
    """
    rows_of = ratios.values()
    if not ratios or not all(fits(rows, Sequence[Sequence[float]]) and len(rows) == len(radii) for rows in rows_of):
        raise InvalidInput("certificate_ratios needs one row of ratios for every radius.")
    figure, ax = axes(ax, 6.8, 4.6)
    shares = [100 * radius for radius in radii]
    for colour, (name, rows) in zip(_COLOURS * len(ratios), ratios.items(), strict=False):
        ax.plot(shares, [float(np.median(row)) for row in rows], "o-", color=colour, label=f"{literal(name)}: median")
        least, most = [min(row) for row in rows], [max(row) for row in rows]
        ax.fill_between(shares, least, most, color=colour, alpha=0.15, linewidth=0)
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="radius, in per cent of the mean token norm")
    ax.set_ylabel("proved upper end ÷ proved lower end at the input")
    ticks = [1, 1.2, 1.5, 2, 3, 5, 10, 20]
    ax.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    light_grid(ax)
    ax.legend(loc="upper left", frameon=False)
    return figure
