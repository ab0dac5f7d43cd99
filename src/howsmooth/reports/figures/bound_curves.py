"""Bounds in pictures: all of them against the number of tokens; and L ≤ Lip ≤ U, against n and the size of the set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor, nn

from howsmooth._util.validation import validated
from howsmooth.bounds.bound_table import Table, measurements_at, table
from howsmooth.bounds.catalogue import SCOPES, get
from howsmooth.bounds.question_setting import Setting, setting
from howsmooth.bounds.token_set_bounds import crossover
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import axes, label_places, light_grid, new_figure, plain_legend
from howsmooth.search.sandwich_search import SandwichCell
from howsmooth.sets import Around, Point
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.near_sets import Over

_DECADES = 6
"""Curves that end this far above the smallest upper bound are named, not drawn: they would flatten the others."""
_MEASURED = 512
"""Maximum number of random tokens that are measured."""
_GAP = 0.045
_LEGEND, _LABELLED = 10, 8
"""Maximum number of bands in the legend, and of labelled ticks."""
Label = tuple[str, tuple[float, float] | None, Any]
_KINDS = {"upper": ("-", "upper bound"), "lower": ("--", "lower bound"), "measured": ("o-", "estimate")}
"""Kind of a curve → style of its line, and its name in the legend."""


@dataclass(frozen=True)
class Curve:
    """A bound, or measured values, at several n."""

    kind: str
    points: tuple[tuple[float, float], ...]

    @property
    def end(self) -> tuple[float, float]:
        """The point at the largest n."""
        return self.points[-1]


@validated
def bounds_against_n(
    attention: nn.Module,
    *,
    lengths: Sequence[int] | None = None,
    over: Over | None = None,
    seed: int = 0,
    ax: Axes | None = None,
) -> Figure:
    """Every 2-norm bound that applies, and measured values, against n, on logarithmic axes.

    The first n tokens of x are measured; without x, random tokens on the boundary of the set, up to 512 of them.

    Args:
        lengths: the n; by default powers of two, up to the length of x or to 4096.
        attention, over, seed: as in `howsmooth.bounds.table`. The set of tokens stays the same for every n.
        ax: where to draw; a new figure without.

    >>> import howsmooth as hs
    >>> figure = bounds_against_n(hs.SelfAttention.random(4), lengths=[2, 8], over=hs.sets.Ball(1.0))
    >>> figure.axes[0].get_xscale()
    'log'
    """
    where = setting(attention, over=over)
    x = where.x
    if where.tokens is None:
        raise InvalidInput("a picture of bounds against n needs a set (over): a Ball, a LayerNorm or an input.")
    places = _lengths(lengths, x)
    crossings = _crossovers(where, places[-1])
    if x is None:  # the bend of the unified bound is drawn where it is
        places = sorted({*places, *(round(n) for n in crossings if places[0] < n < places[-1])})
    curves = _curves({n: _at(where, n, seed) for n in places})
    if x is None and (points := _at_random(where, places, seed)):
        curves["measured"] = Curve("measured", points)
    figure, ax = axes(ax, 9.6, 5.6)
    _draw(ax, curves, "random tokens of the set" if x is None else "the first n tokens of the input")
    ax.set(
        xlabel="number of tokens n",
        ylabel="Lipschitz constant in the 2-norm, output per input",
        title=f"Bounds for tokens of radius {where.tokens.radius:.4g} ({where.tokens.origin})",
    )
    _mark_crossover(ax, crossings)
    return figure


def _lengths(lengths: Sequence[int] | None, x: Tensor | None) -> list[int]:
    longest = 4096 if x is None else len(x)
    if lengths is None:
        lengths = [*(2**power for power in range(1, 13) if 2**power < longest), longest]
    rising = sorted(set(lengths))
    if len(rising) < 2 or rising[0] < 1 or math.isinf(rising[-1]) or (x is not None and rising[-1] > longest):
        raise InvalidInput(
            f"a picture needs at least two lengths, whole and not above those of the input, got {rising}."
        )
    return rising


def _at(where: Setting, n: int, seed: int) -> Table:
    if where.x is None:
        return table(where.attention, n=n, over=where.tokens, norm=2)
    x, within = where.x[:n], where.tokens
    near = Point(x, within=within) if where.eps is None else Around(x, where.eps, within=within)
    return table(where.attention, over=near, norm=2, seed=seed)


def _curves(tables: Mapping[int, Table]) -> dict[str, Curve]:
    """Name → its curve; bounds that agree everywhere share one, since one line would hide the other."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for n, rows in tables.items():
        for row in rows:
            near = row.kind != "measured" and row.scope in ("point", "neighbourhood")
            name = f"{row.name} ({SCOPES[row.scope]})" if near else row.name
            if row.value > 0:  # logarithmic axes show no other
                points.setdefault((row.kind, name), []).append((n, row.value))
    names: dict[Curve, list[str]] = {}
    for (kind, name), values in points.items():
        names.setdefault(Curve(kind, tuple(values)), []).append(name)
    return {" = ".join(sorted(same)): curve for curve, same in names.items()}


def boundary_tokens(tokens: Ellipsoid, seed: int) -> Tensor:
    """512 random tokens on the boundary of a set."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(_MEASURED, tokens.axes.shape[1], generator=generator, dtype=torch.float64)
    return tokens.at(z / z.norm(dim=-1, keepdim=True))


def _at_random(where: Setting, places: Sequence[int], seed: int) -> tuple[tuple[float, float], ...]:
    """σ at random tokens on the boundary of the set, at lengths up to their number."""
    assert where.tokens is not None
    x = boundary_tokens(where.tokens, seed)
    measured = {n: float(measurements_at(replace(where, x=x[:n]), [2], seed=seed)[2]) for n in places if n <= len(x)}
    return tuple(point for point in measured.items() if point[1] > 0)


def _draw(ax: Axes, curves: dict[str, Curve], seen: str) -> None:
    smallest = min((curve.end[1] for curve in curves.values() if curve.kind == "upper"), default=math.inf)
    colours = colormaps["tab20" if len(curves) > 11 else "tab10"]
    labels: list[Label] = []
    for number, (name, curve) in enumerate(sorted(curves.items(), key=lambda item: (item[1].end[1], item[0]))):
        colour = "black" if curve.kind == "measured" else colours(number % colours.N)
        if curve.end[1] > smallest * 10**_DECADES:
            labels.append((f"↑ {name}: {_power(curve.end[1])}", None, colour))
        else:
            style, _ = _KINDS[curve.kind]
            ax.plot(*zip(*curve.points, strict=True), style, color=colour, linewidth=1.6, markersize=4)
            labels.append((f"{name}: {seen}" if curve.kind == "measured" else name, curve.end, colour))
    ax.set(xscale="log", yscale="log")
    light_grid(ax)
    for kind, (style, word) in _KINDS.items():
        if any(curve.kind == kind for curve in curves.values()):
            ax.plot([], [], style, color="black", markersize=4, label=word)
    plain_legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3)
    _label_ends(ax, labels)


def _label_ends(ax: Axes, labels: Sequence[Label]) -> None:
    """Names to the right of the frame, given from the lowest to the highest and moved apart where they would touch."""
    low, high = (math.log(limit) for limit in ax.get_ylim())

    def height(label: Label) -> float:
        return 1.0 if label[1] is None else (math.log(label[1][1]) - low) / (high - low)

    for (name, end, colour), shifted in zip(labels, spaced([height(label) for label in labels], _GAP), strict=True):
        style: dict[str, Any] = {"color": colour, "va": "center", "fontsize": 8.5, "annotation_clip": False}
        if end is not None:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)}
            style |= {"arrowprops": line | {"shrinkA": 1, "shrinkB": 0}}
        ax.annotate(name, end or ax.get_xlim(), (1.03, shifted), textcoords=ax.transAxes, **style)


def spaced(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights moved apart to at least ``gap``: upwards, and down again from 1 where they would pass it.

    >>> [round(height, 2) for height in spaced([0.1, 0.12, 0.5, 1.0, 1.0], gap=0.05)]
    [0.1, 0.15, 0.5, 0.95, 1.0]
    """
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = max(1.0, gap * (len(placed) - 1))
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _crossovers(where: Setting, n: int) -> list[float]:
    """The n from which the mean-field form is below √n, head by head; empty where it does not hold."""
    where = replace(where, n=n)
    return [] if get("howsmooth.unified").refusal(where) else crossover(where.numbers(True)).tolist()


def _mark_crossover(ax: Axes, at: Sequence[float]) -> None:
    """A line at every crossover inside the frame."""
    left, right = ax.get_xlim()
    inside = sorted(n for n in at if left <= n <= right)
    for n in inside:
        ax.axvline(n, color="0.6", linestyle=":", linewidth=1)
    if inside:
        heads = "" if len(at) == 1 else f" ({len(inside)} of {len(at)} heads)"
        style: dict[str, Any] = {"color": "0.4", "fontsize": 8, "ha": "center", "va": "bottom"}
        middle = math.prod(inside) ** (1 / len(inside))
        ax.annotate(f"$n = e^{{2a}}${heads}", (middle, 1.0), xycoords=ax.get_xaxis_transform(), **style)
        ax.set_title(ax.get_title(), pad=16)


def _power(value: float) -> str:
    return "> 1e308" if math.isinf(value) else f"1e{math.floor(math.log10(value))}"


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
    panels = {}
    if len(lengths) > 1 or len(sizes) < 2:
        panels["n"] = "number of tokens n"
    if len(sizes) > 1:
        panels["size"] = "distance ε that tokens may move" if near else "radius R of the tokens"
    figure, axes = new_figure(len(panels), 6.8, 5.2)
    norm = "2" if cells[0].witness.norm == 2 else "∞"
    for ax, (attribute, label) in zip(axes, panels.items(), strict=True):
        _draw_bands(ax, cells, attribute)
        ax.set(xlabel=label, ylabel=f"Lipschitz constant in the {norm}-norm, output per input")
    figure.suptitle("L ≤ Lip ≤ U: the worst input found, and the best theorem known", fontsize=11)
    return figure


def _draw_bands(ax: Axes, cells: Sequence[SandwichCell], attribute: str) -> None:
    """Bands against n, one for each set; or against the size of the set, one for each n."""
    x_of = attrgetter(attribute)
    groups: dict[str, list[SandwichCell]] = {}
    for cell in cells:
        groups.setdefault(str(cell.over) if attribute == "n" else f"n = {cell.n}", []).append(cell)
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
        if number < _LEGEND:
            legend.append(Patch(color=colour, label=name))
    ax.set(xscale="log", yscale="log")
    places = sorted({x_of(cell) for cell in cells})
    if len(places) <= _LABELLED:
        label_places(ax, places)
    light_grid(ax)
    legend.append(Line2D([], [], color="black", linestyle="-", label="U: upper bound, a theorem"))
    legend.append(Line2D([], [], color="black", linestyle="--", marker="o", markersize=4, label="L: reached (witness)"))
    plain_legend(ax, handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
