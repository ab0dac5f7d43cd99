"""The summary of a scan on one page of the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING
from statistics import median

import rich.box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from howsmooth._util.common import printable, rounded
from howsmooth._util.validation import validated
from howsmooth.reports.findings import (
    bound_distances,
    end_numbers,
    few_digits,
    gaps,
    group_headline,
    growths,
    not_converged,
    path_shares,
    percent,
    place_of,
    token_name,
)
from howsmooth.reports.growth.laws import PowerLaw
from howsmooth.reports.scan_groups import Cell, Group, Source, cell_of, groups
from howsmooth.scans.scan_result import rounding_of

_ROUGHEST = 8


@validated
def summary(source: Source) -> RenderableType:
    """The headline, the roughest cells, the growth and the distances to the bounds of every group, for rich to print.

    >>> from rich.console import Console
    >>> row = {"model": "tiny", "precision": "float32", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 2}
    >>> Console(width=120).print(summary([row]))
    tiny [float32]
    Layer 0, head 0 of tiny [float32] is the only head measured: ...
    """
    return Lines(*(line for group in groups(source) for line in _of_group(group)))


def _of_group(group: Group) -> list[RenderableType]:
    rows, fits = group.roughest(), growths(group)
    on = f", {group.text}" if group.text else ""
    parts: list[RenderableType] = [
        _shown(f"{group.label}{on}", "dim"),
        _shown(group_headline(group), "bold"),
        _roughest(group, rows[:_ROUGHEST], fits),
    ]
    if any(row.get("value_share") is not None for row in rows):
        parts.append(Text("value / score: shares of σ through the values and the scores, in its worst direction"))
    chances = [float(row["confidence"]) for row in rows if row.get("confidence")]
    held = rounding_of(group.main_kind).words(min(chances, default=1.0))
    parts.append(_shown(f"ends: {held}"))
    powers = [fit.exponent for cell, fit in fits.items() if cell[0] == group.main_kind]
    if powers:
        parts.append(Text(f"growth: median n^{median(powers):.2f}, from n^{min(powers):.2f} to n^{max(powers):.2f}"))
    for distance in bound_distances(rows):
        median_ratio, largest = (rounded(ratio, ROUND_CEILING, 3) for ratio in (distance.middle, distance.largest))
        parts.append(_shown(f"{distance.name} / σ: median {median_ratio}, at most {largest}"))
    if missing := gaps(group):
        parts.append(Text(missing, style="bold"))
    for measured, of in ((group, ""), (group.reference, " of the random weights")):
        if measured is not None and (missed := not_converged(measured)):
            note = f"{missed} of {len(measured.rows)} cells{of} did not reach the requested accuracy."
            parts.append(Text(note, style="bold"))
    return [*parts, Text("")]


def _shown(text: str, style: str = "") -> Text:
    """Text with names from files and models, safe to print."""
    return Text(printable(text), style)


def _roughest(group: Group, rows: list[dict], fits: Mapping[Cell, PowerLaw]) -> Table:
    shown = Table(
        "roughest", "σ (estimate)", "ends", "value / score", "growth", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    explained = any(row.get("sink") is not None and row["what"] == "head" for row in rows)
    if explained:
        shown.add_column("sink, attention on it")
    for row in rows:
        share, fit = row.get("value_share"), fits.get(cell_of(row))
        cells = [place_of(row), few_digits(row["value"], 4), ", ".join(filter(None, end_numbers(row)))]
        cells += ["" if share is None else path_shares(share), "" if fit is None else str(fit)]
        if explained:
            name = token_name(group, row).removeprefix("the token ").replace("at position ", "")
            cells.append("" if row.get("sink") is None else f"{name}, {percent(row['sink'] / row['length'])}")
        shown.add_row(*map(_shown, cells))
    return shown
