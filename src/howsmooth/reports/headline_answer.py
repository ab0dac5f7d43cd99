"""The answer to the title of a report: smoothness of the model, its layers and its heads, a comparison, and a cause.

Numbers are relative conditions (`howsmooth.norms.local_constant`), which compare; σ has the units of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median

from markupsafe import Markup

from howsmooth._util.display import render
from howsmooth.reports.drawings import Axis
from howsmooth.reports.findings import few_digits, place_of, why
from howsmooth.reports.scan_groups import Group, Row, kind_name

GAUGE = (
    "Why not σ alone? σ has the units of the tokens. Multiply the gain of a normalisation by 4 and divide the weights "
    "behind it by 4: the model computes the same, and σ of its attention is a quarter. The relative number is the same "
    "for both, so it compares layers and models; σ compares lengths, inputs and heads of one layer."
)
_PATHS = (
    "The value path carries changes of the values while the attention weights stay; the score path moves the weights."
)
_PARTS = {
    "model": ("the whole model", "whole model", "whole models"),
    "logits": ("the whole model with its head", "model, logits", "models, logits"),
    "layer": ("a layer", "layer", "layers"),
    "residual": ("a residual block", "residual block", "residual blocks"),
    "attention": ("an attention block", "attention", "attention blocks"),
    "head": ("an attention head", "head", "heads"),
}
"""Kinds of maps, from the whole to the heads → words of a sentence about the median one; names in the picture of one
map and of several.
"""
_LABEL = 42
"""Room that the label of a tick takes, in units of the picture."""


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
    values: list[float]
    roughest: Row
    reference: list[float]

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
        _, one, several = _PARTS[self.kind]
        return one if len(self.values) == 1 else f"{len(self.values)} {several}"


def relative_conditions(group: Group) -> list[RelativeConditions]:
    """Every kind that has relative numbers, from the whole to the heads, at the length the headline is about."""
    length = group.main_length()
    answered = []
    for kind in _PARTS:
        if rows := _rising(group, kind, length):
            beside = [] if group.reference is None else _rising(group.reference, kind, length)
            values, reference = ([float(row["relative"]) for row in some] for some in (rows, beside))
            answered.append(RelativeConditions(kind, length, values, rows[-1], reference))
    return answered


def _rising(group: Group, kind: str, length: int) -> list[Row]:
    """The cells of a kind that have a relative condition, the most sensitive last."""
    known = [row for row in group.roughest(kind, length) if 0 < (row.get("relative") or 0.0) < inf]
    return sorted(known, key=lambda row: row["relative"])


def answer(group: Group) -> str:
    """One sentence with a number for the whole, a layer and a head, each as far as it was measured.

    >>> from howsmooth.reports import groups
    >>> row = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 4.0, "relative": 2.5}
    >>> answer(groups([row])[0])
    'If the input changes by 1 %, the output of an attention head of m can change by up to 2.5 %, at n = 8 tokens.'
    """
    found = relative_conditions(group)
    kinds = {scale.kind for scale in found}
    hidden = {"residual", *(["logits"] if "model" in kinds else []), *(["attention"] if "layer" in kinds else [])}
    known = [scale for scale in found if scale.kind not in hidden]
    if not known:
        return ""
    first, *rest = known
    whole = f"{_PARTS[first.kind][0]} of {group.label}"
    lead = f"If the input changes by 1 %, the output of {whole} can change by up to {_share(first)}"
    more = [f"{_PARTS[scale.kind][0]} by {_share(scale)}" for scale in rest]
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
            among = f", the most sensitive {kind_name(scale.kind)}," if len(scale.values) > 1 else ""
            return f"Why? In {place_of(scale.roughest)}{among} {reason[0].lower()}{reason[1:]} {_PATHS}"
    return ""


def compared(group: Group) -> str:
    """Comparisons for the answer: random weights where they were measured, and a map that only scales."""
    known = relative_conditions(group)
    with_reference = [scale for scale in known if scale.reference]
    if not known:
        return ""
    plain = "A map that only scales or turns its input has 1 %; larger numbers come from the sensitivity of the map."
    if not with_reference:
        return f"{plain} Scan with --reference random to see the same architecture before training."
    words = []
    for scale in with_reference:
        times = _times(scale.middle / scale.reference_middle)
        words.append(f"{_PARTS[scale.kind][0]} {times} ({few_digits(scale.reference_middle, 2)} %)")
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

    def across(value: float) -> float:
        return 136 + axis.share(value) * 304

    ticks: list[float] = []
    for tick in axis.ticks:
        if not ticks or across(tick) - across(ticks[-1]) >= _LABEL:
            ticks.append(tick)
    drawn = render(
        "answer",
        label=f"Relative condition of {', '.join(scale.name for scale in known)} of {group.label}",
        scales=known,
        ticks=ticks,
        across=lambda value: f"{across(value):.5g}",
        few_digits=few_digits,
    )
    return Markup(drawn)


def legend(group: Group) -> str:
    """The text below the picture."""
    beside = "; dashed: random weights" if any(scale.reference for scale in relative_conditions(group)) else ""
    axis = "Largest change of the output when the input changes by 1 % (logarithmic)."
    return f"{axis} Dots: each one; upright mark: their median{beside}."
