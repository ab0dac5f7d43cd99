"""Guarantees: an end of a result is proved, holds with a probability, or holds up to measured rounding."""

from __future__ import annotations

from enum import Enum


class Guarantee(Enum):
    """The guarantee of an end of a result, or of the bound on its rounding.

    >>> Guarantee.MEASURED.value
    'holds up to rounding, which was measured and is not bounded'
    """

    PROVED = "holds always: rounding is bounded and no chance is involved"
    PROBABLE = "holds with the probability that is stated: rounding is bounded, a random start is not chosen"
    MEASURED = "holds up to rounding, which was measured and is not bounded"

    def said(self, confidence: float = 1.0) -> str:
        """The words behind an end that holds with this probability.

        >>> Guarantee.PROVED.said(), Guarantee.PROBABLE.said(0.99), Guarantee.MEASURED.said()
        ('always', 'with 99 %', 'up to measured rounding')
        >>> Guarantee.MEASURED.said(0.99)
        'with 99 %, up to measured rounding'
        """
        chance = [] if confidence == 1 else [f"with {100 * confidence:.6g} %"]
        if self is Guarantee.MEASURED:
            return ", ".join([*chance, "up to measured rounding"])
        return chance[0] if chance else "always"


def weakest(*guarantees: Guarantee) -> Guarantee:
    """The guarantee of a thing that is made of several.

    >>> weakest(Guarantee.PROVED, Guarantee.MEASURED).name
    'MEASURED'
    """
    return max(guarantees, key=list(Guarantee).index)
