"""The answer to the title of a report: smoothness of the model, its layers and its heads, a comparison, and a cause.

Numbers are relative conditions (`howsmooth.norms.local_constant`), which compare; σ has the units of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from markupsafe import Markup

from howsmooth._util.display import render
from howsmooth.reports.drawings import Axis
from howsmooth.reports.findings import few_digits, main_kind, place_of, why
from howsmooth.reports.scan_groups import KINDS, Group, Row

GAUGE = (
    "Why not σ alone? σ has the units of the tokens. Multiply the gain of a normalisation by 4 and divide the weights "
    "behind it by 4: the model computes the same, and σ of its attention is a quarter. The relative number is the same "
    "for both, so it compares layers and models; σ compares lengths, inputs and heads of one layer."
)
_PATHS = (
    "The value path carries changes of the values while the attention weights stay; the score path moves the weights."
)
_PARTS = {
    "model": "the whole model",
    "logits": "the whole model with its head",
    "layer": "a layer",
    "residual": "a residual block (attention with its normalisation and the stream around it)",
    "attention": "an attention block",
    "head": "an attention head",
}
"""Kinds of maps, from the whole to the heads → words of a sentence about the median one."""

_NAMES = {
    "model": ("whole model", "whole models"),
    "logits": ("model, logits", "models, logits"),
    "layer": ("layer", "layers"),
    "residual": ("residual block", "residual blocks"),
    "attention": ("attention", "attention blocks"),
    "head": ("head", "heads"),
}
"""Kinds of maps → names in the picture, of one map and of several."""


@dataclass(frozen=True)
class RelativeConditions:
    """The relative conditions of all cells of a kind at one length.

    Attributes:
        kind, length: of the cells.
        values: rising.
        roughest: the row of the largest value.
        reference: values of the same architecture with random weights, where they were measured.
    """

    kind: str
    length: int
    values: tuple[float, ...]
    roughest: Row
    reference: tuple[float, ...] = ()

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def reference_middle(self) -> float:
        """The median of the reference."""
        return median(self.reference)

    @property
    def name(self) -> str:
        """The number of cells and their kind."""
        one, several = _NAMES[self.kind]
        return one if len(self.values) == 1 else f"{len(self.values)} {several}"


def relative_conditions(group: Group) -> list[RelativeConditions]:
    """Every kind that has relative numbers, from the whole to the heads, at the length the headline is about."""
    length = group.main_length(main_kind(group))
    answered = []
    for kind in _PARTS:
        rows = [row for row in group.roughest(kind, length) if _known(row)]
        if not rows:
            continue
        beside = [] if group.reference is None else group.reference.roughest(kind, length)
        compared = sorted(float(row["relative"]) for row in beside if _known(row))
        values = sorted(float(row["relative"]) for row in rows)
        roughest = max(rows, key=lambda row: float(row["relative"]))
        answered.append(RelativeConditions(kind, length, tuple(values), roughest, tuple(compared)))
    return answered


def _known(row: Row) -> bool:
    relative = row.get("relative")
    return relative is not None and isfinite(relative) and relative > 0


def answer(group: Group) -> str:
    """One sentence with a number for the whole, a layer and a head, each as far as it was measured.

    >>> from howsmooth.reports import groups
    >>> row = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 4.0, "relative": 2.5}
    >>> answer(groups([row])[0])
    'If what enters changes by 1 %, what leaves an attention head of m can change by up to 2.5 %, at n = 8 tokens.'
    """
    found = relative_conditions(group)
    kinds = {scale.kind for scale in found}
    hidden = {"residual", *(["logits"] if "model" in kinds else []), *(["attention"] if "layer" in kinds else [])}
    known = [scale for scale in found if scale.kind not in hidden]
    if not known:
        return ""
    first, *rest = known
    whole = f"{_PARTS[first.kind]} of {group.label}"
    lead = f"If what enters changes by 1 %, what leaves {whole} can change by up to {_share(first)}"
    more = [f"{_PARTS[scale.kind]} by {_share(scale)}" for scale in rest]
    return f"{'; '.join([lead, *more])}, at n = {first.length} tokens."


def _share(scale: RelativeConditions) -> str:
    if len(scale.values) == 1:
        return f"{few_digits(scale.middle, 2)} %"
    worst = place_of(scale.roughest)
    largest = few_digits(scale.values[-1], 2)
    return f"{few_digits(scale.middle, 2)} % (the median of {len(scale.values)}; {worst}: {largest} %)"


def cause(group: Group) -> str:
    """The cause of the sensitivity of the most sensitive head or block, where it was explained."""
    for scale in reversed(relative_conditions(group)):
        if reason := why(scale.roughest, group):
            word = KINDS.get(scale.kind, scale.kind)
            among = f", the most sensitive {word}," if len(scale.values) > 1 else ""
            return f"Why? In {place_of(scale.roughest)}{among} {reason[0].lower()}{reason[1:]} {_PATHS}"
    return ""


def compared(group: Group) -> str:
    """Comparisons for the answer: random weights where they were measured, and a map that only scales."""
    known = relative_conditions(group)
    with_reference = [scale for scale in known if scale.reference]
    if not known:
        return ""
    plain = "A map that only scales or turns its input has 1 %; what is above comes from what the map is sensitive to."
    if not with_reference:
        return f"{plain} Scan with --reference random to see the same architecture before training."
    words = []
    for scale in with_reference:
        part, times = _PARTS[scale.kind].split(" (")[0], _times(scale.middle / scale.reference_middle)
        words.append(f"{part} {times} ({few_digits(scale.reference_middle, 2)} %)")
    return f"Compared with the same architecture with random weights: {'; '.join(words)}. {plain}"


def _times(ratio: float) -> str:
    """The ratio of two relative conditions in words.

    >>> _times(3.0), _times(0.5), _times(1.004)
    ('3 times rougher', '2 times smoother', 'just as rough')
    """
    if abs(ratio - 1) < 0.05:
        return "just as rough"
    return f"{few_digits(ratio, 2)} times rougher" if ratio > 1 else f"{few_digits(1 / ratio, 2)} times smoother"


def picture(group: Group) -> Markup:
    """All relative conditions on one logarithmic axis, one line of dots for every kind; empty where there are none."""
    known = relative_conditions(group)
    if not known:
        return Markup()
    every = [value for scale in known for value in (*scale.values, *scale.reference)]
    axis = Axis(min([0.9, *every]) / 1.15, max([1.2, *every]) * 1.15, "")
    drawn = render(
        "answer",
        label=f"Relative condition of {', '.join(scale.name for scale in known)} of {group.label}",
        scales=known,
        ticks=_ticks(axis),
        across=lambda value: f"{136 + axis.share(value) * 304:.5g}",
        few_digits=few_digits,
    )
    return Markup(drawn)


def legend(group: Group) -> str:
    """The text below the picture."""
    beside = "; dashed: random weights" if any(scale.reference for scale in relative_conditions(group)) else ""
    axis = "By how much what leaves can change, at most, when what enters changes by 1 % (logarithmic)."
    return f"{axis} Dots: each one; upright mark: their median{beside}."


def _ticks(axis: Axis) -> Sequence[float]:
    steps = [step * 10.0**power for power in range(-6, 12) for step in (1, 2, 5)]
    inside = [step for step in steps if axis.low <= step <= axis.high]
    whole = [step for step in inside if f"{step:e}".startswith("1.0")]
    return inside if len(inside) <= 8 else whole
