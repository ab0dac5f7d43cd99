"""Figures of a scan for papers: heads, growth, distances to the bounds, layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from howsmooth._util.common import FORMATS
from howsmooth._util.validation import validated
from howsmooth.reports.figures.head_and_token_figures import heads_heatmap
from howsmooth.reports.figures.style import (
    ACCENT,
    label_places,
    literal,
    new_figure,
    open_frame,
    plain_decades,
    plain_legend,
    save_figure,
)
from howsmooth.reports.findings import bound_distances, bounds_of, growths, place_of
from howsmooth.reports.growth.laws import rounded_up
from howsmooth.reports.page import check_formats
from howsmooth.reports.scan_groups import Group, Source, cell_of, groups, kind_name

_LONGEST_NAME, _LONGEST_TITLE = 60, 100
_FARTHEST = 1e6
"""Bounds whose median ratio to σ is larger are named, not drawn."""
_CEILING = 1e4
"""Bounds that exceed this multiple of all measured values are left out: they would flatten the rest."""
_SIGMA = "local Lipschitz constant σ (estimate)"


@validated
def write_figures(source: Source, folder: str | PathLike[str], formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write every figure for which the scan has numbers, in every format, and return the paths."""
    suffixes = check_formats(formats)
    scanned = groups(source)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, group in enumerate(scanned):
        name = "".join(letter if letter.isalnum() else "-" for letter in group.model)[:_LONGEST_NAME]
        stem = name if [other.model for other in scanned].count(group.model) == 1 else f"{name}-{number + 1}"
        for kind, draw in FIGURES.items():
            figure = draw(group)
            if figure is not None:
                for suffix in suffixes:
                    written.append(folder / f"{stem}-{kind}{suffix}")
                    save_figure(figure, written[-1])
    return written


def heads_figure(group: Group) -> Figure | None:
    """σ of every head at the longest length; cells that were not scanned are hatched."""
    rows = group.roughest("head")
    if not rows:
        return None
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    data = torch.full((len(layers), len(heads)), torch.nan, dtype=torch.float64)
    for row in rows:
        data[layers.index(row["layer"]), heads.index(row["head"])] = row["value"]
    figure, (ax,) = new_figure(1, max(6.8, 0.5 * len(heads) + 2), 1.6 + 0.3 * len(layers))
    title = f"{_titled(group)}, n = {rows[0]['length']}"
    heads_heatmap(data.nan_to_num(), layers=list(map(str, layers)), title=title, quantity="σ (estimate)", ax=ax)
    ax.set_xticks(range(len(heads)), labels=list(map(str, heads)))
    for layer, head in data.isnan().nonzero().tolist():
        cover = Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor="white", edgecolor="0.8", hatch="///", zorder=4)
        ax.add_patch(cover)
    return figure


def scanned_growth(group: Group) -> Figure | None:
    """σ of all cells against n, and of the roughest one every value, its power law and its bounds."""
    worst = group.roughest()[0]
    fit = growths(group).get(cell_of(worst))
    if fit is None:
        return None
    figure, (ax,) = new_figure(1, 9.2, 4.8)
    cells = {cell: rows for cell, rows in group.cells.items() if cell[0] == group.main_kind}
    rows = cells.pop(cell_of(worst))
    for others in cells.values():
        ax.plot(*_largest((row["length"], row["value"]) for row in others), color="0.85", linewidth=0.8, zorder=1)
    ceiling = _CEILING * max(row["value"] for some in (rows, *cells.values()) for row in some)
    for name in (distance.name for distance in bound_distances(rows)):
        bounds = [(row["length"], bounds_of(row)[name]) for row in rows if name in bounds_of(row)]
        if max(bounds, key=lambda point: point[1])[1] < ceiling:
            ax.plot(*_largest(bounds), label=f"≤ {literal(name)}", linewidth=1.4, zorder=2)
    ax.plot(*zip(*((row["length"], row["value"]) for row in rows), strict=True), "o", color=ACCENT, ms=5, zorder=4)
    lengths = sorted({row["length"] for row in rows})
    doubt = "" if fit.error is None else f" \\pm {rounded_up(fit.error)}"
    label = f"{literal(place_of(worst))}: ${fit.factor:.3g}\\,n^{{{fit.exponent:.2f}{doubt}}}$"
    ax.plot(lengths, [fit.at(n) for n in lengths], color=ACCENT, linewidth=2, label=label, zorder=3)
    ax.set(yscale="log", xlabel="number of tokens n", ylabel=_SIGMA, title=_titled(group))
    label_places(ax, lengths)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    open_frame(ax)
    plain_legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def distances_figure(group: Group) -> Figure | None:
    """Bound / σ over all cells at the longest length: range and median; bounds far beyond are only named."""
    rows = group.roughest()
    distances = bound_distances(rows)
    near = [one for one in reversed(distances) if one.middle < _FARTHEST]
    if not near:
        return None
    figure, (ax,) = new_figure(1, 7.2, 1.4 + 0.45 * len(near))
    for height, one in enumerate(near):
        ax.plot([one.smallest, one.largest], [height, height], color="0.55", linewidth=2)
        ax.plot([one.middle], [height], "o", color=ACCENT)
        at = (one.middle, height)
        ax.annotate(f"{one.middle:.3g}", at, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    ax.set_yticks(range(len(near)), labels=[literal(one.name) for one in near])
    ax.set_ylim(-0.6, len(near) - 0.2)
    ax.axvline(1, color="black", linewidth=0.8)
    far = ", ".join(f"{literal(one.name)} {one.middle:.1g}" for one in distances if one.middle >= _FARTHEST)
    below = "bound / σ (range over all cells, and median)" + (f"\nbeyond: {far}" if far else "")
    ax.set(xscale="log", xlabel=below, title=f"{_titled(group)}, n = {rows[0]['length']}")
    open_frame(ax)
    return figure


def layers_figure(group: Group) -> Figure | None:
    """σ of blocks and layers by depth at the longest length."""
    n = group.main_length()
    figure, (ax,) = new_figure(1, 7.2, 4.6)
    for kind in group.kinds:
        rows = group.roughest(kind, n)
        points = sorted((row["layer"], row["value"]) for row in rows if row["layer"] is not None and row["value"] > 0)
        if points and kind not in ("head", "model", "logits"):
            ax.plot(*zip(*points, strict=True), "o-", label=literal(kind_name(kind)), markersize=4)
    if not ax.lines:
        return None
    plain_decades(ax)
    ax.set(xlabel="layer", ylabel=_SIGMA, title=f"{_titled(group)}, n = {n}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    open_frame(ax)
    plain_legend(ax)
    return figure


FIGURES: dict[str, Callable[[Group], Figure | None]] = {
    "heads": heads_figure,
    "growth": scanned_growth,
    "bounds": distances_figure,
    "layers": layers_figure,
}
"""Name → the figure of a group, or None where the scan has no numbers for it."""


def _largest(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The largest value at every length."""
    values: dict[int, float] = {}
    for length, value in points:
        values[length] = max(values.get(length, 0.0), value)
    return sorted(values), [values[length] for length in sorted(values)]


def _titled(group: Group) -> str:
    title = f"{group.label} on {group.text}" if group.text else group.label
    return literal(title if len(title) <= _LONGEST_TITLE else title[:_LONGEST_TITLE] + "…")
