"""A comparison as one page that opens offline, and as a picture."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from howsmooth._util.common import write_whole
from howsmooth._util.templates import render
from howsmooth.reports.figures.comparison_figure import factors_heatmap, series_figure
from howsmooth.reports.page import check_report_path
from howsmooth.scans import Change, Comparison

_LINES = 8


def comparison_figure(comparison: Comparison) -> Figure:
    """Heads of two scans as a map of factors; otherwise the maps that changed most, over the series."""
    title = f"{comparison.names[-1]} against {comparison.names[0]}"
    heads = [change for change in comparison.changes if change.place.what == "head"]
    if len(comparison.names) > 2 or not heads:
        series = [(str(change.place), change.values) for change in comparison.changes[:_LINES]]
        return series_figure(comparison.names, series, title=title)
    places = [(change.place.layer or 0, change.place.head or 0) for change in heads]
    factors = np.full([1 + max(numbers) for numbers in zip(*places, strict=True)], np.nan)
    for cell, change in zip(places, heads, strict=True):
        factors[cell] = change.ratio
    return factors_heatmap(factors, title=title)


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page and say where it is."""
    check_report_path(path)
    drawn = io.BytesIO()
    comparison_figure(comparison).savefig(drawn, format="svg")
    beyond = {change.place for change in (*comparison.rougher, *comparison.smoother)}
    page = render(
        "comparison",
        title=f"What changed from {comparison.names[0]} to {comparison.names[-1]}?",
        headline=comparison.headline(),
        picture=base64.b64encode(drawn.getvalue()).decode(),
        missing=comparison.missing,
        names=comparison.names,
        rows=[(change.place in beyond, _cells(change)) for change in comparison.changes],
    )
    write_whole(path, page.encode())
    return path


def _cells(change: Change) -> list[str]:
    values = [f"{value:.4g}" for value in change.values]
    between = f"{change.least:.3g} … {change.most:.3g}"
    return [str(change.place), str(change.length), *values, f"{change.ratio:.3g}", between]
