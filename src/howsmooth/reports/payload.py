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
from howsmooth.reports.findings import bounds_of, group_headline, growth_sentences, growths, methods
from howsmooth.reports.readable_tokens import readable
from howsmooth.reports.scan_groups import KINDS, Group, Row
from howsmooth.scans.scan_result import rounding_of

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
_NUMBERS: dict[str, str] = {
    "value": ROUND_HALF_EVEN,
    "lower": ROUND_FLOOR,
    "upper": ROUND_CEILING,
    **dict.fromkeys(
        ("relative", "radius", "value_path", "score_path", "value_share", "sink", "entropy"), ROUND_HALF_EVEN
    ),
}


def group_data(scanned: Sequence[Group]) -> list[dict[str, Any]]:
    """One object per group, ready for JSON."""
    shown = [shown_rows(group, _ROWS // len(scanned)) for group in scanned]
    packed = [_pack(group, rows) for group, rows in zip(scanned, shown, strict=True)]
    for number, chosen in enumerate(_chosen_shares(scanned, shown)):
        several = getattr(scanned[number].energies, "several", None)
        shares = {key: scanned[number].energies[key] for key in chosen} if several is None else several(chosen)
        packed[number]["energies"] = {_name(key): pack_shares(share) for key, share in shares.items()}
    return packed


def shown_rows(group: Group, count: int) -> list[Row]:
    """All rows, or this many of a large scan: of every cell at every length the roughest windows first."""
    if len(group.rows) <= count:
        return group.rows
    main, ranks = group.main_length(group.kinds[0]), group.ranks
    order = sorted(group.rows, key=lambda row: (ranks[id(row)], row["length"] != main, -row["value"]))
    chosen = {id(row) for row in order[:count]}
    return [row for row in group.rows if id(row) in chosen]


def _chosen_shares(scanned: Sequence[Group], shown: Sequence[Sequence[Row]]) -> list[list[tuple[Any, ...]]]:
    """Keys of the shares of tokens that fit into the page, for every group.

    The roughest heads at every length come first, then all heads in their roughest window, long windows first, then
    their other windows. Shares that do not fit are skipped, and shorter ones may still fit.
    """
    sets: dict[tuple[int, int, int], list[tuple[int, Row]]] = {}
    for at, rows in enumerate(shown):
        ranks = scanned[at].ranks
        heads = [row for row in rows if row["what"] == "head" and _cell_key(row) in scanned[at].energies]
        for row in sorted(heads, key=lambda row: -row["value"]):
            sets.setdefault((ranks[id(row)], -row["length"], at), []).append((at, row))
    first = [rows[:_FIRST_HEADS] for key, rows in sorted(sets.items()) if key[0] == 0]
    rest = [rows[_FIRST_HEADS:] if key[0] == 0 else rows for key, rows in sorted(sets.items())]
    room, chosen = _SHARE_CHARACTERS, [list[tuple[Any, ...]]() for _ in scanned]
    for several in [*first, *rest]:
        size = sum(4 * -(-2 * row["length"] // 3) for _, row in several)  # characters of base64, two bytes a token
        if size <= room:
            room -= size
            for at, row in several:
                chosen[at].append(_cell_key(row))
    return chosen


def _cell_key(row: Row) -> tuple[Any, ...]:
    return row.get("layer"), row.get("head"), row["length"], row["window"]


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
    columns |= {name: [_digits(row.get(name), way) for row in rows] for name, way in _NUMBERS.items()}
    columns["converged"] = [row.get("converged") in (None, True, 1) for row in rows]
    return {
        "model": group.model,
        "precision": group.precision,
        "label": group.label,
        "text": group.text,
        "headline": group_headline(group),
        "kinds": {kind: KINDS.get(kind, kind) for kind in group.kinds},
        "rounding": {kind: rounding_of(kind).words() for kind in group.kinds},
        "length": group.main_length(group.kinds[0]),
        "columns": {name: _shortened(column) for name, column in columns.items()},
        "bounds": {name: [_digits(of_row.get(name), ROUND_CEILING) for of_row in bounds] for name in names},
        "growth": {
            _name(cell): [_digits(number) for number in (fit.exponent, fit.error, fit.factor)]
            for cell, fit in growths(group).items()
        },
        "laws": {_name(cell): sentence for cell, sentence in growth_sentences(group).items()},
        "tokens": {_name(window): readable(tokens) for window, tokens in _tokens(group, rows).items()},
        "energies": {},
        "methods": methods(group) + _not_shown(group, rows),
    }


def _tokens(group: Group, rows: Sequence[Row]) -> dict[tuple[Any, ...], list[str]]:
    """The tokens of the shown windows, windows with most rows first, up to the maximum."""
    count = Counter((row["length"], row["window"]) for row in rows)
    chosen, room = {}, _TOKENS
    for window, _ in count.most_common():
        tokens = group.tokens.get(window)
        if tokens is not None and len(tokens) <= room:
            chosen[window] = tokens
            room -= len(tokens)
    return {window: chosen[window] for window in group.tokens if window in chosen}


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
