"""Rounding in one picture: damage by head, predictions against actual changes, bits against damage."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth.reports.figures.style import literal, new_figure
from howsmooth.rounding.allocation import frontier
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Quantisation

_COLOURS = {"key": "#31688e", "value": "#b23c0c"}


def quantisation_figure(result: Quantisation) -> Figure:
    """Four panels: predicted damage through every head for keys and for values (fewest bits), first order and proved
    bound against the actual change of every head, and the frontier of bits against predicted damage.

    >>> from howsmooth.rounding import quantise
    >>> figure = quantisation_figure(quantise("random:llama[layers=2,width=32]", length=12, windows=1))
    >>> [panel.get_title() for panel in figure.axes[:4]]
    ['keys in int4', 'values in int4', 'change of every head', 'what bits buy']
    """
    figure, panels = new_figure(4, 4.8, 4.6)
    form = int(np.argmin(result.bits))
    damage = result.scores.by_head[:, :, form].clamp_min(1e-300).log10().numpy()
    low, high = float(np.quantile(damage, 0.02)), float(damage.max())
    for column, kind in enumerate(PARTS):
        image = panels[column].imshow(damage[:, column], aspect="auto", cmap="viridis", vmin=low, vmax=high)
        panels[column].set(xlabel="head", ylabel="layer", title=literal(f"{kind}s in {result.formats[form].name}"))
    figure.colorbar(image, ax=panels[1], label=f"log₁₀ predicted {result.damage_name}")
    _draw_changes(panels[2], result)
    _draw_frontier(panels[3], result)
    figure.suptitle(literal(f"{result.model} ({result.precision})"))
    return figure


def _draw_changes(ax: Axes, result: Quantisation) -> None:
    for column, kind in enumerate(PARTS):
        actual, first, proved = (
            result.errors[name][:, column].flatten().numpy() for name in ("actual", "predicted", "proved")
        )
        ax.loglog(actual, proved, ".", color=_COLOURS[kind], alpha=0.25, label=f"{kind}s, proved (upper bound)")
        ax.loglog(actual, first, "x", color=_COLOURS[kind], markersize=3, label=f"{kind}s, first order")
    ends = ax.get_xlim()
    ax.plot(ends, ends, color="0.4", linewidth=1)
    ax.set(xlabel="actual change", ylabel="first order, and bound", title="change of every head")
    ax.legend(fontsize=7)


def _draw_frontier(ax: Axes, result: Quantisation) -> None:
    damage = result.scores.by_cache
    chosen = frontier(damage, result.formats, result.bits)
    ax.semilogy([one.bits for one in chosen], [one.damage for one in chosen], color="#31688e", label="allocation")
    uniform = damage.sum((0, 1, 3)).tolist()
    ax.semilogy(result.bits, uniform, "o", color="#b23c0c", label="uniform")
    for bits, total, form in zip(result.bits, uniform, result.formats, strict=True):
        ax.annotate(literal(form.name), (bits, total), textcoords="offset points", xytext=(4, 4), fontsize=7)
    ax.set(xlabel="bits per number", ylabel=f"predicted {result.damage_name} (estimate)", title="what bits buy")
    ax.legend(fontsize=7)
