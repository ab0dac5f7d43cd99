"""What may be rounded, as a section of the report: where it hurts, how well it is foreseen, and what bits buy.

`howsmooth.reports.sections` puts it into a page.
"""

from __future__ import annotations

from decimal import ROUND_CEILING
from pathlib import Path

from torch import Tensor

from howsmooth._util.common import rounded
from howsmooth.reports.drawings import Axis, Chart, heat_map
from howsmooth.reports.sections import escaped, html_table, write_section
from howsmooth.rounding.allocation import frontier
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Quantisation

_POINTS, _CELLS = 1500, 20_000
"""Most points of a chart, and most cells of all maps together."""
_CLASS = {"key": "accent", "value": "middle"}


def write_rounding(quantisation: Quantisation, path: Path, about: str) -> Path:
    """Put the section into the report at a path, or write a page of its own when there is none.

    Args:
        about: how it was measured, in words: the text, windows, tokens and samples.
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
    name = f"{quantisation.model} [{quantisation.precision}]" if quantisation.precision else quantisation.model
    parts = [
        f'<section class="rounding"><h2>What may be rounded in {escaped(name)}?</h2>',
        f'<p class="lead">{escaped(_headline(quantisation))}</p><p class="quiet">{escaped(about)}</p>',
        html_table(
            ["format", "of", "bits", "proved ÷ actual", "first order ÷ actual", quantisation.damage_name, "± (s.e.)"],
            _totals(quantisation),
        ),
        f"<h3>Predicted {escaped(quantisation.damage_name)} through every head</h3>",
        "<p>Each head alone; the colour is logarithmic, on one scale for the keys and values of a format.</p>",
        *_maps(quantisation),
        '<div class="pair"><figure><h3>Change of every head</h3>',
        "<p>Filled: first order against the actual change of the head's output; on the line it is right. Hollow: the "
        "proved bound, which is never below the line. Keys are coloured, values dark.</p>",
        _changes(quantisation),
        "</figure><figure><h3>What bits buy</h3>",
        f"<p>Predicted {escaped(quantisation.damage_name)} with everything rounded: one format everywhere (dark), and "
        "the allocation for every budget (line). Hollow: run on text that was not used to choose.</p>",
        _frontier(quantisation),
        "</figure></div>",
        _choice(quantisation),
        "<p class='quiet'>Predictions are estimates from sampled scores, with their standard errors; they take every "
        "cache alone, where a model that is run with several rounded layers rounds values that have moved. Bounds are "
        "theorems about one head with the input it has.</p></section>",
    ]
    return "\n".join(parts)


def _headline(quantisation: Quantisation) -> str:
    """The coarsest format in one sentence."""
    least = quantisation.formats[min(range(len(quantisation.formats)), key=lambda i: quantisation.bits[i])].name
    key, value = (row for row in quantisation.totals() if row["format"] == least)
    harder, easier = (key, value) if key["kl"] >= value["kl"] else (value, key)
    unit = "nats per token" if quantisation.causal else "of the sentence embedding"
    return (
        f"In {least}, rounding all {harder['what']}s costs a predicted {quantisation.damage_name} of "
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


def _maps(quantisation: Quantisation) -> list[str]:
    """Two maps for every format, the coarsest open; formats that have no room are named."""
    damage = quantisation.scores.by_head.clamp_min(0.0)
    order = sorted(range(len(quantisation.formats)), key=lambda i: quantisation.bits[i])
    room = max(1, _CELLS // damage[:, :, 0].numel())
    drawn = []
    for index in order[:room]:
        opened = " open" if index == order[0] else ""
        summary = f"<summary>{escaped(quantisation.formats[index].name)}</summary>"
        drawn.append(f"<details{opened}>{summary}{_pair(quantisation, damage[:, :, index], index)}</details>")
    if order[room:]:
        left = ", ".join(quantisation.formats[i].name for i in order[room:])
        drawn.append(f'<p class="quiet">Not drawn, as the maps would be too large: {escaped(left)}.</p>')
    return drawn


def _pair(quantisation: Quantisation, damage: Tensor, index: int) -> str:
    """The maps of keys and values in one format, ``damage`` being ``(layers, 2, heads)``, on one scale."""
    above, name = damage[damage > 0], quantisation.formats[index].name
    low, high = (float(above.quantile(0.02)), float(above.max())) if len(above) else (1.0, 1.0)
    maps = []
    for p, part in enumerate(PARTS):
        said = f"{part}s in {name}"
        values = [[_short(value) for value in line] for line in damage[:, p].tolist()]

        def say(layer: int, head: int, values: list[list[str]] = values, said: str = said) -> str:
            return f"layer {layer}, head {head}, {said}: {quantisation.damage_name} {values[layer][head]}"

        maps.append(f"<figure>{heat_map(damage[:, p].tolist(), said, say, low, high)}</figure>")
    scale = f'<p class="quiet">From {_short(low)} or less (light) to {_short(high)} (dark).</p>'
    return f'<div class="pair">{"".join(maps)}</div>{scale}'


def _changes(quantisation: Quantisation) -> str:
    rows = [row for row in quantisation.rows() if row["actual"] > 0]
    shown = rows[:: -(-len(rows) // _POINTS)] if rows else []
    every = [row[name] for row in shown for name in ("actual", "predicted", "proved")]
    x = Axis.around((row["actual"] for row in shown), "actual change")
    chart = Chart(x, Axis.around(every, "first order, and proved bound"))
    marks = [chart.line([(x.low, x.low), (x.high, x.high)], "axis")]
    for row in shown:
        cell = f"layer {row['layer']}, head {row['head']}, {row['what']}s in {row['format']}"
        said = f"actual {_short(row['actual'])}, first order {_short(row['predicted'])}"
        title = f"{cell}: {said}, proved ≤ {rounded(row['proved'], ROUND_CEILING, 3)}"
        marks.append(chart.dot(row["actual"], row["proved"], title, 2, class_="bound", opacity=0.5))
        marks.append(chart.dot(row["actual"], row["predicted"], title, 2, class_=_CLASS[row["what"]], opacity=0.6))
    left_out = f"<p class='quiet'>{len(shown)} of {len(rows)} shown.</p>" if len(shown) < len(rows) else ""
    return chart.drawn("First order and proved bound against the actual change of every head", marks) + left_out


def _frontier(quantisation: Quantisation) -> str:
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


def _choice(quantisation: Quantisation) -> str:
    if quantisation.allocation is None:
        return ""
    rows = []
    for check in quantisation.checks:
        made = check.allocation
        said = ["–", "–"] if made is None else [f"{made.bits:.4g}", _short(made.damage)]
        perplexity = "–" if check.perplexity is None else f"{check.perplexity:.4g}"
        rows.append([check.name, *said, _short(check.mean), _short(check.error), perplexity])
    head = [
        "run on other windows",
        "bits",
        f"predicted {quantisation.damage_name}",
        quantisation.damage_name,
        "± (s.e.)",
        "perplexity",
    ]
    layers = zip(*(quantisation.allocation.by_layer(part) for part in PARTS), strict=True)
    formats = [[str(layer), *(", ".join(names) for names in some)] for layer, some in enumerate(layers)]
    choice = html_table(["layer", "keys", "values"], formats)
    choice = f"<details><summary>Formats of every layer</summary>{choice}</details>"
    return f"<h3>The choice</h3>{html_table(head, rows)}{choice}"


def _short(value: float) -> str:
    return rounded(value, digits=3)
