"""The formats of figures, told before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from howsmooth._util.common import FORMATS
from howsmooth.errors import InvalidInput


def check_formats(formats: Sequence[str]) -> list[str]:
    """The formats as file endings, or a refusal before any work is done.

    >>> check_formats(["pdf", ".png"])
    ['.pdf', '.png']
    """
    wanted = ["." + kind.strip().lower().removeprefix(".") for kind in formats]
    if wrong := [kind for kind in wanted if kind not in FORMATS]:
        raise InvalidInput(f"{wrong[0]!r} is no format for figures: choose from {', '.join(FORMATS)}.")
    return wanted
