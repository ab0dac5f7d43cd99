"""Growth of the local constant with n on real text: trained and randomly initialised encoders and causal models."""

from __future__ import annotations

from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.models.text_windows import TokenisedText
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import RANDOM_BERT, RANDOM_GPT2, experiment_model, sites
from howsmooth.papers.figure_style import finish, line, median_band, model_label, panels

_MODELS = ("minilm", "smollm2", RANDOM_BERT, RANDOM_GPT2)


def cells(options: ExperimentOptions) -> list[Record]:
    """Models × lengths; all layers and windows of one are measured together."""
    lengths = options.pick((8, 16, 32, 64), (4, 8, 16, 32, 64, 128), (*range(2, 101, 2), 128, 256, 512))
    models = options.models or options.pick(("minilm", RANDOM_GPT2), _MODELS, (*_MODELS, "mpnet"))
    places = {"layers": options.pick((0, 6), (0, 6), (0, 3, 6)), "windows": options.pick(3, 5, 10)}
    return [{"model": m, "length": n, **places} for m in models for n in lengths]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """σ_max of the whole attention block (output projection in, residual and normalisation out), ends 10⁻³ apart."""
    model = experiment_model(cell["model"])
    layers = sorted({min(layer, model.model.config.num_hidden_layers - 1) for layer in cell["layers"]})
    rows: list[Record] = []
    if cell["length"] <= len(TokenisedText("", model.processor)):  # special tokens alone are no text
        return rows
    for window, captured in enumerate(sites(cell["model"], layers, cell["length"], options.text, cell["windows"])):
        for site in captured:
            sigma = hs.measure(site.attention, site.x)
            rows.append(
                {"model": cell["model"], "layer": site.layer, "length": cell["length"], "window": window}
                | {name: float(getattr(sigma, name)) for name in ("value", "lower", "upper")}
                | {"converged": bool(sigma.converged)}
            )
    return rows


def draw(rows: Rows) -> Figure:
    """One panel per model: medians with the median_band over windows, and n^¼ and √n for the eye."""
    models = list(rows["model"].unique())
    titles = [f"{model_label(model)}, whole attention block" for model in models]
    axes = panels(titles, "number of tokens n", "σ_max(J) ÷ its value at the least n", columns=2)
    for ax, model in zip(axes, models, strict=True):
        here = rows[rows["model"] == model]
        for number, (layer, some) in enumerate(here.groupby("layer")):
            first = some[some["length"] == some["length"].min()]["value"].median()
            median_band(ax, number, some.assign(scaled=some["value"] / first), "length", "scaled", f"layer {layer}")
        lengths = sorted(here["length"].unique())
        for number, power, label in (
            (5, 0.25, "n^¼ (the paper's observation)"),
            (6, 0.5, "√n (growth of castin2024, Theorem 3.3)"),
        ):
            line(ax, number, lengths, [(n / lengths[0]) ** power for n in lengths], label, marks=False)
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """The exponent of every model and layer, with its interval over windows."""
    parts, exponents = [], []
    for (model, layer), some in rows.groupby(["model", "layer"]):
        table = some.pivot_table(index="length", columns="window", values="value").dropna(axis=1)
        grown = hs.growth(table.to_numpy().tolist(), table.index.tolist())
        low, high = grown.interval or (grown.exponent, grown.exponent)
        exponents.append(grown.exponent)
        parts.append(f"{model} layer {layer}: n^{grown.exponent:.2f} [{low:.2f}, {high:.2f}]")
    near = all(0.15 <= exponent <= 0.35 for exponent in exponents)
    measured = f"exponents with 95 % intervals over windows: {'; '.join(parts)}."
    return Finding.of(near, measured, other_constant=max(exponents) < 0.5)


EXPERIMENT = Experiment(
    "growth-text",
    CASTIN,
    "Growth with n on real text",
    "On real text the local constant of an attention block grows like n^¼, slower than the worst case √n.",
    "σ_max of the attention block at windows of Alice in Wonderland (other texts and models can be chosen); in full "
    "every even n to 100 (where special tokens leave room for text), 128, 256 and 512, layers 0, 3 and 6, ten windows.",
    cells,
    run,
    draw,
    judge,
    (0.5, 3, 60),
    frozenset({"models", "text"}),
)
