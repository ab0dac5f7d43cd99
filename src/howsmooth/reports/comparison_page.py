"""A comparison of scans as one page that opens offline, and as a picture."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from howsmooth._util.common import write_whole
from howsmooth._util.display import render
from howsmooth.reports.figures.style import cell_map, literal, new_figure, open_frame, plain_legend
from howsmooth.reports.page import check_report_path
from howsmooth.scans import Comparison

_LINES = ("o-", "s--", "^-.", "D:", "v-", "P--", "*-.", "X:")


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page and return its path."""
    check_report_path(path)
    drawn = io.BytesIO()
    comparison_figure(comparison).savefig(drawn, format="svg")
    page = render(
        "comparison",
        title=f"What changed from {comparison.names[0]} to {comparison.names[-1]}?",
        picture=base64.b64encode(drawn.getvalue()).decode(),
        comparison=comparison,
        beyond={change.place for change in (*comparison.rougher, *comparison.smoother)},
    )
    write_whole(path, page.encode())
    return path


def comparison_figure(comparison: Comparison) -> Figure:
    """Heads of two scans as a map of factors; otherwise the maps with the largest changes, over the series."""
    title = f"{comparison.names[-1]} against {comparison.names[0]}"
    heads = [change for change in comparison.changes if change.place.what == "head"]
    if len(comparison.names) > 2 or not heads:
        series = [(str(change.place), change.values) for change in comparison.changes[: len(_LINES)]]
        return series_figure(comparison.names, series, title)
    places = [(change.place.layer or 0, change.place.head or 0) for change in heads]
    factors = np.full([1 + max(numbers) for numbers in zip(*places, strict=True)], np.nan)
    for cell, change in zip(places, heads, strict=True):
        factors[cell] = change.ratio
    return factors_heatmap(factors, title)


def factors_heatmap(factors: np.ndarray, title: str) -> Figure:
    """One cell per layer and head, ``factors`` being σ after ÷ σ before, NaN where nothing was measured.

    >>> figure = factors_heatmap(np.array([[1.0, 3.0]]), "two heads")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.0', '3.0']
    """
    figure, (ax,) = new_figure(1, 6.8, 1.6 + 0.55 * len(factors))
    logs = np.abs(np.log2(np.where(factors > 0, factors, np.nan)))
    reach = max(1.0, float(np.nanmax(logs, initial=0.0)))
    colours = {"cmap": "PuOr_r", "norm": LogNorm(2**-reach, 2**reach)}
    bar = cell_map(ax, factors, _short_factor, ~(logs > 0.7 * reach), "σ after ÷ σ before (factor)", **colours)
    ax.set_title(literal(title))
    ticks = 2 ** np.linspace(-reach, reach, 5)
    bar.set_ticks(list(ticks), labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    return figure


def _short_factor(factor: float) -> str:
    return f"{factor:.2g}" if factor < 1 else f"{factor:.1f}"


def series_figure(names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], title: str) -> Figure:
    """Local Lipschitz constants over a series of scans, one line per map.

    Names that end in growing numbers are steps of a training run, and are placed at their numbers.

    >>> len(series_figure(["a", "b"], [("layer 0", [1.0, 2.0])], "t").axes[0].lines)
    1
    >>> figure = series_figure(["run-100", "run-400"], [("layer 0", [1.0, 2.0])], "t")
    >>> figure.axes[0].get_xlabel(), [float(x) for x in figure.axes[0].lines[0].get_xdata()]
    ('step', [100.0, 400.0])
    """
    figure, (ax,) = new_figure(1, 7.2, 4.8)
    steps = _final_numbers(names)
    places = steps or range(len(names))
    for style, (label, values) in zip(_LINES, series, strict=False):
        ax.plot(places, values, style, label=literal(label))
    if steps is None:
        ax.set_xticks(places, labels=[literal(name) for name in names], rotation=20, ha="right")
    else:
        ax.set_xlabel("step")
    ax.set(ylabel="local Lipschitz constant σ (output per input)", title=literal(title), yscale="log")
    plain_legend(ax)
    open_frame(ax)
    return figure


def _final_numbers(names: Sequence[str]) -> list[int] | None:
    """The numbers at the ends of the names, when all have one and they grow.

    >>> _final_numbers(["checkpoint-100", "checkpoint-200"]), _final_numbers(["a1", "b"]), _final_numbers(["2", "1"])
    ([100, 200], None, None)
    """
    numbers = [int(end[1]) for name in names if (end := re.search(r"(\d+)$", name))]
    return numbers if len(numbers) == len(names) and all(a < b for a, b in pairwise(numbers)) else None
