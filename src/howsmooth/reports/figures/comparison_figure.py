"""Two scans side by side as a map of factors, or a series of them as lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from howsmooth.reports.figures.style import axes, literal, open_frame

_STYLES = ("-", "--", "-.", ":")
_MARKS = "os^DvP*X"


def factors_heatmap(factors: np.ndarray, *, title: str = "What changed?", ax: Axes | None = None) -> Figure:
    """One cell per layer and head, ``factors`` being σ after ÷ σ before, NaN where nothing was measured.

    >>> figure = factors_heatmap(np.array([[1.0, 3.0]]))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.0', '3.0']
    """
    figure, ax = axes(ax, 6.8, 1.6 + 0.55 * len(factors))
    logs = np.log2(np.where(factors > 0, factors, np.nan))
    reach = max(1.0, float(np.nanmax(np.abs(logs), initial=0.0)))
    image = ax.imshow(logs, cmap="PuOr_r", aspect="auto", norm=TwoSlopeNorm(0.0, -reach, reach))
    for (row, column), factor in np.ndenumerate(factors):
        if np.isfinite(factor):
            strong = abs(np.log2(factor)) > 0.7 * reach if factor > 0 else True
            colour = "white" if strong else "black"
            ax.text(
                column, row, f"{factor:.2g}" if factor < 1 else f"{factor:.1f}", ha="center", va="center", color=colour
            )
    ax.set_xticks(range(factors.shape[1]))
    ax.set_yticks(range(factors.shape[0]))
    ax.set(xlabel="head", ylabel="layer", title=literal(title))
    bar = figure.colorbar(image, ax=ax, label="σ after ÷ σ before (factor)", fraction=0.046, pad=0.02)
    ticks = np.linspace(-reach, reach, 5)
    bar.set_ticks(list(ticks), labels=[f"{2**tick:.2g}" for tick in ticks])
    return figure


def series_figure(
    names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], *, title: str, ax: Axes | None = None
) -> Figure:
    """Local Lipschitz constants over a series of scans, one line per map.

    Names that end in growing numbers are steps of a training run, and stand where their numbers do.

    >>> len(series_figure(["a", "b"], [("layer 0", [1.0, 2.0])], title="t").axes[0].lines)
    1
    >>> figure = series_figure(["run-100", "run-400"], [("layer 0", [1.0, 2.0])], title="t")
    >>> figure.axes[0].get_xlabel(), [float(x) for x in figure.axes[0].lines[0].get_xdata()]
    ('step', [100.0, 400.0])
    """
    figure, ax = axes(ax, 7.2, 4.8)
    steps = _final_numbers(names)
    places = list(range(len(names))) if steps is None else steps
    for number, (label, values) in enumerate(series):
        style, mark = _STYLES[number % len(_STYLES)], _MARKS[number % len(_MARKS)]
        ax.plot(places, values, linestyle=style, marker=mark, label=literal(label))
    if steps is None:
        ax.set_xticks(places, labels=[literal(name) for name in names], rotation=20, ha="right")
    else:
        ax.set_xlabel("step")
    ax.set(ylabel="local Lipschitz constant σ (output per input)", title=literal(title), yscale="log")
    ax.legend(frameon=False, fontsize=8)
    open_frame(ax)
    return figure


def _final_numbers(names: Sequence[str]) -> list[int] | None:
    """The numbers at the ends of the names, when all have one and they grow.

    >>> _final_numbers(["checkpoint-100", "checkpoint-200"]), _final_numbers(["a1", "b"]), _final_numbers(["2", "1"])
    ([100, 200], None, None)
    """
    ends = [re.search(r"(\d+)$", name) for name in names]
    steps = [int(end[1]) for end in ends if end is not None]
    grow = all(a < b for a, b in pairwise(steps))
    return steps if len(steps) == len(names) and grow else None
