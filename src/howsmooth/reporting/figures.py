"""Figures of a scan for papers: heads, growth, distances to the bounds, layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatter, MaxNLocator

from howsmooth.checks import door
from howsmooth.errors import InvalidInput
from howsmooth.figures import FORMATS, heads_heatmap, literal, new_figure, save_figure
from howsmooth.reporting.findings import KINDS, bounds_of, distances, growths, main_kind, place_of
from howsmooth.reporting.source import Group, Source, cell_of, groups
from howsmooth.worstcase.laws import rounded_up

_ACCENT, _GREY = "#b23c0c", "0.55"
_DECADES = 4
"""Bounds that lie further above all that is measured are left out: they would flatten the rest."""
_LONGEST_NAME, _LONGEST_TITLE = 60, 100
_FARTHEST = 1e6
"""Bounds whose median ratio to σ is larger are named, not drawn."""


@door
def write_figures(source: Source, folder: str | PathLike[str], formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write every figure the scan has numbers for, in every format, and say where they are."""
    wanted = check_formats(formats)
    found = groups(source)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for place, group in enumerate(found):
        name = "".join(letter if letter.isalnum() else "-" for letter in group.model)[:_LONGEST_NAME]
        stem = name if [other.model for other in found].count(group.model) == 1 else f"{name}-{place + 1}"
        for kind, draw in FIGURES.items():
            figure = draw(group)
            if figure is not None:
                written += [folder / f"{stem}-{kind}{suffix}" for suffix in wanted]
                for path in written[-len(wanted) :]:
                    save_figure(figure, path)
    return written


def check_formats(formats: Sequence[str]) -> list[str]:
    """The formats as file endings, or a refusal before any work is done.

    >>> check_formats(["pdf", ".png"])
    ['.pdf', '.png']
    """
    wanted = ["." + kind.strip().lower().removeprefix(".") for kind in formats]
    if wrong := [kind for kind in wanted if kind not in FORMATS]:
        raise InvalidInput(f"{wrong[0]!r} is no format for figures: choose from {', '.join(FORMATS)}.")
    return wanted


def heads_figure(group: Group) -> Figure | None:
    """σ of every head at the longest length; cells that were not scanned are hatched."""
    rows = group.roughest("head")
    if not rows:
        return None
    layers, heads = sorted({row["layer"] for row in rows}), sorted({row["head"] for row in rows})
    values = torch.zeros(len(layers), len(heads), dtype=torch.float64)
    measured = torch.zeros_like(values, dtype=torch.bool)
    for row in rows:
        at = layers.index(row["layer"]), heads.index(row["head"])
        values[at], measured[at] = row["value"], True
    figure, (ax,) = new_figure(1, max(6.8, 0.5 * len(heads) + 2), 1.6 + 0.3 * len(layers))
    title = f"{_titled(group)}, n = {rows[0]['length']}"
    heads_heatmap(values, layers=[str(layer) for layer in layers], title=title, quantity="σ (estimate)", ax=ax)
    ax.set_xticks(range(len(heads)), labels=[str(head) for head in heads])
    for layer, head in (~measured).nonzero().tolist():
        cover = Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor="white", edgecolor="0.8", hatch="///", zorder=4)
        ax.add_patch(cover)
    return figure


def growth_figure(group: Group) -> Figure | None:
    """σ of all cells against n, the roughest one with its fit and its bounds."""
    what = main_kind(group)
    worst = group.roughest(what)[0]
    fit = growths(group).get(cell_of(worst))
    if fit is None:
        return None
    figure, (ax,) = new_figure(1, 9.2, 4.8)
    lines = {cell: group.of(cell) for cell in {cell_of(row) for row in group.rows if row["what"] == what}}
    for cell, rows in lines.items():
        if cell != cell_of(worst):
            ax.plot(*_largest([(row["length"], row["value"]) for row in rows]), color="0.85", linewidth=0.8, zorder=1)
    own = lines[cell_of(worst)]
    lengths = sorted({row["length"] for row in own})
    ceiling = 10**_DECADES * max(row["value"] for rows in lines.values() for row in rows)
    for name in [found.name for found in distances(own)]:
        at, bound = _largest([(row["length"], bounds_of(row)[name]) for row in own if name in bounds_of(row)])
        if max(bound) < ceiling:
            ax.plot(at, bound, label=f"≤ {literal(name)}", linewidth=1.4, zorder=2)
    ax.plot([row["length"] for row in own], [row["value"] for row in own], "o", color=_ACCENT, markersize=5, zorder=4)
    doubt = "" if fit.error is None else f" \\pm {rounded_up(fit.error)}"
    label = f"{literal(place_of(worst))}: ${fit.factor:.3g}\\,n^{{{fit.exponent:.2f}{doubt}}}$"
    ax.plot(lengths, [fit.factor * n**fit.exponent for n in lengths], color=_ACCENT, linewidth=2, label=label, zorder=3)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(lengths, labels=[str(n) for n in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="number of tokens n", ylabel="local Lipschitz constant σ (estimate)", title=_titled(group))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def distances_figure(group: Group) -> Figure | None:
    """Bound / σ over all cells at the longest length: range and median."""
    rows = group.roughest(main_kind(group))
    every = distances(rows)
    found = [one for one in every if one.middle < _FARTHEST]
    if not found:
        return None
    beyond = ", ".join(f"{literal(one.name)} {one.middle:.1g}" for one in every if one not in found)
    figure, (ax,) = new_figure(1, 7.2, 1.4 + 0.45 * len(found))
    for place, one in enumerate(reversed(found)):
        ax.plot([one.smallest, one.largest], [place, place], color=_GREY, linewidth=2)
        ax.plot([one.middle], [place], "o", color=_ACCENT)
        ax.annotate(
            f"{one.middle:.3g}", (one.middle, place), (0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    ax.set_yticks(range(len(found)), labels=[literal(one.name) for one in reversed(found)])
    ax.set_ylim(-0.6, len(found) - 0.2)
    ax.set_xscale("log")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set(
        xlabel="bound / σ (range over all cells, and median)" + (f"\nbeyond: {beyond}" if beyond else ""),
        title=f"{_titled(group)}, n = {rows[0]['length']}",
    )
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def layers_figure(group: Group) -> Figure | None:
    """σ of blocks and layers by depth at the longest length."""
    lines = {kind: sorted(_by_layer(group, kind)) for kind in group.kinds if kind not in ("head", "model", "logits")}
    if not any(lines.values()):
        return None
    figure, (ax,) = new_figure(1, 7.2, 4.6)
    for kind, points in lines.items():
        if points:
            ax.plot(*zip(*points, strict=True), "o-", label=literal(KINDS.get(kind, kind)), markersize=4)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    title = f"{_titled(group)}, n = {group.main_length(main_kind(group))}"
    ax.set(xlabel="layer", ylabel="local Lipschitz constant σ (estimate)", title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Group], Figure | None]] = {
    "heads": heads_figure,
    "growth": growth_figure,
    "bounds": distances_figure,
    "layers": layers_figure,
}
"""Name → the figure of a group, or None where the scan has no numbers for it."""


def _by_layer(group: Group, kind: str) -> list[tuple[int, float]]:
    rows = group.roughest(kind, group.main_length(main_kind(group)))
    return [(row["layer"], row["value"]) for row in rows if row["layer"] is not None and row["value"] > 0]


def _largest(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The largest number at every length."""
    found: dict[int, float] = {}
    for length, value in points:
        found[length] = max(found.get(length, 0.0), value)
    return sorted(found), [found[n] for n in sorted(found)]


def _titled(group: Group) -> str:
    said = f"{group.label} on {group.text}" if group.text else group.label
    return literal(said if len(said) <= _LONGEST_TITLE else said[:_LONGEST_TITLE] + "…")
