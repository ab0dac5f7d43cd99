"""L ≤ Lip ≤ U in a picture: against the number of tokens, and against the size of the set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import light_grid, new_figure
from howsmooth.search.sandwich_search import SandwichCell

_CURVES, _TICKS = 10, 8
"""Maximum number of curves in the legend, and of labelled ticks."""


def sandwich_figure(cells: Sequence[SandwichCell]) -> Figure:
    """Both ends on logarithmic axes, a shaded band between them: the constant lies in the band.

    The left panel is against n, with a band for each set; the right one against R or ε, with a band for each n. A panel
    whose axis would have a single point is omitted. Upper ends that overflow are not drawn.

    >>> import torch, howsmooth as hs
    >>> from howsmooth.search import sandwich
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> figure = sandwich_figure(sandwich(head, [2, 4], over=[hs.sets.Ball(1.0), hs.sets.Ball(2.0)], starts=1, steps=5))
    >>> [ax.get_xlabel() for ax in figure.axes]
    ['number of tokens n', 'radius R of the tokens']
    """
    if not cells:
        raise InvalidInput("there is nothing to draw: no search has ended yet.")
    near = cells[0].centre is not None
    lengths, sizes = {cell.n for cell in cells}, {cell.size for cell in cells} - {None}
    panels: list[tuple[str, Callable[[SandwichCell], Any], Callable[[SandwichCell], str]]] = []
    if len(lengths) > 1 or len(sizes) < 2:
        panels.append(("number of tokens n", lambda cell: cell.n, lambda cell: str(cell.over)))
    if len(sizes) > 1:
        name = "distance ε that tokens may move" if near else "radius R of the tokens"
        panels.append((name, lambda cell: cell.size, lambda cell: f"n = {cell.n}"))
    figure, axes = new_figure(len(panels), 6.8, 5.2)
    for ax, (label, x_of, group) in zip(axes, panels, strict=True):
        _draw(ax, cells, x_of, group)
        ax.set(xlabel=label, ylabel=f"Lipschitz constant in the {_norm(cells[0])}, output per input")
    figure.suptitle("L ≤ Lip ≤ U: the worst input found, and the best theorem known", fontsize=11)
    return figure


def _draw(
    ax: Axes, cells: Sequence[SandwichCell], x_of: Callable[[SandwichCell], Any], group: Callable[[SandwichCell], str]
) -> None:
    groups: dict[str, list[SandwichCell]] = {}
    for cell in cells:
        groups.setdefault(group(cell), []).append(cell)
    colours = colormaps["viridis"]
    legend: list[Any] = []
    for number, (name, members) in enumerate(groups.items()):
        colour = colours(0.9 * number / max(1, len(groups) - 1))
        members = sorted((cell for cell in members if cell.lower > 0), key=x_of)
        bounded = [cell for cell in members if cell.upper is not None and not cell.upper.vacuous]
        ax.plot([x_of(cell) for cell in members], [cell.lower for cell in members], "o--", color=colour, markersize=4)
        highs = [cell.upper.value for cell in bounded if cell.upper is not None]
        at = [x_of(cell) for cell in bounded]
        ax.plot(at, highs, "-" if len(at) > 1 else "_", color=colour, linewidth=1.6)
        ax.fill_between(at, [cell.lower for cell in bounded], highs, color=colour, alpha=0.12, linewidth=0)
        if number < _CURVES:
            legend.append(Patch(color=colour, label=name))
    ax.set(xscale="log", yscale="log")
    places = sorted({x_of(cell) for cell in cells})
    if len(places) <= _TICKS:
        ax.set_xticks(places, labels=[f"{at:.4g}" for at in places])
        ax.xaxis.set_minor_locator(NullLocator())
    light_grid(ax)
    legend.append(Line2D([], [], color="black", linestyle="-", label="U: upper bound, a theorem"))
    legend.append(Line2D([], [], color="black", linestyle="--", marker="o", markersize=4, label="L: reached (witness)"))
    ax.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False, fontsize=8.5)


def _norm(cell: SandwichCell) -> str:
    return "2-norm" if cell.witness.norm == 2 else "∞-norm"
