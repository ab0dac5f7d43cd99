"""The same text at other radii: σ of an attention block when its tokens are scaled to a radius R."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import sites
from howsmooth.papers.figure_style import finish, line, median_band, model_label, panels

_MODELS = {"minilm": 4, "smollm2": 6, "random:bert[layers=7,width=768,heads=12]": 6}


def cells(options: ExperimentOptions) -> list[Record]:
    """Windows of 48 tokens, scaled so that the longest token has length R times that of the text itself."""
    models = options.models or options.pick(("minilm",), tuple(_MODELS), tuple(_MODELS))
    factors = [2.0**k for k in options.pick(range(-4, 5, 2), range(-5, 6), range(-7, 8))]
    return [
        {"model": m, "layer": _MODELS.get(m, 0), "factors": factors, "windows": options.pick(2, 3, 10)} for m in models
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """σ_max at c·X, c from far below 1 to far above."""
    rows = []
    for window, [site] in enumerate(sites(cell["model"], [cell["layer"]], 48, options.text, cell["windows"])):
        longest = float(site.x.norm(dim=-1).amax())
        for factor in cell["factors"]:
            value = float(hs.measure(site.attention, factor * site.x).value)
            rows.append(
                {"model": cell["model"], "window": window, "factor": factor, "R": factor * longest, "sigma": value}
            )
    return rows


def draw(rows: Rows) -> Figure:
    """σ relative to that of small inputs."""
    (ax,) = panels(
        ["48 tokens of real text, scaled"], "radius R ÷ that of the text", "σ_max(J) ÷ its value at the least R"
    )
    start = 0.0
    for number, (model, some) in enumerate(rows.groupby("model")):
        first = some[some["factor"] == some["factor"].min()]["sigma"].median()
        median_band(ax, number, some.assign(scaled=some["sigma"] / first), "factor", "scaled", model_label(str(model)))
        medians = some[some["factor"] >= 1].assign(scaled=some["sigma"] / first).groupby("factor")["scaled"].median()
        start = max(start, medians.iloc[0])
    factors = sorted(factor for factor in rows["factor"].unique() if factor >= 1)
    line(ax, 6, factors, [start * factor**2 for factor in factors], "R² (growth of howsmooth.sqrt_n)", marks=False)
    return finish(ax)


def judge(rows: Rows) -> Finding:
    """No window's σ at c times its radius is above c²σ, c > 1; the slopes in between are reported."""
    text = rows[rows["factor"] == 1].set_index(["model", "window"])["sigma"]
    beyond = rows[rows["factor"] > 1].set_index(["model", "window"])
    share = float((beyond["sigma"] / beyond["factor"] ** 2 / text.reindex(beyond.index)).max())
    steepest, last = 0.0, list[float]()
    for _, some in rows.groupby("model"):
        middle = some.groupby("factor")["sigma"].median()
        slopes = np.diff(np.log(middle)) / np.diff(np.log(middle.index))
        steepest, last = max(steepest, slopes.max()), [*last, slopes[-1]]
    return Finding.of(
        share <= 1,
        f"at c times the radius of the text, c > 1, σ is at most {share:.2f}·c² times that of the text, in every "
        f"window. Medians grow at most like R^{steepest:.2f} between neighbouring radii, and between the two largest "
        f"like R^{min(last):.2f} to R^{max(last):.2f}.",
    )


EXPERIMENT = Experiment(
    "growth-radius",
    CASTIN,
    "Growth with the radius on real text",
    "The constant on B_R grows at most like R² for fixed n, and on real text no faster than that.",
    "Windows of 48 tokens at MiniLM layer 4, SmolLM2 layer 6 and random BERT layer 6, scaled by 2⁻⁷ … 2⁷.",
    cells,
    run,
    draw,
    judge,
    (0.2, 2, 4),
    frozenset({"models", "text"}),
)
