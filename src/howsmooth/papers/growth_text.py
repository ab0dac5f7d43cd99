"""Growth of the local constant with n on real text: trained and randomly initialised encoders and causal models."""

from __future__ import annotations

from collections.abc import Sequence

import pandas
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.papers.experiment import CASTIN, Asked, Cell, Experiment, Finding, Row, Verdict
from howsmooth.papers.pictures import finish, line, panels, short, spread
from howsmooth.papers.sources import RANDOM_BERT, RANDOM_GPT2, opened

MODELS = ("minilm", "smollm2", RANDOM_BERT, RANDOM_GPT2)
LAYERS = (0, 6)


def cells(asked: Asked) -> Sequence[Cell]:
    """Models × layers; all lengths and windows of one are measured together."""
    lengths = asked.pick("8,16,32,64", "4,8,16,32,64,128", ",".join(map(str, [*range(2, 101, 2), 128, 256, 512])))
    models = asked.models or asked.pick(("minilm", RANDOM_GPT2), MODELS, (*MODELS, "mpnet"))
    windows = asked.pick(3, 5, 10)
    return [{"model": m, "layer": k, "lengths": lengths, "windows": windows} for m in models for k in LAYERS]


def run(asked: Asked, cell: Cell) -> list[Row]:
    """σ_max of the whole attention block (output projection in, residual and normalisation out), certified to 10⁻³."""
    model = opened(cell["model"])
    layer = min(cell["layer"], model.model.config.num_hidden_layers - 1)
    scan = hs.scan(
        model,
        asked.text,
        lengths=cell["lengths"],
        windows=cell["windows"],
        layers=str(layer),
        what="attention",
        bounds="none",
        explain=False,
    )
    kept = ("length", "window", "value", "lower", "upper", "converged")
    return [{"model": cell["model"], "layer": layer} | {name: row[name] for name in kept} for row in scan.rows]


def draw(rows: pandas.DataFrame) -> Figure:
    """Medians with the spread over windows, and n^¼ for the eye."""
    figure, axes = panels(
        ["Whole attention block on real text"], "number of tokens n", "σ_max(J) ÷ its value at the least n"
    )
    ax = axes[0]
    for number, ((model, layer), some) in enumerate(rows.groupby(["model", "layer"])):
        first = some[some["length"] == some["length"].min()]["value"].median()
        spread(
            ax, number, some.assign(scaled=some["value"] / first), "length", "scaled", f"{short(model)}, layer {layer}"
        )
    lengths = sorted(rows["length"].unique())
    line(ax, 5, lengths, [(n / lengths[0]) ** 0.25 for n in lengths], "n^¼ (the paper's observation)", marks=False)
    line(
        ax,
        6,
        lengths,
        [(n / lengths[0]) ** 0.5 for n in lengths],
        "√n (growth of castin2024, Theorem 3.3)",
        marks=False,
    )
    finish(ax)
    return figure


def judge(rows: pandas.DataFrame) -> Finding:
    """The exponent of every model and layer, with its interval over windows."""
    said, exponents = [], []
    for (model, layer), some in rows.groupby(["model", "layer"]):
        table = some.pivot_table(index="length", columns="window", values="value").dropna(axis=1)
        grown = hs.growth(table.to_numpy().tolist(), table.index.tolist())
        low, high = grown.interval or (grown.exponent, grown.exponent)
        exponents.append(grown.exponent)
        said.append(f"{model} layer {layer}: n^{grown.exponent:.2f} [{low:.2f}, {high:.2f}]")
    slow = max(exponents) < 0.5
    near = all(0.15 <= exponent <= 0.35 for exponent in exponents)
    verdict = Verdict.CONFIRMED if near else Verdict.OTHER_CONSTANT if slow else Verdict.NOT_CONFIRMED
    return Finding(verdict, f"exponents with 95 % intervals over windows: {'; '.join(said)}.")


EXPERIMENT = Experiment(
    "growth-text",
    CASTIN,
    "Growth with n on real text",
    "On real text the local constant of an attention block grows like n^¼, slower than the worst case √n.",
    "σ_max of the attention block at windows of Alice in Wonderland (other texts and models can be chosen).",
    cells,
    run,
    draw,
    judge,
    (0.5, 3, 240),
    frozenset({"models", "text"}),
)
