"""What is found in each window of a text, kept in the file that ``HOWSMOOTH_KEPT`` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from howsmooth.models import OpenModel, Window
from howsmooth.rounding.rounded_model import Reader
from howsmooth.rounding.window_store import Tensors, each_window, run_name

Step = Callable[[str], None]


def in_windows(
    opened: OpenModel,
    windows: Sequence[Window],
    what: str,
    settings: object,
    found_in: Callable[[Reader, Window], Tensors],
    tell: Step,
) -> list[Tensors]:
    """What is found in every window, kept as soon as it is known."""
    found = []
    for place, window in enumerate(windows, 1):

        def find(_: int, place: int = place, window: Window = window) -> Tensors:
            tell(f"{opened.name}: {what} in window {place} of {len(windows)}")
            return found_in(Reader.of(opened.model, opened.inputs(window)), window)

        found += each_window(kept_file(), window_run(opened, window, what, settings), 1, find)
    return found


def kept_file() -> Path | None:
    """Where windows are kept; None keeps nothing."""
    path = os.environ.get("HOWSMOOTH_KEPT")
    return Path(path) if path else None


def window_run(opened: OpenModel, window: Window, what: str, settings: object) -> str:
    """The name under which a window is kept."""
    text = window.ids.flatten().tolist()
    return run_name({"model": opened.sha256, "what": what, "settings": settings, "text": text})
