"""The section of a report on rounding: damage by head, predictions against actual changes, bits against damage.

`howsmooth.reports.sections` puts it into a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING
from pathlib import Path
from typing import Any

from markupsafe import Markup

from howsmooth._util.common import rounded
from howsmooth._util.display import render
from howsmooth.reports.drawings import Axis, Chart, heat_map
from howsmooth.reports.sections import write_section
from howsmooth.rounding.allocation import frontier
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Quantisation

_POINTS, _CELLS = 1500, 20_000
"""Maximum number of points of a chart, and of cells in all maps together."""
_CLASS = {"key": "accent", "value": "middle"}


def write_rounding(quantisation: Quantisation, path: Path, about: str) -> Path:
    """Add the section to the report at a path, or write a new page when there is none.

    Args:
        about: the measurement in words: the text, windows, tokens and samples.
    """
    return write_section(
        rounding_section(quantisation, about),
        path,
        kind="rounding",
        about=f"{quantisation.model}\n{quantisation.precision}",
        title=f"What may be rounded in {quantisation.model}?",
    )


def rounding_section(quantisation: Quantisation, about: str) -> str:
    """The section as HTML.

    >>> from howsmooth.rounding import quantise
    >>> quantisation = quantise("random:llama[layers=2,width=32]", length=12, windows=1)
    >>> section = rounding_section(quantisation, "1 window of <Alice>")
    >>> section.count("<svg"), "&lt;Alice&gt;" in section
    (6, True)
    """
    changes = [row for row in quantisation.rows() if row["actual"] > 0]
    shown = changes[:: -(-len(changes) // _POINTS)] if changes else []
    order = sorted(range(len(quantisation.formats)), key=lambda i: quantisation.bits[i])
    room = max(1, _CELLS // quantisation.scores.by_head[:, :, 0].numel())
    return render(
        "rounding",
        name=f"{quantisation.model} [{quantisation.precision}]" if quantisation.precision else quantisation.model,
        headline=_headline(quantisation),
        about=about,
        damage=quantisation.damage_name,
        totals=_totals(quantisation),
        maps=[_maps(quantisation, index) for index in order[:room]],
        not_drawn=[quantisation.formats[index].name for index in order[room:]],
        changes=_changes(shown),
        changes_shown=len(shown),
        changes_measured=len(changes),
        frontier=_frontier(quantisation),
        checks=_checks(quantisation),
        layers=_layers(quantisation),
    )


def _headline(quantisation: Quantisation) -> str:
    """One sentence about the coarsest format."""
    _, coarsest = min(zip(quantisation.bits, quantisation.formats, strict=True), key=lambda pair: pair[0])
    key, value = (row for row in quantisation.totals() if row["format"] == coarsest.name)
    harder, easier = (key, value) if key["kl"] >= value["kl"] else (value, key)
    unit = "nats per token" if quantisation.causal else "of the sentence embedding"
    return (
        f"In {coarsest.name}, rounding all {harder['what']}s costs a predicted {quantisation.damage_name} of "
        f"{_short(harder['kl'])} {unit}, all {easier['what']}s {_short(easier['kl'])}; the {harder['what']}s of layer "
        f"{harder['most_in']} suffer most."
    )


def _totals(quantisation: Quantisation) -> list[list[str]]:
    return [
        [
            row["format"],
            f"{row['what']}s",
            f"{row['bits']:g}",
            *(_short(row[name]) for name in ("proved", "predicted", "kl", "kl_error")),
        ]
        for row in quantisation.totals()
    ]


def _maps(quantisation: Quantisation, index: int) -> dict[str, Any]:
    """The maps of keys and values in one format, on one scale."""
    damage, name = quantisation.scores.by_head[:, :, index].clamp_min(0.0), quantisation.formats[index].name
    above = damage[damage > 0]
    low, high = (float(above.quantile(0.02)), float(above.max())) if len(above) else (1.0, 1.0)
    figures = []
    for p, part in enumerate(PARTS):
        title = f"{part}s in {name}"

        def words(layer: int, head: int, value: float, title: str = title) -> str:
            return f"layer {layer}, head {head}, {title}: {quantisation.damage_name} {_short(value)}"

        figures.append(heat_map(damage[:, p].tolist(), title, words, low, high))
    return {"format": name, "figures": figures, "low": _short(low), "high": _short(high)}


def _changes(rows: Sequence[dict[str, Any]]) -> Markup:
    every = [row[name] for row in rows for name in ("actual", "predicted", "proved")]
    x = Axis.around((row["actual"] for row in rows), "actual change")
    chart = Chart(x, Axis.around(every, "first order, and proved bound"))
    marks = [chart.line([(x.low, x.low), (x.high, x.high)], "axis")]
    for row in rows:
        cell = f"layer {row['layer']}, head {row['head']}, {row['what']}s in {row['format']}"
        values = f"actual {_short(row['actual'])}, first order {_short(row['predicted'])}"
        title = f"{cell}: {values}, proved ≤ {rounded(row['proved'], ROUND_CEILING, 3)}"
        marks.append(chart.dot(row["actual"], row["proved"], title, 2, class_="bound", opacity=0.5))
        marks.append(chart.dot(row["actual"], row["predicted"], title, 2, class_=_CLASS[row["what"]], opacity=0.6))
    return chart.drawn("First order and proved bound against the actual change of every head", marks)


def _frontier(quantisation: Quantisation) -> Markup:
    chosen = [
        (one.bits, one.damage)
        for one in frontier(quantisation.scores.by_cache, quantisation.formats, quantisation.bits)
    ]
    uniform = list(zip(quantisation.bits, quantisation.scores.by_cache.sum((0, 1, 3)).tolist(), strict=True))
    run = [
        (check.allocation.bits, check.mean, check.name) for check in quantisation.checks if check.allocation is not None
    ]
    every = [damage for _, damage in [*chosen, *uniform]] + [damage for _, damage, _ in run]
    x = Axis.around(quantisation.bits, "bits per cached number, scales included", log=False)
    chart = Chart(x, Axis.around(every, quantisation.damage_name))
    marks = [chart.line(chosen, "chosen")]
    for (bits, damage), form in zip(uniform, quantisation.formats, strict=True):
        title = f"{form.name} everywhere: predicted {_short(damage)} at {bits:g} bits"
        marks += [chart.dot(bits, damage, title, 4, class_="middle"), chart.words(bits, damage, form.name)]
    for bits, damage, name in run:
        title = f"{name}, run on other windows: {_short(damage)} at {bits:.4g} bits"
        marks.append(chart.dot(bits, damage, title, 5, class_="bound"))
    return chart.drawn(f"Bits per number against {quantisation.damage_name}", marks)


def _checks(quantisation: Quantisation) -> list[list[str]]:
    rows = []
    for check in quantisation.checks:
        made = check.allocation
        predicted = ["–", "–"] if made is None else [f"{made.bits:.4g}", _short(made.damage)]
        perplexity = "–" if check.perplexity is None else f"{check.perplexity:.4g}"
        rows.append([check.name, *predicted, _short(check.mean), _short(check.error), perplexity])
    return rows


def _layers(quantisation: Quantisation) -> list[list[str]] | None:
    """The formats of every layer's keys and values, where they were chosen."""
    if quantisation.allocation is None:
        return None
    layers = zip(*(quantisation.allocation.by_layer(part) for part in PARTS), strict=True)
    return [[str(layer), *(", ".join(names) for names in parts)] for layer, parts in enumerate(layers)]


def _short(value: float) -> str:
    return rounded(value, digits=3)
