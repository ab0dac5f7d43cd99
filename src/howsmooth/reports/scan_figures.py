"""Figures of a scan for papers: heads, growth, distances to the bounds, layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from matplotlib.figure import Figure

from howsmooth._util.validation import validated
from howsmooth.reports.figure_formats import check_formats
from howsmooth.reports.figures import (
    FORMATS,
    bound_ratios,
    depth_lines,
    literal,
    save_figure,
    scanned_growth,
    scanned_heads,
)
from howsmooth.reports.findings import KINDS, bounds_of, distances, growths, main_kind, place_of
from howsmooth.reports.scan_groups import Group, Source, cell_of, groups

_LONGEST_NAME, _LONGEST_TITLE = 60, 100
_FARTHEST = 1e6
"""Bounds whose median ratio to σ is larger are named, not drawn."""


@validated
def write_figures(source: Source, folder: str | PathLike[str], formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write every figure the scan has numbers for, in every format, and say where they are."""
    wanted = check_formats(formats)
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
                written += [folder / f"{stem}-{kind}{suffix}" for suffix in wanted]
                for path in written[-len(wanted) :]:
                    save_figure(figure, path)
    return written


def heads_figure(group: Group) -> Figure | None:
    """σ of every head at the longest length; cells that were not scanned are hatched."""
    rows = group.roughest("head")
    if not rows:
        return None
    values = {(row["layer"], row["head"]): row["value"] for row in rows}
    return scanned_heads(values, f"{_titled(group)}, n = {rows[0]['length']}")


def growth_figure(group: Group) -> Figure | None:
    """σ of all cells against n, the roughest one with its fit and its bounds."""
    what = main_kind(group)
    worst = group.roughest(what)[0]
    fit = growths(group).get(cell_of(worst))
    if fit is None:
        return None
    cells = {cell: rows for cell, rows in group.cells.items() if cell[0] == what}
    rows_of_worst = cells[cell_of(worst)]
    lines = {place_of(rows[0]): [(row["length"], row["value"]) for row in rows] for rows in cells.values()}
    bounds = {
        one.name: [(row["length"], bounds_of(row)[one.name]) for row in rows_of_worst if one.name in bounds_of(row)]
        for one in distances(rows_of_worst)
    }
    return scanned_growth(lines, place_of(worst), fit, bounds, _titled(group))


def distances_figure(group: Group) -> Figure | None:
    """Bound / σ over all cells at the longest length: range and median."""
    rows = group.roughest(main_kind(group))
    near, far = [], {}
    for one in distances(rows):
        if one.middle < _FARTHEST:
            near.append(one)
        else:
            far[one.name] = one.middle
    if not near:
        return None
    ratios = {one.name: (one.smallest, one.middle, one.largest) for one in near}
    return bound_ratios(ratios, far, f"{_titled(group)}, n = {rows[0]['length']}")


def layers_figure(group: Group) -> Figure | None:
    """σ of blocks and layers by depth at the longest length."""
    n = group.main_length(main_kind(group))
    lines = {
        KINDS.get(kind, kind): points
        for kind in group.kinds
        if kind not in ("head", "model", "logits") and (points := sorted(_by_layer(group, kind, n)))
    }
    return depth_lines(lines, f"{_titled(group)}, n = {n}") if lines else None


FIGURES: dict[str, Callable[[Group], Figure | None]] = {
    "heads": heads_figure,
    "growth": growth_figure,
    "bounds": distances_figure,
    "layers": layers_figure,
}
"""Name → the figure of a group, or None where the scan has no numbers for it."""


def _by_layer(group: Group, kind: str, n: int) -> list[tuple[int, float]]:
    rows = group.roughest(kind, n)
    return [(row["layer"], row["value"]) for row in rows if row["layer"] is not None and row["value"] > 0]


def _titled(group: Group) -> str:
    said = f"{group.label} on {group.text}" if group.text else group.label
    return literal(said if len(said) <= _LONGEST_TITLE else said[:_LONGEST_TITLE] + "…")
