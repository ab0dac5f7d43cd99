"""The effect of normalisation: σ of the attention block alone, and with its residual and normalisation."""

from __future__ import annotations

from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import experiment_model
from howsmooth.papers.figure_style import finish, median_bands, model_label, panels

LAYERS = (0, 3)
_PARTS = {"attention": "attention block alone", "residual": "with residual and normalisation"}


def cells(options: ExperimentOptions) -> list[Record]:
    """A post-norm encoder and a pre-norm causal model."""
    models = options.models or options.pick(
        ("minilm", "random:gpt2[layers=4]"),
        ("minilm", "random:gpt2[layers=4]", "smollm2"),
        ("minilm", "random:gpt2[layers=4]", "smollm2"),
    )
    lengths = options.pick((8, 16, 32), (8, 16, 32, 64), (8, 16, 32, 64, 128))
    return [{"model": m, "length": n, "windows": options.pick(2, 4, 10)} for m in models for n in lengths]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Both parts at the same tokens."""
    window: Record = {"lengths": cell["length"], "windows": cell["windows"], "layers": LAYERS}
    window |= {"bounds": "none", "explain": False}
    scan = hs.scan(experiment_model(cell["model"]), options.text, what="attention,residual", **window)
    columns = ("what", "layer", "length", "window", "value", "lower", "upper")
    return [{"model": cell["model"]} | {name: row[name] for name in columns} for row in scan.rows]


def draw(rows: Rows) -> Figure:
    """One panel per part."""
    rows = rows.assign(model=rows["model"].map(model_label))
    axes = panels(list(_PARTS.values()), "number of tokens n", "σ_max(J) (measured)")
    for ax, quantity in zip(axes, _PARTS, strict=True):
        median_bands(ax, rows[rows["what"] == quantity], ["model", "layer"], "length", "value", "{}, layer {}")
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """Compare the ratio and the growth of the two quantities."""
    parts, apart = [], []
    for (model, layer), some in rows.groupby(["model", "layer"]):
        grown = {}
        for quantity in _PARTS:
            middle = some[some["what"] == quantity].groupby("length")["value"].median()
            grown[quantity] = hs.growth(middle.tolist(), middle.index.tolist()).exponent
        ratio = some[some["what"] == "residual"]["value"].median() / some[some["what"] == "attention"]["value"].median()
        apart.append(abs(grown["residual"] - grown["attention"]))
        parts.append(
            f"{model} layer {layer}: ratio {ratio:.3g}, n^{grown['residual']:.2f} against n^{grown['attention']:.2f}"
        )
    return Finding.of(
        max(apart) < 0.1,
        f"with residual and normalisation against the block alone: {'; '.join(parts)}.",
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
