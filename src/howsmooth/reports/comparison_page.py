"""A comparison as one page that opens offline, and as a picture."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from howsmooth._util.common import write_whole
from howsmooth.reports.figures.comparison_figure import factors_heatmap, series_figure
from howsmooth.reports.page import check_report_path, visible
from howsmooth.scans import Comparison

_LINES = 8
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.beyond { font-weight: 600; }
.quiet { opacity: .75; }
.wide { overflow-x: auto; }
"""


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
    picture = base64.b64encode(drawn.getvalue()).decode()
    names = [html.escape(visible(name)) for name in comparison.names]
    beyond = {change.place for change in (*comparison.rougher, *comparison.smoother)}
    rows = "".join(
        f'<tr class="{"beyond" if change.place in beyond else ""}"><td>{html.escape(str(change.place))}</td>'
        f"<td>{change.length}</td>"
        + "".join(f"<td>{value:.4g}</td>" for value in change.values)
        + f"<td>{change.ratio:.3g}</td><td>{change.least:.3g} … {change.most:.3g}</td></tr>"
        for change in comparison.changes
    )
    missing = f"{comparison.missing} cells are not in every scan and are left out." if comparison.missing else ""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>What changed from {names[0]} to {names[-1]}?</title><style>{_STYLE}</style></head><body>
<h1>What changed from {names[0]} to {names[-1]}?</h1>
<p>{html.escape(visible(comparison.headline()))}</p>
<p><img alt="The change of every map" src="data:image/svg+xml;base64,{picture}"></p>
<p class="quiet">σ is the local Lipschitz constant at the text: how far a small change of the input moves the output.
Each row shows the cell of that map whose change is most certain; the true factor lies between the two ends in the last
column, which allow for the accuracy of both measurements. Every model is measured at what its own layers receive:
behind a map that has changed, others see other tokens and may change with it, so of several look at the first layer
first. {missing}</p>
<div class="wide"><table><thead><tr><th>map</th><th>tokens</th>{"".join(f"<th>σ, {name}</th>" for name in names)}
<th>factor</th><th>between</th></tr></thead><tbody>{rows}</tbody></table></div></body></html>
"""
    write_whole(path, page.encode())
    return path
