"""Findings of a scan in words and few numbers: the roughest cell and its cause, growth, distances to the bounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR
from itertools import groupby, pairwise
from math import isfinite, log, sqrt
from statistics import fmean, median
from typing import Any

from tokenizers.decoders import ByteLevel

from howsmooth._util.common import rounded
from howsmooth._util.guarantee import with_guarantees
from howsmooth._util.validation import validated
from howsmooth.reports.growth import PowerLaw, fit_power_law, growth
from howsmooth.reports.scan_groups import Cell, Group, Row, cell_of, kind_name
from howsmooth.scans.scan_result import rounding_of

_SLIGHT = 0.005
"""Shares this little outside of 0 … 1 count as 0 and 1."""
_GROWTHS, _RESAMPLES = 100, 500
_OF_VALUES = re.compile("the values (change|grow|fall)")
_SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


@dataclass(frozen=True)
class Distance:
    """Ratios of one bound to the measured values, over many cells.

    Attributes:
        name: of the bound.
        smallest, middle, largest: of the ratio bound / σ.
        count: number of cells that have the bound.
    """

    name: str
    smallest: float
    middle: float
    largest: float
    count: int


@validated
def group_headline(group: Group) -> str:
    """One sentence about the roughest cell at the longest length: its σ, and the cause where it was explained."""
    cells, word = group.roughest(), kind_name(group.main_kind)
    worst = cells[0]
    among = f"is the roughest of {len(cells)} {word}s" if len(cells) > 1 else f"is the only {word} measured"
    compared = ""
    if len(cells) > 1 and (usual := median(row["value"] for row in cells)) > 0:
        compared = f", {few_digits(worst['value'] / usual, 2)} times the median {word}"
    lead = (
        f"{place_of(worst).capitalize()} of {group.label} {among}: at n = {worst['length']} tokens, a small change ε "
        f"of its input can change its output by {few_digits(worst['value'])} ε{compared}."
    )
    return f"{lead} {reason}" if (reason := why(worst, group)) else lead


def why(row: Row, group: Group) -> str:
    """The cause of a cell's roughness in one sentence; empty where it was not explained."""
    share = row.get("value_share")
    if share is None or not isfinite(share):
        return ""
    if -_SLIGHT <= share <= 1 + _SLIGHT:
        share = min(1.0, max(0.0, share))
    if share > 1:
        path = "The value path makes all of it, against the score path"
    elif share < 0:
        path = "The score path makes all of it, against the value path"
    elif share >= 0.5:
        path = f"{percent(share)} of it goes through the value path"
    else:
        path = f"{percent(1 - share)} of it goes through the score path, where the attention weights themselves move"
    sink, token = row.get("sink"), row.get("sink_token")
    if row["what"] != "head" or sink is None or token is None:
        return path + "."
    # A sink explains a rough value path; beside a rough score path it is only a fact.
    link = ":" if 0.5 <= share <= 1 else ";"
    return f"{path}{link} {token_name(group, row)} receives {percent(sink / row['length'])} of all attention."


def token_name(group: Group, row: Row) -> str:
    """The sink of a head by its word and position."""
    position = row["sink_token"]
    tokens = group.tokens.get((row["length"], row["window"]))
    if tokens is None or position >= len(tokens):
        return f"the token at position {position}"
    return f"the token “{readable(tokens)[position].strip()}” at position {position}"


def readable(tokens: Sequence[str]) -> list[str]:
    """Each token with its leading space, so that joining them gives the text; a line break is shown as ↵.

    WordPiece marks the continuation of a word (##), SentencePiece (▁) and byte-level BPE (Ġ) mark its beginning.

    >>> "".join(readable(["[CLS]", "rab", "##bit", "hole"]))
    '[CLS] rabbit hole'
    >>> readable(["Alice", "âĢĻ", "s", "Ġcat", "Ċ"])
    ['Alice', '’', 's', ' cat', '↵']
    """
    if any(token.startswith("##") or token in _SPECIAL for token in tokens):
        words = [token[2:] if token.startswith("##") else f" {token}" for token in tokens]
        words[0] = tokens[0].removeprefix("##")
    elif any(token.startswith("▁") for token in tokens):
        words = [token.replace("▁", " ") for token in tokens]
    elif any(token[:1] in ("Ġ", "Ċ") for token in tokens):
        words = [ByteLevel().decode([token]) for token in tokens]  # added tokens stay as they are
    else:
        words = list(tokens)
    return [token.replace("\r", "").replace("\n", "↵") for token in words]


def ends(row: Mapping[str, Any]) -> str:
    """The two ends of a cell with their guarantees, rounded outwards."""
    held = rounding_of(row.get("what", "head"))
    return with_guarantees(*end_numbers(row), held, confidence=row.get("confidence") or 1.0)


def end_numbers(row: Mapping[str, Any]) -> tuple[str, str]:
    """The two ends of a cell, rounded outwards; empty where there is none."""
    lower, upper, chance = row.get("lower"), row.get("upper"), row.get("confidence")
    below = "" if lower is None else f"≥ {rounded(lower, ROUND_FLOOR)}"
    return below, f"≤ {rounded(upper, ROUND_CEILING)}" if upper is not None and isfinite(upper) and chance else ""


def place_of(row: Row) -> str:
    """A cell in words: "layer 2, head 7"."""
    what, layer, head = cell_of(row)
    word = kind_name(what)
    if layer is None:
        return f"the {word}"
    known = {
        "head": f"layer {layer}, head {head}",
        "layer": f"layer {layer}",
        "prefix": f"the {word} to layer {layer}",
    }
    return known.get(what, f"the {word} of layer {layer}")


def growths(group: Group) -> dict[Cell, PowerLaw]:
    """The power law in n of every cell that has one, through all its lengths and windows.

    Few values are exact powers, and where they bend, many windows make the standard error of the fit arbitrarily
    small. So the error is at least the misfit of the law: the root mean square distance of the exponents between
    neighbouring lengths from the fitted exponent. With fewer than three lengths there is none.
    """
    points = {cell: [(row["length"], row["value"]) for row in rows] for cell, rows in group.cells.items()}
    fits = {cell: fit_power_law(*zip(*pairs, strict=True)) for cell, pairs in points.items()}
    return {cell: _with_doubt(fit, points[cell]) for cell, fit in fits.items() if fit is not None}


def growth_sentences(group: Group) -> dict[Cell, str]:
    """The sentence of `howsmooth.reports.growth` for the roughest cells of every kind: an interval, and a law where the
    data have one.

    Windows are the inputs of its bootstrap. Of a large scan only the roughest hundred cells of a kind have one.
    """
    wanted = {id(row) for kind in group.kinds for row in group.roughest(kind)[:_GROWTHS]}
    sentences = {}
    for cell, rows in group.cells.items():
        if wanted.isdisjoint(map(id, rows)):
            continue
        points = [(row["length"], row["value"]) for row in rows if row["value"] > 0]
        if len({length for length, _ in points}) > 1:
            lengths, values = zip(*points, strict=True)
            grown = growth(values, lengths, resamples=_RESAMPLES)
            sentences[cell] = _OF_VALUES.sub(r"σ \1s", grown.sentence, count=1).replace(" they ", " the values ")
    return sentences


def _with_doubt(fit: PowerLaw, points: Iterable[tuple[int, float]]) -> PowerLaw:
    logs: dict[int, list[float]] = {}
    for length, value in points:
        logs.setdefault(length, []).append(log(value))
    means = [(log(length), fmean(logs[length])) for length in sorted(logs)]
    if len(means) < 3:
        return replace(fit, error=None)
    steps = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(means)]
    bend = sqrt(fmean((step - fit.exponent) ** 2 for step in steps))
    return replace(fit, error=max(bend, fit.error or 0.0))


def bound_distances(rows: Iterable[Row]) -> list[Distance]:
    """Every upper bound's ratio to the measured value, the tightest first."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, bound in bounds_of(row).items():
            if row["value"] > 0:
                ratios.setdefault(name, []).append(bound / row["value"])
    distances = [Distance(name, min(r), median(r), max(r), len(r)) for name, r in ratios.items()]
    return sorted(distances, key=lambda distance: distance.middle)


def bounds_of(row: Row) -> dict[str, float]:
    """All upper bounds of a cell, the three-path bound among them."""
    proved = row.get("proved")
    three_path = {} if proved is None or not isfinite(proved) else {"howsmooth.three_path": float(proved)}
    return three_path | row["bounds"]


def not_converged(group: Group) -> int:
    """Number of cells that did not reach the requested accuracy."""
    return sum(row.get("converged") == 0 for row in group.rows)


def gaps(group: Group) -> str:
    """One sentence about lengths with fewer cells than the length of the headline; empty without such lengths."""
    counts = group.counts(group.main_kind)
    largest, word = max(counts.values()), kind_name(group.main_kind)
    fewer = [f"n = {n} has {count} of {largest} {word}s" for n, count in counts.items() if count < largest]
    return f"Not every length is complete: {', '.join(fewer)}." if fewer else ""


def path_shares(share: float) -> str:
    """The shares of the value and the score path in whole percents.

    >>> path_shares(0.7), path_shares(1.0002)
    ('70 % / 30 %', '100 % / 0 %')
    """
    return f"{round(100 * share)} % / {100 - round(100 * share)} %"


def methods(group: Group) -> list[tuple[str, str]]:
    """Every setting of the scan as (name, value), both for reading."""
    total, seconds = len(group.rows), sum(row.get("seconds") or 0.0 for row in group.rows)
    starts = sorted({row["window_start"] for row in group.rows if row.get("window_start") is not None})
    missed = not_converged(group)
    facts = [
        ("model", group.model),
        ("weights, sha256", _values(group, "model_sha256")),
        ("precision of the weights", group.precision or "not stated"),
        ("text", group.text or "not stated"),
        ("text, sha256", _values(group, "text_sha256")),
        ("measured", ", ".join(f"{kind_name(kind)}s" for kind in group.kinds)),
        ("layers", _ranges(row.get("layer") for row in group.rows)),
        ("lengths n", ", ".join(map(str, group.lengths))),
        ("gaps", gaps(group)),
        ("windows per length", _windows(group)),
        ("windows begin at", ", ".join(map(str, starts[:40])) + (" …" if len(starts) > 40 else "")),
        ("requested relative accuracy", _values(group, "rtol")),
        ("seed of the solver", _values(group, "seed")),
        ("arithmetic", _values(group, "dtype")),
        ("confidence of each upper end", _values(group, "confidence")),
        ("cells", f"{total}, of which {total - missed} reached that accuracy"),
        ("time measured", f"{seconds:.1f} s"),
        ("howsmooth", _values(group, "howsmooth")),
    ]
    listed = ("rtol", "seed", "confidence")
    facts += [(f"setting {name}", _written(value)) for name, value in group.settings.items() if name not in listed]
    return [(name, value) for name, value in facts if value]


def percent(share: float) -> str:
    """A share in two digits.

    >>> percent(0.914), percent(0.0042)
    ('91 %', '0.42 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def few_digits(value: float, digits: int = 3) -> str:
    """A number in few digits, without an exponent where people expect none.

    >>> few_digits(1234.5), few_digits(0.01234), few_digits(12.0)
    ('1230', '0.0123', '12')
    """
    number = rounded(value, digits=digits)
    return f"{float(number):.0f}" if "e+0" in number else number


def _written(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _values(group: Group, name: str) -> str:
    """The value that all rows share, or the first six of several."""
    values = dict.fromkeys(str(row[name]) for row in group.rows if row.get(name) is not None)
    return ", ".join(list(values)[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")


def _windows(group: Group) -> str:
    """Number of windows at each length: one number where it is the same for all."""
    seen: dict[int, set[int]] = {}
    for row in group.rows:
        seen.setdefault(row["length"], set()).add(row["window"])
    counts = {n: len(seen[n]) for n in sorted(seen)}
    same = len(set(counts.values())) == 1
    return str(next(iter(counts.values()))) if same else ", ".join(f"{c} of n = {n}" for n, c in counts.items())


def _ranges(numbers: Iterable[int | None]) -> str:
    """Whole numbers with runs written short: 0–5, 8."""
    rising = enumerate(sorted({number for number in numbers if number is not None}))
    runs = [[number for _, number in run] for _, run in groupby(rising, lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
