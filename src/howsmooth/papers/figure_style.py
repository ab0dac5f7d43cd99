"""The common style of the reproduced figures: distinct in grey and for colour-blind readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from howsmooth.papers.experiment import Rows
from howsmooth.reports.figures.style import literal, new_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
HEIGHT = 4.2
"""Of a figure without its legends, in inches."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def panels(titles: Sequence[str], x: str, y: str, *, log: str = "xy", columns: int | None = None) -> list[Axes]:
    """Make a figure with one panel per title, in rows of ``columns``; ``log`` names the logarithmic axes."""
    _, axes = new_figure(len(titles), 5.6, HEIGHT, columns)
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xlabel=x, ylabel=y, title=title)
        if "x" in log:
            ax.set_xscale("log")
        if "y" in log:
            ax.set_yscale("log")
        ax.grid(True, which="major", linewidth=0.4, color="0.85")
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def panel_groups(
    rows: Rows, by: str, title: Callable[[Any], str], x: str, y: str, *, sort: bool = False, **options: Any
) -> list[tuple[Axes, Rows]]:
    """Make one panel per group of rows, titled by its key; options as of `panels`."""
    groups = list(rows.groupby(by, sort=sort))
    axes = panels([title(key) for key, _ in groups], x, y, **options)
    return [(ax, group) for ax, (_, group) in zip(axes, groups, strict=True)]


def line(ax: Axes, number: int, x: Any, y: Any, label: str, *, marks: bool = True) -> None:
    """Draw one series; its number gives colour, mark and dash. Measured series have marks, theorems none."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": literal(label)}
    if marks:
        ax.plot(x, y, marker=MARKS[number % len(MARKS)], markersize=4, linewidth=1.2, **style)
    else:
        ax.plot(x, y, linestyle=DASHES[number % len(DASHES)], linewidth=1.4, **style)


def lines(ax: Axes, rows: Rows, x: str, measured: dict[str, str], theorems: dict[str, str]) -> None:
    """Draw columns against the column x; both dictionaries map columns to labels."""
    for number, (column, label) in enumerate({**measured, **theorems}.items()):
        line(ax, number, rows[x], rows[column], label, marks=column in measured)


def reference_line(ax: Axes, y: float, label: str) -> None:
    """Draw a dashed horizontal line at y."""
    ax.axhline(y, color="black", linestyle="--", linewidth=1.2, label=label)


def median_band(ax: Axes, number: int, rows: Rows, x: str, y: str, label: str) -> None:
    """Draw the median at every x, with a band from the smallest to the largest value."""
    grouped = rows.groupby(x)[y]
    middle = grouped.median()
    line(ax, number, middle.index, middle.to_numpy(), label)
    ax.fill_between(middle.index, grouped.min(), grouped.max(), color=COLOURS[number % len(COLOURS)], alpha=0.15)


def median_bands(
    ax: Axes, rows: Rows, by: list[str], x: str, y: str, label: Callable[..., str] = str, *, sort: bool = True
) -> None:
    """Draw a median with its band for every group, labelled by ``label`` of its key."""
    for number, (key, group) in enumerate(rows.groupby(by, sort=sort)):
        median_band(ax, number, group, x, y, label(*key))


def relative_to_smallest(rows: Rows, by: list[str], x: str, y: str) -> Rows:
    """Add the column ``relative``: y over the median of y at the smallest x of its group."""
    first = rows[y].where(rows[x] == rows.groupby(by)[x].transform("min"))
    return rows.assign(relative=rows[y] / first.groupby([rows[name] for name in by]).transform("median"))


def model_label(source: str) -> str:
    """Return the name of a model for a legend: without its sizes, or the stem of its file.

    >>> model_label("random:gpt2[layers=12,width=768]"), model_label("weights/gpt2.safetensors")
    ('random:gpt2', 'gpt2')
    """
    return Path(source).stem if source.endswith(".safetensors") else source.partition("[")[0]


def finish(panel: Axes) -> Figure:
    """Put legends below all panels and plain numbers along their axes, and return the figure."""
    figure = panel.get_figure(root=True)
    assert figure is not None
    for ax in figure.axes:
        legend = ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        place = ax.get_subplotspec()
        rows = 1 if place is None else place.get_gridspec().nrows
        height = rows * (HEIGHT + 0.18 * len(legend.get_texts()))
        figure.set_figheight(max(figure.get_figheight(), height))
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            if axis.get_scale() == "log" and (axis is ax.xaxis or high < 1000 * low):
                within = (1,) if high > 1000 * low else (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
                axis.set_major_locator(LogLocator(subs=within))
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(NullFormatter())
    return figure


def integer_ticks(ax: Axes) -> None:
    """Put ticks along x at integers only."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
