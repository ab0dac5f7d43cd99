"""File formats of figures, checked before a figure is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from howsmooth._util.common import FORMATS
from howsmooth.errors import InvalidInput


def check_formats(formats: Sequence[str]) -> list[str]:
    """The formats as file endings; raises `InvalidInput` for an unknown one.

    >>> check_formats(["pdf", ".png"])
    ['.pdf', '.png']
    """
    endings = ["." + kind.strip().lower().removeprefix(".") for kind in formats]
    if wrong := [kind for kind in endings if kind not in FORMATS]:
        raise InvalidInput(f"{wrong[0]!r} is no format for figures: choose from {', '.join(FORMATS)}.")
    return endings
