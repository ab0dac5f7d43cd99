"""The numbers of a report, packed for the page: in columns and few digits, ends and bounds rounded outwards."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from math import isfinite
from typing import Any

import numpy as np

from howsmooth._util.common import rounded
from howsmooth.reports.findings import (
    bounds_of,
    group_headline,
    growth_sentences,
    growths,
    methods,
    readable,
    rounding_of,
)
from howsmooth.reports.scan_groups import Group, Row, kind_name, place_of_row

_DIGITS = 5
_SHARE_CHARACTERS = 1_500_000
"""Maximum number of characters for the shares of tokens in one page."""
_TOKENS = 100_000
"""Maximum number of tokens of the text that one group shows."""
_ROWS = 16_000
"""Maximum number of cells in one page; the headline, growth and counts are those of all cells."""
_FIRST_HEADS = 20
"""Number of the roughest heads whose shares come before all others."""
_STEPS = 65535
_ENDS = {"lower": ROUND_FLOOR, "upper": ROUND_CEILING}
_NUMBERS = ("value", *_ENDS, "relative", "radius", "value_path", "score_path", "value_share", "sink", "entropy")


def group_data(scanned: Sequence[Group]) -> list[dict[str, Any]]:
    """One object per group, ready for JSON."""
    shown = [shown_rows(group, _ROWS // len(scanned)) for group in scanned]
    packed = [_pack(group, rows) for group, rows in zip(scanned, shown, strict=True)]
    for group, data, places in zip(scanned, packed, _chosen_shares(scanned, shown), strict=True):
        data["energies"] = {_name(place): pack_shares(share) for place, share in group.energies.several(places).items()}
    return packed


def shown_rows(group: Group, count: int) -> list[Row]:
    """All rows, or this many of a large scan: of every cell at every length the roughest windows first."""
    if len(group.rows) <= count:
        return group.rows
    main, ranks = group.main_length(), group.ranks
    order = sorted(group.rows, key=lambda row: (ranks[id(row)], row["length"] != main, -row["value"]))
    chosen = {id(row) for row in order[:count]}
    return [row for row in group.rows if id(row) in chosen]


def _chosen_shares(scanned: Sequence[Group], shown: Sequence[Sequence[Row]]) -> list[list[tuple[Any, ...]]]:
    """Keys of the shares of tokens that fit into the page, for every group.

    The roughest heads at every length come first, then all heads in their roughest window, long windows first, then
    their other windows. Shares that do not fit are skipped, and shorter ones may still fit.
    """
    sets: dict[tuple[int, int, int], list[tuple[Any, ...]]] = {}
    for at, (group, rows) in enumerate(zip(scanned, shown, strict=True)):
        heads = [row for row in rows if row["what"] == "head" and place_of_row(row) in group.energies]
        for row in sorted(heads, key=lambda row: -row["value"]):
            rank, length = group.ranks[id(row)], row["length"]
            first = sets.setdefault((-1, -length, at), [])
            several = sets.setdefault((rank, -length, at), []) if rank or len(first) == _FIRST_HEADS else first
            several.append(place_of_row(row))
    room, chosen = _SHARE_CHARACTERS, [list[tuple[Any, ...]]() for _ in scanned]
    for (_, length, at), places in sorted(sets.items()):
        size = len(places) * 4 * -(2 * length // 3)  # characters of base64, two bytes a token
        if size <= room:
            room -= size
            chosen[at] += places
    return chosen


def pack_shares(shares: Sequence[float]) -> str:
    """Numbers between 0 and 1 to within 8·10⁻⁶, in 16 bits each, as base64.

    >>> pack_shares([0.0, 1.0])
    'AAD//w=='
    """
    steps = np.rint(np.clip(np.asarray(shares, dtype=float), 0, 1) * _STEPS).astype("<u2")
    return base64.b64encode(steps.tobytes()).decode()


def _pack(group: Group, rows: Sequence[Row]) -> dict[str, Any]:
    bounds = [bounds_of(row) for row in rows]
    names = list(dict.fromkeys(name for of_row in bounds for name in of_row))
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows]
        for name in ("what", "layer", "head", "length", "window", "sink_token", "window_start", "confidence")
    }
    for name in _NUMBERS:
        columns[name] = [_digits(row.get(name), _ENDS.get(name, ROUND_HALF_EVEN)) for row in rows]
    columns["converged"] = [row.get("converged") != 0 for row in rows]
    return {
        "model": group.model,
        "precision": group.precision,
        "label": group.label,
        "text": group.text,
        "headline": group_headline(group),
        "kinds": {kind: kind_name(kind) for kind in group.kinds},
        "rounding": {kind: rounding_of(kind).words() for kind in group.kinds},
        "length": group.main_length(),
        "columns": {name: _shortened(column) for name, column in columns.items()},
        "bounds": {name: [_digits(of_row.get(name), ROUND_CEILING) for of_row in bounds] for name in names},
        "growth": {
            _name(cell): [_digits(number) for number in (fit.exponent, fit.error, fit.factor)]
            for cell, fit in growths(group).items()
        },
        "laws": {_name(cell): sentence for cell, sentence in growth_sentences(group).items()},
        "tokens": {_name(window): readable(tokens) for window, tokens in _tokens(group, rows).items()},
        "methods": methods(group) + _not_shown(group, rows),
    }


def _tokens(group: Group, rows: Sequence[Row]) -> dict[tuple[Any, ...], list[str]]:
    """The tokens of the shown windows, windows with most rows first, up to the maximum."""
    chosen, room = set(), _TOKENS
    for window, _ in Counter(place_of_row(row)[2:] for row in rows).most_common():
        size = len(group.tokens.get(window, ()))
        if size <= room:
            chosen.add(window)
            room -= size
    return {window: tokens for window, tokens in group.tokens.items() if window in chosen}


def _not_shown(group: Group, rows: Sequence[Row]) -> list[tuple[str, str]]:
    if len(rows) == len(group.rows):
        return []
    note = f"{len(rows)} of {len(group.rows)}: of every cell at every length the roughest windows; the store has all"
    return [("cells on this page", note)]


def _name(key: Sequence[Any]) -> str:
    """A cell or a window as a key of JSON."""
    return "/".join("" if part is None else str(part) for part in key)


def _shortened(column: list[Any]) -> Any:
    """A constant column is written once."""
    first = column[0]
    return {"all": first} if all(entry == first for entry in column) else column


def _digits(x: float | None, way: str = ROUND_HALF_EVEN) -> float | None:
    return None if x is None or not isfinite(x) else float(rounded(x, way, _DIGITS))
