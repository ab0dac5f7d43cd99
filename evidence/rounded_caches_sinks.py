"""What the first tokens, where attention sinks, carry of the damage of rounded keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evidence.rounded_caches_windows import Step, in_windows
from evidence.tables import FOLDER, table
from howsmooth.models import OpenModel, Window
from howsmooth.reports.figures.style import BLUE, literal, new_figure, open_frame, save_figure
from howsmooth.rounding import parse_format
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Tensors
from howsmooth.rounding.rounded_model import RoundedModel

FORMATS = ("int4", "int3")
FIRST = (0, 1, 4)
"""How many first tokens are kept exact."""
ROUNDED = {"keys": ("key",), "values": ("value",), "both": PARTS}
PICTURES = FOLDER.parent / "images"
_BARS = {"color": (BLUE, "#eeb08c", "white"), "hatch": ("", "", "////"), "edgecolor": ("black",) * 3}


def sink_damage(opened: OpenModel, windows: Sequence[Window], tell: Step) -> Tensor:
    """KL with everything rounded but the first tokens, ``(windows, formats, first, keys or values or both)``."""

    def of(reader: RoundedModel, window: Window) -> Tensors:
        exact, layers = reader.outcome(), range(len(reader.sites))

        def damage(name: str, parts: Sequence[str]) -> float:
            form = parse_format(name)
            return reader.damage(exact, reader.outcome({(layer, part): form for layer in layers for part in parts}))

        rows = [
            [[damage(f"{base}[first={m}]", parts) for parts in ROUNDED.values()] for m in FIRST] for base in FORMATS
        ]
        return {"damage": torch.tensor(rows, dtype=torch.float64)}

    return torch.stack([one["damage"] for one in in_windows(opened, windows, "first tokens", "", of, tell)])


def sink_table(damage: Tensor) -> str:
    """Means over windows, and by how much they are less than with no token exact."""
    means = damage.mean(0)
    less = 1 - means / means[:, :1]
    rows = [
        [base, m, *(f"{kl:.4g} ({share:.0%})" for kl, share in zip(means[b, k], less[b, k], strict=True))]
        for b, base in enumerate(FORMATS)
        for k, m in enumerate(FIRST)
    ]
    return table(["format", "first tokens exact", "KL, keys (less by)", "KL, values", "KL, both"], rows)


def sink_figure(damage: Tensor, name: str) -> Figure:
    """KL against the first tokens kept exact, in percent of that with none; bars are means and dots are windows.

    What a bar lacks to 100 % is what the first tokens carry.

    >>> figure = sink_figure(torch.ones(2, 2, 3, 3), "tiny")
    >>> [panel.get_title() for panel in figure.axes], float(figure.axes[0].patches[0].get_height())
    (['int4', 'int3'], 100.0)
    """
    figure, panels = new_figure(len(FORMATS), 4.8, 4.2)
    means = damage.mean(0)
    bars, dots = (100 * kl / kl[..., :1, :] for kl in (means, damage))
    wide = 0.8 / len(ROUNDED)
    for b, (base, ax) in enumerate(zip(FORMATS, panels, strict=True)):
        for r, rounded in enumerate(ROUNDED):
            where = [k + (r - (len(ROUNDED) - 1) / 2) * wide for k in range(len(FIRST))]
            style = {key: values[r] for key, values in _BARS.items()}
            ax.bar(where, bars[b, :, r].tolist(), wide, label=rounded, linewidth=0.8, **style)  # type: ignore[arg-type]
            for k, x in enumerate(where):
                boxed = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                ax.text(x, 4, f"{means[b, k, r]:#.3g}", rotation=90, ha="center", va="bottom", fontsize=8, bbox=boxed)
                if FIRST[k]:
                    seen = dots[:, b, k, r].tolist()
                    ax.plot([x] * len(seen), seen, "o", color="black", markeredgecolor="white", markersize=4.5)
        ax.set(title=base, xlabel="first tokens kept exact", ylim=(0, max(135.0, 1.05 * float(dots.max()))))
        ax.set_xticks(range(len(FIRST)), [str(m) for m in FIRST])
        open_frame(ax)
    panels[0].set_ylabel("KL (% of that with no token exact)")
    heading = "rounded (dots: windows; numbers: nats per token)"
    panels[0].legend(frameon=False, ncols=3, fontsize=9, loc="upper left", title=heading, title_fontsize=9)
    figure.suptitle(literal(name))
    return figure


def sink_picture(damage: Tensor, opened: OpenModel, path: Path) -> str:
    """Write the picture, and the line that shows it on a page of evidence."""
    save_figure(sink_figure(damage, f"{opened.name}, {len(damage)} windows"), path)
    return f"![KL against the first tokens kept exact, {opened.name}](../images/{path.name})"
