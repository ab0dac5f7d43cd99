"""The style of all pictures, and their files.

No pyplot and no global state: figures are plain `matplotlib.figure.Figure` objects, saved with `save_figure`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator
from torch import Tensor

from howsmooth._util.common import check_figure_path, printable, write_whole
from howsmooth._util.validation import Count, check_number, validated

ACCENT, BLUE, CRIMSON = "#b23c0c", "#31688e", "crimson"


@validated
def new_figure(
    panels: Count = 1, width: float = 6.4, height: float = 5.2, columns: Count | None = None
) -> tuple[Figure, list[Axes]]:
    """An empty figure with its panels side by side, or in rows of ``columns``.

    >>> figure, panels = new_figure(2)
    >>> len(panels)
    2
    """
    for inches, name in ((width, "width"), (height, "height")):
        check_number(inches, name, least=0.1, below=100.0)
    columns = min(columns or panels, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


@validated
def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as .png, .svg or .pdf, whole or not at all."""
    check_figure_path(path)
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a token in a script that the font lacks
        figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=160)
    write_whole(path, drawn.getvalue())


def literal(text: str) -> str:
    """A name from a file or a model as a label: without control characters, and with dollars that begin no formula.

    >>> literal("a$b")
    'a\\\\$b'
    """
    return printable(text).replace("$", r"\$")


def axes(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    """The given axes and their figure, or new ones of this size."""
    if ax is None:
        figure, (ax,) = new_figure(1, width, height)
        return figure, ax
    return ax.get_figure(), ax  # type: ignore[return-value]


def open_frame(ax: Axes) -> None:
    """No lines above and to the right of the data."""
    ax.spines[["top", "right"]].set_visible(False)


def plain_legend(ax: Axes, **options: Any) -> None:
    """A legend in small letters, without a frame."""
    ax.legend(frameon=False, fontsize=8, **options)


def cell_map(
    ax: Axes, data: np.ndarray, text: Callable[[float], str], dark: np.ndarray, quantity: str, **colours: Any
) -> Colorbar:
    """A coloured cell for every layer (row) and head (column), its number in black where ``dark``, else in white.

    Cells without a number stay empty. Returns the scale of the colours.
    """
    image = ax.imshow(data, aspect="auto", **colours)
    for (row, column), value in np.ndenumerate(data):
        if np.isfinite(value):
            colour = "black" if dark[row, column] else "white"
            ax.text(column, row, text(value), ha="center", va="center", color=colour, fontsize=8)
    ax.set_xticks(range(data.shape[1]))
    ax.set_yticks(range(data.shape[0]))
    ax.set(xlabel="head", ylabel="layer")
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure.colorbar(image, ax=ax, label=quantity, fraction=0.046, pad=0.02)


def label_places(ax: Axes, places: Sequence[float]) -> None:
    """A logarithmic axis x with a tick at these places, and at no others."""
    ax.set_xscale("log")
    ax.set_xticks(places, labels=[f"{place:g}" for place in places])
    ax.xaxis.set_minor_locator(NullLocator())


def light_grid(ax: Axes) -> None:
    """A light grid in an open frame."""
    ax.grid(True, which="major", color="0.9", linewidth=0.6)
    open_frame(ax)


def plain_decades(ax: Axes) -> None:
    """Plain numbers on a logarithmic axis of values, between the powers of ten too where there is room."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def array(values: Tensor) -> np.ndarray:
    """The numbers of a tensor for matplotlib."""
    return values.detach().double().cpu().numpy()
