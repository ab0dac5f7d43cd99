"""A scan in pictures: its heads, growth with n, distances to the bounds, layers by depth. All take plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.head_figures import heads_heatmap
from howsmooth.reports.figures.style import ACCENT, literal, new_figure, open_frame, plain_decades
from howsmooth.reports.growth import PowerLaw
from howsmooth.reports.growth.laws import rounded_up

Points = Sequence[tuple[float, float]]
"""Pairs of a place on the axis below and a value."""
_SIGMA = "local Lipschitz constant σ (estimate)"
_DECADES = 4
"""Bounds that lie further above all that is measured are left out: they would flatten the rest."""


@validated
def scanned_heads(values: Mapping[tuple[int, int], float], title: str) -> Figure:
    """σ by (layer, head); cells that were not scanned are hatched.

    >>> len(scanned_heads({(0, 0): 1.0, (0, 1): 2.0, (3, 1): 3.0}, "three of four").axes[0].patches)  # and the frame
    2
    """
    layers, heads = (sorted(set(places)) for places in zip(*values, strict=True))
    data = torch.zeros(len(layers), len(heads), dtype=torch.float64)
    measured = torch.zeros_like(data, dtype=torch.bool)
    for (layer, head), value in values.items():
        at = layers.index(layer), heads.index(head)
        data[at], measured[at] = value, True
    figure, (ax,) = new_figure(1, max(6.8, 0.5 * len(heads) + 2), 1.6 + 0.3 * len(layers))
    heads_heatmap(data, layers=[str(layer) for layer in layers], title=title, quantity="σ (estimate)", ax=ax)
    ax.set_xticks(range(len(heads)), labels=[str(head) for head in heads])
    for layer, head in (~measured).nonzero().tolist():
        cover = Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor="white", edgecolor="0.8", hatch="///", zorder=4)
        ax.add_patch(cover)
    return figure


@validated
def scanned_growth(
    cells: Mapping[str, Points], worst: str, fit: PowerLaw, bounds: Mapping[str, Points], title: str
) -> Figure:
    """σ of all cells against n, and of the worst one every value, its power law and its bounds."""
    figure, (ax,) = new_figure(1, 9.2, 4.8)
    for name, points in cells.items():
        if name != worst:
            ax.plot(*_largest(points), color="0.85", linewidth=0.8, zorder=1)
    ceiling = 10**_DECADES * max(value for points in cells.values() for _, value in points)
    for name, points in bounds.items():
        at, bound = _largest(points)
        if max(bound) < ceiling:
            ax.plot(at, bound, label=f"≤ {literal(name)}", linewidth=1.4, zorder=2)
    ax.plot(*zip(*cells[worst], strict=True), "o", color=ACCENT, markersize=5, zorder=4)
    lengths = sorted({n for n, _ in cells[worst]})
    doubt = "" if fit.error is None else f" \\pm {rounded_up(fit.error)}"
    label = f"{literal(worst)}: ${fit.factor:.3g}\\,n^{{{fit.exponent:.2f}{doubt}}}$"
    ax.plot(lengths, [fit.at(n) for n in lengths], color=ACCENT, linewidth=2, label=label, zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel=_SIGMA, title=title)
    ax.set_xticks(lengths, labels=[str(n) for n in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    open_frame(ax)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@validated
def bound_ratios(ratios: Mapping[str, tuple[float, float, float]], beyond: Mapping[str, float], title: str) -> Figure:
    """Smallest, median and largest bound / σ of every bound; those far beyond are named with their median."""
    figure, (ax,) = new_figure(1, 7.2, 1.4 + 0.45 * len(ratios))
    names = list(ratios)[::-1]
    for height, name in enumerate(names):
        smallest, middle, largest = ratios[name]
        ax.plot([smallest, largest], [height, height], color="0.55", linewidth=2)
        ax.plot([middle], [height], "o", color=ACCENT)
        ax.annotate(f"{middle:.3g}", (middle, height), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    ax.set_yticks(range(len(names)), labels=[literal(name) for name in names])
    ax.set_ylim(-0.6, len(names) - 0.2)
    ax.axvline(1, color="black", linewidth=0.8)
    far = ", ".join(f"{literal(name)} {middle:.1g}" for name, middle in beyond.items())
    below = "bound / σ (range over all cells, and median)" + (f"\nbeyond: {far}" if far else "")
    ax.set(xscale="log", xlabel=below, title=title)
    open_frame(ax)
    return figure


@validated
def depth_lines(lines: Mapping[str, Points], title: str) -> Figure:
    """σ against the layer, a line for each kind of part."""
    if not lines:
        raise InvalidInput("there is nothing to draw: give at least one line.")
    figure, (ax,) = new_figure(1, 7.2, 4.6)
    for name, points in lines.items():
        ax.plot(*zip(*points, strict=True), "o-", label=literal(name), markersize=4)
    plain_decades(ax)
    ax.set(xlabel="layer", ylabel=_SIGMA, title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    open_frame(ax)
    ax.legend(frameon=False, fontsize=8)
    return figure


def _largest(points: Points) -> tuple[list[float], list[float]]:
    """The largest value at every place."""
    values: dict[float, float] = {}
    for x, value in points:
        values[x] = max(values.get(x, 0.0), value)
    return sorted(values), [values[x] for x in sorted(values)]
