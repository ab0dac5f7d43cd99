"""What normalisation does: σ of the attention block alone, behind its normalisation, and with the residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.papers.experiment import CASTIN, Asked, Cell, Experiment, Finding, Row, Verdict
from howsmooth.papers.experiment_inputs import opened
from howsmooth.papers.figure_style import finish, panels, short, spread

LAYERS = (0, 3)
PARTS = {"attention": "attention block alone", "residual": "with residual and normalisation"}


def cells(asked: Asked) -> Sequence[Cell]:
    """A post-norm encoder and a pre-norm causal model."""
    models = asked.models or asked.pick(
        ("minilm", "random:gpt2[layers=4]"),
        ("minilm", "random:gpt2[layers=4]", "smollm2"),
        ("minilm", "random:gpt2[layers=4]", "smollm2"),
    )
    lengths = asked.pick((8, 16, 32), (8, 16, 32, 64), (8, 16, 32, 64, 128))
    return [{"model": m, "length": n, "windows": asked.pick(2, 4, 10)} for m in models for n in lengths]


def run(asked: Asked, cell: Cell) -> list[Row]:
    """Both parts at the same tokens."""
    options: dict[str, Any] = {"lengths": cell["length"], "windows": cell["windows"], "layers": LAYERS}
    options |= {"bounds": "none", "explain": False}
    scan = hs.scan(opened(cell["model"]), asked.text, what="attention,residual", **options)
    kept = ("what", "layer", "length", "window", "value", "lower", "upper")
    return [{"model": cell["model"]} | {name: row[name] for name in kept} for row in scan.rows]


def draw(rows: pandas.DataFrame) -> Figure:
    """One panel per part."""
    figure, axes = panels(list(PARTS.values()), "number of tokens n", "σ_max(J) (measured)")
    for ax, quantity in zip(axes, PARTS, strict=True):
        some = rows[rows["what"] == quantity]
        for number, ((model, layer), one) in enumerate(some.groupby(["model", "layer"])):
            spread(ax, number, one, "length", "value", f"{short(str(model))}, layer {layer}")
    finish(*axes)
    return figure


def judge(rows: pandas.DataFrame) -> Finding:
    """How far the two quantities lie apart, and whether they grow alike."""
    said, apart = [], []
    for (model, layer), some in rows.groupby(["model", "layer"]):
        grown = {}
        for quantity in PARTS:
            middle = some[some["what"] == quantity].groupby("length")["value"].median()
            grown[quantity] = hs.growth(middle.tolist(), middle.index.tolist()).exponent
        ratio = some[some["what"] == "residual"]["value"].median() / some[some["what"] == "attention"]["value"].median()
        apart.append(abs(grown["residual"] - grown["attention"]))
        said.append(
            f"{model} layer {layer}: ratio {ratio:.3g}, n^{grown['residual']:.2f} against n^{grown['attention']:.2f}"
        )
    return Finding(
        Verdict.CONFIRMED if max(apart) < 0.1 else Verdict.NOT_CONFIRMED,
        f"with residual and normalisation against the block alone: {'; '.join(said)}.",
    )


EXPERIMENT = Experiment(
    "layer-norm",
    CASTIN,
    "The effect of normalisation and residual",
    "Measuring an attention block with its residual and LayerNorm shows the growth of the attention itself.",
    "Layers 0 and 3 of MiniLM (post-norm), random GPT-2 (pre-norm) and SmolLM2 on Alice in Wonderland.",
    cells,
    run,
    draw,
    judge,
    (1, 3, 8),
    frozenset({"models", "text"}),
)
