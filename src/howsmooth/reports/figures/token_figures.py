"""Tokens of an input: the influence of each on each, and their shares of the worst perturbation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from howsmooth._util.common import printable
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.style import BLUE, CRIMSON, array, axes, open_frame

_LABELS = 40
_DECADES = 1e-3


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
    if input_energy.dim() != 1 or input_energy.shape != output_energy.shape:
        shapes = f"{tuple(input_energy.shape)} and {tuple(output_energy.shape)}"
        raise InvalidInput(f"both energies hold one number for each token, got shapes {shapes}.")
    came, went = array(input_energy), array(output_energy)
    figure, ax = axes(ax, 7.2, 4.6)
    token = np.arange(len(came))
    ax.fill_between(token, 0, came, step="mid", color=CRIMSON, label="input: share of the top right singular vector")
    ax.fill_between(token, 0, -went, step="mid", color=BLUE, label="output: share of the top left singular vector")
    ax.axhline(0, color="black", linewidth=0.6)
    _label_tokens(ax, "x", np.maximum(came, went), tokens)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * abs(value):.3g} %")
    ax.set(xlabel="token", ylabel="share of the energy", title=title)
    open_frame(ax)
    ax.legend(fontsize=8, frameon=False)
    return figure


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
