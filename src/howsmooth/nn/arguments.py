"""Arguments of layers, checked where they come in: one sentence that says what is taken and what was given."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from howsmooth.errors import InvalidInput


def whole(value: Any, name: str, least: int = 1) -> int:
    """A whole number from ``least`` on.

    >>> whole(8, "the width")
    8
    >>> whole(0, "the width")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the width must be a whole number, at least 1, got 0.
    """
    if not is_whole(value, least):
        raise InvalidInput(f"{name} must be a whole number, at least {least}, got {value!r}.")
    return int(value)


def finite(value: Any, name: str, above: float = -math.inf, below: float = math.inf, what: str = "") -> float:
    """A finite number strictly between two others; ``what`` says it in words.

    >>> finite(0.5, "the coefficient", above=0, what="positive and finite")
    0.5
    >>> finite(float("nan"), "the coefficient", above=0, what="positive and finite")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the coefficient must be positive and finite, got nan.
    """
    if not is_number(value) or not math.isfinite(value) or not above < value < below:
        raise InvalidInput(f"{name} must be {what or 'a finite number'}, got {value!r}.")
    return float(value)


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether this is a whole number from ``least`` on."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_number(value: Any) -> bool:
    """Whether this is a real number, which True is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def flag(value: Any, name: str) -> bool:
    """True or False.

    >>> flag("no", "bias")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: bias must be True or False, got 'no'.
    """
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}.")
    return value


def choice(value: Any, name: str, among: Any) -> Any:
    """One of some names."""
    if not isinstance(value, str) or value not in among:
        raise InvalidInput(f"{name} is one of {', '.join(among)}, got {value!r}.")
    return value
