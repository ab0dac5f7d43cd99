"""The numbers of a report, packed for the page: in columns and few digits, each rounded to the side where it holds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from math import isfinite
from typing import Any

import numpy as np

from howsmooth.norms.measurement import rounded
from howsmooth.reporting.findings import KINDS, bounds_of, growths, headline, methods
from howsmooth.reporting.source import Group
from howsmooth.reporting.tokens import readable

_DIGITS = 5
_ROOM_FOR_ENERGIES = 1_500_000
"""Characters that the shares of tokens may take in one page."""
_STEPS = 65535
_NUMBERS: dict[str, str] = {
    "value": ROUND_HALF_EVEN,
    "lower": ROUND_FLOOR,
    "upper": ROUND_CEILING,
    **dict.fromkeys(("radius", "value_path", "score_path", "value_share", "sink", "entropy"), ROUND_HALF_EVEN),
}


def group_data(found: Sequence[Group]) -> list[dict[str, Any]]:
    """One object per group, ready for JSON."""
    packed = [_pack(group) for group in found]
    room = _ROOM_FOR_ENERGIES
    for length, window, place in sorted(
        {(length, window, place) for place, group in enumerate(found) for _, _, length, window in group.energies},
        key=lambda part: (part[1], -part[0]),  # the first window of every model before the second of any
    ):
        shares = {key: pack_shares(e) for key, e in found[place].energies.items() if key[2:] == (length, window)}
        room -= sum(map(len, shares.values()))
        if room < 0:
            break
        packed[place]["energies"] |= {"/".join(map(str, key)): text for key, text in shares.items()}
    return packed


def pack_shares(shares: Sequence[float]) -> str:
    """Numbers between 0 and 1 to within 8·10⁻⁶, in 16 bits each, as base64.

    >>> pack_shares([0.0, 1.0])
    'AAD//w=='
    """
    steps = np.rint(np.clip(np.asarray(shares, dtype=float), 0, 1) * _STEPS).astype("<u2")
    return base64.b64encode(steps.tobytes()).decode()


def _pack(group: Group) -> dict[str, Any]:
    rows = group.rows
    bounds = [bounds_of(row) for row in rows]
    names = list(dict.fromkeys(name for found in bounds for name in found))
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
        "headline": headline(group),
        "kinds": {kind: KINDS.get(kind, kind) for kind in group.kinds},
        "length": group.main_length(group.kinds[0]),
        "columns": {name: _shortened(column) for name, column in columns.items()},
        "bounds": {name: [_digits(found.get(name), ROUND_CEILING) for found in bounds] for name in names},
        "growth": {
            "/".join("" if part is None else str(part) for part in cell): [
                _digits(fit.exponent),
                _digits(fit.error),
                _digits(fit.factor),
            ]
            for cell, fit in growths(group).items()
        },
        "tokens": {"/".join(map(str, key)): readable(tokens) for key, tokens in group.tokens.items()},
        "energies": {},
        "methods": methods(group),
    }


def _shortened(column: list[Any]) -> Any:
    """A column that is the same everywhere is written once."""
    first = column[0]
    return {"all": first} if all(entry == first for entry in column) else column


def _digits(x: float | None, way: str = ROUND_HALF_EVEN) -> float | None:
    return None if x is None or not isfinite(x) else float(rounded(x, way, _DIGITS))
