"""What is found in each window of a text, kept in the file that ``HOWSMOOTH_KEPT`` names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from howsmooth._util.ledger import Ledger
from howsmooth.models import OpenModel, Window
from howsmooth.rounding.quantisation import Tensors
from howsmooth.rounding.rounded_model import RoundedModel

Step = Callable[[str], None]


def in_windows(
    opened: OpenModel,
    windows: Sequence[Window],
    what: str,
    settings: object,
    found_in: Callable[[RoundedModel, Window], Tensors],
    tell: Step,
) -> list[Tensors]:
    """What is found in every window, kept as soon as it is known."""
    found = []
    for place, window in enumerate(windows, 1):

        def find(place: int = place, window: Window = window) -> Tensors:
            tell(f"{opened.name}: {what} in window {place} of {len(windows)}")
            return found_in(RoundedModel.of(opened.model, opened.inputs(window)), window)

        found.append(stored_window(opened, window, what, settings, find))
    return found


def kept_file() -> Path | None:
    """Where windows are kept; None keeps nothing."""
    path = os.environ.get("HOWSMOOTH_KEPT")
    return Path(path) if path else None


def stored_window(
    opened: OpenModel, window: Window, what: str, settings: object, find: Callable[[], Tensors]
) -> Tensors:
    """The tensors of a window, from the ledger where they are in it."""
    deciding = [opened.sha256, what, settings, window.ids.flatten().tolist()]
    item = hashlib.sha256(json.dumps(deciding).encode()).hexdigest()
    with Ledger.writing(kept_file(), {"evidence": "rounded caches"}) as ledger:
        return ledger.tensors(item, find)
