"""Heads of a model as a map of colours, heads of a layer as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from howsmooth._util.validation import check_tensor, validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import BLUE, CRIMSON, array, axes, open_frame

_LABELS = 40


@validated
def heads_heatmap(
    values: Tensor,
    *,
    layers: Sequence[str] | None = None,
    quantity: str = "local Lipschitz constant σ_max(J), output per input (estimate)",
    title: str = "How rough is each head?",
    ax: Axes | None = None,
) -> Figure:
    """One cell per layer and head, ``values`` being (layers, heads); the largest one is framed.

    >>> import torch
    >>> figure = heads_heatmap(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.0', '2.0', '3.0', '4.0']
    """
    data = array(check_tensor(values, "values", dims=(2,)))
    figure, ax = axes(ax, 6.8, 1.6 + 0.55 * len(data))
    image = ax.imshow(data, cmap="viridis", aspect="auto", vmin=0.0)
    middle = float(data.max()) / 2
    for (row, column), value in np.ndenumerate(data):
        colour = "black" if value > middle else "white"
        ax.text(column, row, _short(value), ha="center", va="center", color=colour, fontsize=8)
    row, column = np.unravel_index(int(data.argmax()), data.shape)
    ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=CRIMSON, linewidth=2.2))
    ax.set_xticks(range(data.shape[1]))
    ax.set_yticks(range(data.shape[0]), labels=list(layers) if layers else None)
    ax.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=ax, label=quantity, fraction=0.046, pad=0.02)
    return figure


@validated
def head_bars(
    value: Tensor,
    lower: Tensor,
    upper: Tensor,
    *,
    quantity: str = "‖J‖₂",
    title: str = "Local Lipschitz constant of each head",
    ax: Axes | None = None,
) -> Figure:
    """One bar per head at its estimate, with a line from its lower to its upper bound."""
    if value.dim() != 1 or not value.shape == lower.shape == upper.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (value, lower, upper))
        raise InvalidInput(f"value, lower and upper hold one number for each head, got shapes {shapes}.")
    data, low, high = array(value), array(lower), array(upper)
    figure, ax = axes(ax, 6.4, 4.6)
    colours = [CRIMSON if i == data.argmax() else BLUE for i in range(len(data))]
    reach = np.where(np.isfinite(high), high - data, 0.0)
    ax.bar(range(len(data)), data, color=colours)
    ax.errorbar(range(len(data)), data, yerr=[data - low, reach], fmt="none", ecolor="black", capsize=3, linewidth=1)
    ax.set_xticks(range(len(data)) if len(data) <= _LABELS else np.arange(0, len(data), len(data) // 20))
    ax.set(xlabel="head", ylabel=f"{quantity}: estimate, and its bounds as a line", title=title)
    open_frame(ax)
    return figure


def _short(value: float) -> str:
    style = ".3g" if value < 0.1 else ".2f" if value < 1 else ".1f" if value < 100 else ".0f"
    return f"{value:{style}}"
