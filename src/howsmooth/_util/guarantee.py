"""Guarantees: what an end of a result allows for, from a proof to measured rounding."""

from __future__ import annotations

from enum import Enum


class Guarantee(Enum):
    """The guarantee of an end of a result, or of the allowance for its rounding; the strongest first.

    Worst-case bounds on rounding are those of Higham's standard model, with the backward errors that LAPACK states for
    its factorisations.

    >>> Guarantee.MEASURED.value
    'rounding was measured, not bounded'
    """

    PROVED = "no chance is involved and rounding is bounded in the worst case"
    PROBABLE = (
        "holds with the stated probability (of the solver's own random start); rounding is bounded in the worst case"
    )
    MODELLED = "rounding is bounded for errors that are independent of mean zero, not in the worst case"
    MEASURED = "rounding was measured, not bounded"

    def words(self, confidence: float = 1.0) -> str:
        """The text behind an end that holds with this probability.

        >>> Guarantee.PROVED.words(), Guarantee.PROBABLE.words(0.99), Guarantee.MODELLED.words()
        ('proved', 'with probability 99 %', 'rounding modelled')
        >>> Guarantee.MEASURED.words(0.99)
        'with probability 99 %, rounding measured'
        """
        chance = "" if confidence == 1 else f"with probability {100 * confidence:.6g} %"
        rounding = {Guarantee.MODELLED: "rounding modelled", Guarantee.MEASURED: "rounding measured"}.get(self, "")
        return ", ".join(filter(None, [chance, rounding])) or "proved"


def weakest(*guarantees: Guarantee) -> Guarantee:
    """The guarantee of a thing that is made of several.

    >>> weakest(Guarantee.PROVED, Guarantee.MEASURED).name
    'MEASURED'
    """
    return max(guarantees, key=list(Guarantee).index)


def with_guarantees(
    lower: str, upper: str, below: Guarantee, above: Guarantee | None = None, confidence: float = 1.0
) -> str:
    """Two ends and their guarantees as one text; ``confidence`` is the probability of the upper end.

    Args:
        lower, upper: the ends as texts, either of which may be empty.
        below, above: their guarantees; one for both without ``above``.

    >>> with_guarantees("≥ 1", "≤ 2", Guarantee.MODELLED, confidence=0.99)
    '≥ 1, ≤ 2 with probability 99 %, rounding modelled'
    >>> with_guarantees("≥ 1", "≤ 2", Guarantee.PROVED), with_guarantees("≥ 1", "", Guarantee.MEASURED)
    ('≥ 1, ≤ 2, proved', '≥ 1, rounding measured')
    >>> with_guarantees("≥ 1", "≤ 2", Guarantee.MODELLED, Guarantee.PROVED)
    '≥ 1 (rounding modelled), ≤ 2 (proved)'
    """
    above = below if above is None else above
    if not (lower and upper):
        end, held = (lower, below.words()) if lower else (upper, above.words(confidence))
        return f"{end}, {held}" if end else ""
    if below is not above:
        return f"{lower} ({below.words()}), {upper} ({above.words(confidence)})"
    joint = ", " if confidence == 1 else " "
    return f"{lower}, {upper}{joint}{above.words(confidence)}"
