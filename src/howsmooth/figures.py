"""Pictures of measurements. Every function draws on the axes it is given, or on a new figure, and returns the figure.

No pyplot and no global state: figures are plain `matplotlib.figure.Figure` objects, saved with `save_figure`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.small import printable, write_whole

FORMATS = (".png", ".svg", ".pdf")
_MOST_LABELS = 40
_DECADES = 1e-3


def new_figure(panels: int = 1, width: float = 6.4, height: float = 5.2) -> tuple[Figure, list[Axes]]:
    """An empty figure with its panels side by side.

    >>> figure, panels = new_figure(2)
    >>> len(panels)
    2
    """
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def check_figure_path(path: Path) -> None:
    """Refuse a file name that no picture can be written to, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"{path} does not end like a picture: use {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder of {path} does not exist: create it first.")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as .png, .svg or .pdf, whole or not at all."""
    check_figure_path(path)
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a token in a script that the font lacks
        figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=160)
    write_whole(path, drawn.getvalue())


def literal(text: str) -> str:
    """A name from elsewhere as a label shows it: without controls, and dollars begin no formula.

    >>> literal("a$b")
    'a\\\\$b'
    """
    return printable(text).replace("$", r"\$")


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
    data = _array(values)
    figure, ax = _axes(ax, 6.8, 1.6 + 0.55 * len(data))
    image = ax.imshow(data, cmap="viridis", aspect="auto", vmin=0.0)
    middle = float(data.max()) / 2
    for (row, column), value in np.ndenumerate(data):
        colour = "black" if value > middle else "white"
        ax.text(column, row, _short(value), ha="center", va="center", color=colour, fontsize=8)
    row, column = np.unravel_index(int(data.argmax()), data.shape)
    ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="crimson", linewidth=2.2))
    ax.set_xticks(range(data.shape[1]))
    ax.set_yticks(range(data.shape[0]), labels=list(layers) if layers else None)
    ax.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=ax, label=quantity, fraction=0.046, pad=0.02)
    return figure


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
    data, low, high = _array(value), _array(lower), _array(upper)
    figure, ax = _axes(ax, 6.4, 4.6)
    colours = ["crimson" if i == data.argmax() else "#31688e" for i in range(len(data))]
    reach = np.where(np.isfinite(high), high - data, 0.0)
    ax.bar(range(len(data)), data, color=colours)
    ax.errorbar(range(len(data)), data, yerr=[data - low, reach], fmt="none", ecolor="black", capsize=3, linewidth=1)
    ax.set_xticks(range(len(data)) if len(data) <= _MOST_LABELS else np.arange(0, len(data), len(data) // 20))
    ax.set(xlabel="head", ylabel=f"{quantity}: estimate, and its bounds as a line", title=title)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


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
    data = _array(influence)
    figure, ax = _axes(ax, 6.8, 6.2)
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


def token_energies(
    input_energy: Tensor,
    output_energy: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    title: str = "Where the worst perturbation sits, and where it shows",
    ax: Axes | None = None,
) -> Figure:
    """Shares of the top singular vectors per token: input upwards, output downwards; each adds up to one."""
    came, went = _array(input_energy), _array(output_energy)
    figure, ax = _axes(ax, 7.2, 4.6)
    place = np.arange(len(came))
    ax.fill_between(place, 0, came, step="mid", color="crimson", label="input: share of the top right singular vector")
    ax.fill_between(place, 0, -went, step="mid", color="#31688e", label="output: share of the top left singular vector")
    ax.axhline(0, color="black", linewidth=0.6)
    _label_tokens(ax, "x", np.maximum(came, went), tokens)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * abs(value):.3g} %")
    ax.set(xlabel="token", ylabel="share of the energy", title=title)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return figure


def chosen_labels(weight: np.ndarray, most: int = _MOST_LABELS) -> list[int]:
    """Positions to label: all when they fit, else up to most/2 of the heaviest, at least n/most apart.

    >>> chosen_labels(np.array([0.0, 9.0, 8.0, 0.0, 5.0, 1.0]), most=4)
    [1, 4]
    """
    n = len(weight)
    if n <= most:
        return list(range(n))
    gap, chosen = n / most, list[int]()
    for place in np.argsort(-weight, kind="stable"):
        if len(chosen) < most // 2 and all(abs(int(place) - other) >= gap for other in chosen):
            chosen.append(int(place))
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


def _axes(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    if ax is None:
        figure, (ax,) = new_figure(1, width, height)
        return figure, ax
    figure = ax.get_figure()  # type: ignore[assignment]
    return figure, ax


def _array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def _short(value: float) -> str:
    return (
        f"{value:.3g}"
        if value < 0.1
        else f"{value:.2f}"
        if value < 1
        else f"{value:.1f}"
        if value < 100
        else f"{value:.0f}"
    )
