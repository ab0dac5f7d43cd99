"""The common style of the reproduced figures: colours and marks that grey print and colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from howsmooth.figures import literal, new_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def panels(titles: Sequence[str], x: str, y: str, *, log: str = "xy") -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, axes named, logarithmic where ``log`` says so."""
    figure, axes = new_figure(len(titles), 5.6, 4.4)
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xlabel=x, ylabel=y, title=title)
        if "x" in log:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
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
    """Geometric middle of every x with a band from the least to the largest value."""
    grouped = rows.groupby(x)[y]
    middle = grouped.median()
    line(ax, number, middle.index, middle.to_numpy(), label)
    ax.fill_between(middle.index, grouped.min(), grouped.max(), color=COLOURS[number % len(COLOURS)], alpha=0.15)


def finish(*axes: Axes) -> None:
    """Legends without frames."""
    for ax in axes:
        ax.legend(fontsize=8, frameon=False)
