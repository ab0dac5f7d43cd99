"""The common style of the reproduced figures: colours and marks that grey print and colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from howsmooth.reports.figures.style import literal, new_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
HEIGHT = 4.2
"""Of a figure without its legends, in inches."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def panels(
    titles: Sequence[str], x: str, y: str, *, log: str = "xy", columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, in rows of ``columns``; axes named, logarithmic where ``log`` says so."""
    figure, axes = new_figure(len(titles), 5.6, HEIGHT, columns)
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xlabel=x, ylabel=y, title=title)
        if "x" in log:
            ax.set_xscale("log")
        if "y" in log:
            ax.set_yscale("log")
        ax.grid(True, which="major", linewidth=0.4, color="0.85")
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line(ax: Axes, number: int, x: Any, y: Any, label: str, *, marks: bool = True) -> None:
    """One series; its number gives colour, mark and dash. Measured series have marks, theorems none."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": literal(label)}
    if marks:
        ax.plot(x, y, marker=MARKS[number % len(MARKS)], markersize=4, linewidth=1.2, **style)
    else:
        ax.plot(x, y, linestyle=DASHES[number % len(DASHES)], linewidth=1.4, **style)


def spread(ax: Axes, number: int, rows: pandas.DataFrame, x: str, y: str, label: str) -> None:
    """The median at every x, with a band from the least to the largest value."""
    grouped = rows.groupby(x)[y]
    middle = grouped.median()
    line(ax, number, middle.index, middle.to_numpy(), label)
    ax.fill_between(middle.index, grouped.min(), grouped.max(), color=COLOURS[number % len(COLOURS)], alpha=0.15)


def short(source: str) -> str:
    """A model in a legend, without its sizes; of a file its name.

    >>> short("random:gpt2[layers=12,width=768]"), short("weights/gpt2.safetensors")
    ('random:gpt2', 'gpt2')
    """
    return Path(source).stem if source.endswith(".safetensors") else source.partition("[")[0]


def finish(*axes: Axes) -> None:
    """Legends below the panels, where they hide nothing, and as many plain numbers along the axes as have room."""
    for ax in axes:
        legend = ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        figure, place = ax.get_figure(), ax.get_subplotspec()
        rows = 1 if place is None else place.get_gridspec().nrows
        height = rows * (HEIGHT + 0.18 * len(legend.get_texts()))
        figure.set_figheight(max(figure.get_figheight(), height))  # type: ignore[union-attr]
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            if axis.get_scale() == "log" and (axis is ax.xaxis or high < 1000 * low):
                within = (1,) if high > 1000 * low else (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
                axis.set_major_locator(LogLocator(subs=within))
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(NullFormatter())


def whole_numbers(ax: Axes) -> None:
    """Ticks along x at whole numbers only."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
