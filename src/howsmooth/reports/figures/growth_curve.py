"""Growth with the number of tokens in one picture."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth._util.validation import validated
from howsmooth.reports.figures.style import ACCENT, BLUE, axes, label_places, light_grid, plain_decades, plain_legend
from howsmooth.reports.growth import Growth

_SLOPES = {"$n^{1/4}$": 1 / 4, "$n^{1/2}$": 1 / 2}
_TICKS = 9


@validated
def growth_figure(
    law: Growth,
    *,
    quantity: str = "local Lipschitz constant σ (estimate)",
    title: str = "Growth with the number of tokens",
    ax: Axes | None = None,
) -> Figure:
    """Values against n on logarithmic axes: every input, the geometric means, and the fitted power law with its band.

    Dashed lines through the middle of the data have the slopes 1/4 and 1/2. Where a plateau is the verdict, it is drawn
    with a dotted line at its start. A new figure has the verdict below it.

    >>> from howsmooth.reports.growth import growth
    >>> figure = growth_figure(growth([[2.0, 2.1], [3.1, 2.9], [4.0, 4.1]], [4, 9, 16]))
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()][3]
    '$n^{0.49}$'
    """
    below = f"\n\n{law.sentence}" if ax is None else ""
    figure, ax = axes(ax, 7.6, 5.4)
    n = np.geomspace(law.lengths[0], law.lengths[-1], 101)
    _draw_data(ax, law)
    band = np.array([law.band(count) or (np.nan, np.nan) for count in n])
    if law.interval is not None:
        sure = f"{100 * law.confidence:g} % band ({law.method})"
        ax.fill_between(n, band[:, 0], band[:, 1], color=ACCENT, alpha=0.18, linewidth=0, label=sure)
    fitted = [law.at(count) for count in n]
    ax.plot(n, fitted, color=ACCENT, linewidth=2, label=f"$n^{{{law.exponent:.2f}}}$")
    middle = float(np.sqrt(n[0] * n[-1]))
    for (name, slope), style in zip(_SLOPES.items(), ("--", "-."), strict=True):
        ax.plot(n, law.at(middle) * (n / middle) ** slope, style, color="0.55", linewidth=1, label=name)
    _draw_plateau(ax, law, n)
    _dress(ax, law)
    ax.set(ylabel=quantity, title=title)
    ax.set_xlabel(f"number of tokens n{below}", wrap=True)
    return figure


def _draw_data(ax: Axes, law: Growth) -> None:
    """Every value, and where a length has several their geometric mean."""
    n = np.repeat(law.lengths, [len(row) for row in law.values])
    several = len(n) > len(law.lengths)
    style = {"color": "0.6", "markersize": 3.5} if several else {"color": "black", "markersize": 5}
    ax.plot(n, np.concatenate(law.values), "o", label="inputs" if several else "values", zorder=3, **style)  # type: ignore[arg-type]
    if several:
        means = [float(np.exp(np.log(row).mean())) for row in law.values]
        ax.plot(law.lengths, means, "D", color="black", markersize=5, zorder=4, label="geometric means")


def _draw_plateau(ax: Axes, law: Growth, n: np.ndarray) -> None:
    plateau = law.plateau
    if plateau is None:
        return
    bent = plateau.level * np.minimum(n / plateau.start, 1.0) ** plateau.exponent
    ax.plot(n, bent, color=BLUE, linewidth=2, label=f"$n^{{{plateau.exponent:.2f}}}$, then a plateau")
    ax.axvline(plateau.start, color=BLUE, linestyle=":", linewidth=1)
    if plateau.interval is not None:
        ax.axvspan(*plateau.interval, color=BLUE, alpha=0.1, linewidth=0)
    at = (plateau.start, 1.0)
    text = f"n = {plateau.start:.0f}"
    ax.annotate(text, at, (3, -4), xycoords=ax.get_xaxis_transform(), textcoords="offset points", va="top", fontsize=8)


def _dress(ax: Axes, law: Growth) -> None:
    plain_decades(ax)
    label_places(ax, law.lengths[:: -(-len(law.lengths) // _TICKS)])
    light_grid(ax)
    plain_legend(ax, loc="upper left")
