"""Heads as a map of colours or as bars; tokens with the influence of each on each, and their shares of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from howsmooth._util.common import printable
from howsmooth._util.validation import check_tensor, validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import BLUE, CRIMSON, array, axes, cell_map, open_frame, plain_legend

_LABELS = 40
_DECADES = 1e-3


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
    cell_map(ax, data, _short, data > data.max() / 2, quantity, cmap="viridis", vmin=0.0)
    row, column = np.unravel_index(int(data.argmax()), data.shape)
    ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=CRIMSON, linewidth=2.2))
    ax.set_yticks(range(len(data)), labels=layers)
    ax.set_title(title)
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
    data, low, high = _vectors("value, lower and upper hold one number for each head", value, lower, upper)
    figure, ax = axes(ax, 6.4, 4.6)
    colours = [CRIMSON if i == data.argmax() else BLUE for i in range(len(data))]
    reach = np.where(np.isfinite(high), high - data, 0.0)
    ax.bar(range(len(data)), data, color=colours)
    ax.errorbar(range(len(data)), data, yerr=[data - low, reach], fmt="none", ecolor="black", capsize=3, linewidth=1)
    ax.set_xticks(range(len(data)) if len(data) <= _LABELS else np.arange(0, len(data), len(data) // 20))
    ax.set(xlabel="head", ylabel=f"{quantity}: estimate, and its bounds as a line", title=title)
    open_frame(ax)
    return figure


@validated
def influence_map(
    influence: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    title: str = "Which token moves which",
    ax: Axes | None = None,
) -> Figure:
    """‖J_ij‖₂ for every output token i (row) and input token j (column), on a logarithmic colour scale.

    Long inputs carry labels only at the tokens with the largest rows and columns, never so close that they overlap.
    """
    data = array(influence)
    figure, ax = axes(ax, 6.8, 6.2)
    top = float(data.max()) or 1.0
    shown = np.ma.masked_equal(data, 0.0)
    colours = LogNorm(top * _DECADES, top)
    image = ax.imshow(np.ma.clip(shown, top * _DECADES, None), cmap="magma", norm=colours, interpolation="nearest")
    ax.set_facecolor("0.9")
    _label_tokens(ax, "x", np.linalg.norm(data, axis=0), tokens)
    _label_tokens(ax, "y", np.linalg.norm(data, axis=1), tokens)
    ax.set(xlabel="input token that moves", ylabel="output token that follows", title=title)
    figure.colorbar(image, ax=ax, label="‖∂ output i / ∂ input j‖₂ (estimate)", fraction=0.046, pad=0.02, extend="min")
    return figure


@validated
def token_energies(
    input_energy: Tensor,
    output_energy: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    title: str = "Where the worst perturbation sits, and where it shows",
    ax: Axes | None = None,
) -> Figure:
    """Shares of the top singular vectors per token: input upwards, output downwards; each adds up to one."""
    came, went = _vectors("both energies hold one number for each token", input_energy, output_energy)
    figure, ax = axes(ax, 7.2, 4.6)
    token = np.arange(len(came))
    ax.fill_between(token, 0, came, step="mid", color=CRIMSON, label="input: share of the top right singular vector")
    ax.fill_between(token, 0, -went, step="mid", color=BLUE, label="output: share of the top left singular vector")
    ax.axhline(0, color="black", linewidth=0.6)
    _label_tokens(ax, "x", np.maximum(came, went), tokens)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * abs(value):.3g} %")
    ax.set(xlabel="token", ylabel="share of the energy", title=title)
    open_frame(ax)
    plain_legend(ax)
    return figure


def _vectors(rule: str, *tensors: Tensor) -> list[np.ndarray]:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise InvalidInput(f"{rule}, got shapes {', '.join(map(str, shapes))}.")
    return list(map(array, tensors))


def chosen_labels(weight: np.ndarray, count: int = _LABELS) -> list[int]:
    """Positions to label: all up to ``count``, else up to count/2 of the heaviest, at least n/count apart.

    >>> chosen_labels(np.array([0.0, 9.0, 8.0, 0.0, 5.0, 1.0]), count=4)
    [1, 4]
    """
    n = len(weight)
    if n <= count:
        return list(range(n))
    gap, chosen = n / count, list[int]()
    for position in np.argsort(-weight, kind="stable"):
        if len(chosen) < count // 2 and all(abs(int(position) - other) >= gap for other in chosen):
            chosen.append(int(position))
    return sorted(chosen)


def _label_tokens(ax: Axes, axis: str, weight: np.ndarray, tokens: Sequence[str] | None) -> None:
    places = chosen_labels(weight)
    # Ġ and ▁ are how tokenizers write the space before a word.
    names = [f"{printable(tokens[i].lstrip('Ġ▁'))} {i}" if tokens is not None else str(i) for i in places]
    options: dict[str, Any] = {"labels": names, "fontsize": 7, "parse_math": False}
    if axis == "x":
        ax.set_xticks(places, rotation=90, **options)
    else:
        ax.set_yticks(places, **options)


def _short(value: float) -> str:
    style = ".3g" if value < 0.1 else ".2f" if value < 1 else ".1f" if value < 100 else ".0f"
    return f"{value:{style}}"
