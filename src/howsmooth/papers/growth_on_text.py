"""Growth of σ on real text: with the number of tokens, with the radius, and beside residual and normalisation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.models.model_inputs import TokenisedText
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import RANDOM_BERT, RANDOM_GPT2, experiment_model, sites
from howsmooth.papers.figure_style import (
    finish,
    line,
    median_bands,
    model_label,
    panel_groups,
    panels,
    relative_to_smallest,
)

_MODELS = ("minilm", "smollm2", RANDOM_BERT, RANDOM_GPT2)
_LAYERS = {"minilm": 4, "smollm2": 6, "random:bert[layers=7,width=768,heads=12]": 6}
_PARTS = {"attention": "attention block alone", "residual": "with residual and normalisation"}


class GrowthText(Experiment):
    """Growth of the local constant with n on real text: trained and randomly initialised encoders and causal models."""

    id = "growth-text"
    paper = CASTIN
    title = "Growth with n on real text"
    claim = "On real text the local constant of an attention block grows like n^¼, slower than the worst case √n."
    setting = (
        "σ_max of the attention block at windows of Alice in Wonderland (other texts and models can be chosen); in "
        "full every even n to 100 (where special tokens leave room for text), 128, 256 and 512, layers 0, 3 and 6, "
        "ten windows."
    )
    minutes = (0.5, 3, 60)
    takes = frozenset({"models", "text"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Models × lengths; all layers and windows of one are measured together."""
        lengths = options.pick((8, 16, 32, 64), (4, 8, 16, 32, 64, 128), (*range(2, 101, 2), 128, 256, 512))
        models = options.models or options.pick(("minilm", RANDOM_GPT2), _MODELS, (*_MODELS, "mpnet"))
        places = {"layers": options.pick((0, 6), (0, 6), (0, 3, 6)), "windows": options.pick(3, 5, 10)}
        return [{"model": m, "length": n, **places} for m in models for n in lengths]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """σ_max of the attention block (output projection in, residual and normalisation out), ends 10⁻³ apart."""
        model = experiment_model(cell["model"])
        layers = sorted({min(layer, model.model.config.num_hidden_layers - 1) for layer in cell["layers"]})
        if cell["length"] <= len(TokenisedText("", model.processor)):  # special tokens alone are no text
            return
        for window, captured in enumerate(sites(cell["model"], layers, cell["length"], options.text, cell["windows"])):
            for site in captured:
                sigma = hs.measure(site.attention, site.x)
                yield (
                    {"model": cell["model"], "layer": site.layer, "length": cell["length"], "window": window}
                    | {name: float(getattr(sigma, name)) for name in ("value", "lower", "upper")}
                    | {"converged": bool(sigma.converged)}
                )

    def draw(self, rows: Rows) -> Figure:
        """One panel per model: medians with the band over windows, and n^¼ and √n for the eye."""
        rows = relative_to_smallest(rows, ["model", "layer"], "length", "value")
        labels = "number of tokens n", "σ_max(J) ÷ its value at the least n"
        title = lambda model: f"{model_label(model)}, whole attention block"  # noqa: E731
        for ax, here in panel_groups(rows, "model", title, *labels, columns=2):
            median_bands(ax, here, ["layer"], "length", "relative", "layer {}".format)
            lengths = sorted(here.length.unique())
            for number, power, label in (
                (5, 0.25, "n^¼ (the paper's observation)"),
                (6, 0.5, "√n (growth of castin2024, Theorem 3.3)"),
            ):
                line(ax, number, lengths, [(n / lengths[0]) ** power for n in lengths], label, marks=False)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
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


class GrowthRadius(Experiment):
    """The same text at other radii: σ of an attention block when its tokens are scaled to a radius R."""

    id = "growth-radius"
    paper = CASTIN
    title = "Growth with the radius on real text"
    claim = "The constant on B_R grows at most like R² for fixed n, and on real text no faster than that."
    setting = "Windows of 48 tokens at MiniLM layer 4, SmolLM2 layer 6 and random BERT layer 6, scaled by 2⁻⁷ … 2⁷."
    minutes = (0.2, 2, 4)
    takes = frozenset({"models", "text"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Windows of 48 tokens, scaled so that the longest token has length R times that of the text itself."""
        models = options.models or options.pick(("minilm",), tuple(_LAYERS), tuple(_LAYERS))
        factors = [2.0**k for k in options.pick(range(-4, 5, 2), range(-5, 6), range(-7, 8))]
        return [
            {"model": m, "layer": _LAYERS.get(m, 0), "factors": factors, "windows": options.pick(2, 3, 10)}
            for m in models
        ]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """σ_max at c·X, c from far below 1 to far above."""
        for window, [site] in enumerate(sites(cell["model"], [cell["layer"]], 48, options.text, cell["windows"])):
            longest = float(site.x.norm(dim=-1).amax())
            for factor in cell["factors"]:
                value = float(hs.measure(site.attention, factor * site.x).value)
                yield {
                    "model": cell["model"],
                    "window": window,
                    "factor": factor,
                    "R": factor * longest,
                    "sigma": value,
                }

    def draw(self, rows: Rows) -> Figure:
        """σ relative to that of small inputs."""
        (ax,) = panels(
            ["48 tokens of real text, scaled"], "radius R ÷ that of the text", "σ_max(J) ÷ its value at the least R"
        )
        rows = relative_to_smallest(rows, ["model"], "factor", "sigma")
        median_bands(ax, rows, ["model"], "factor", "relative", model_label)
        start = rows.query("factor == 1").groupby("model").relative.median().max()
        factors = sorted(factor for factor in rows.factor.unique() if factor >= 1)
        line(ax, 6, factors, [start * factor**2 for factor in factors], "R² (growth of howsmooth.sqrt_n)", marks=False)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """No window's σ at c times its radius is above c²σ, c > 1; the slopes in between are reported."""
        windows = rows.set_index(["model", "window"])
        text, beyond = windows.query("factor == 1").sigma, windows.query("factor > 1")
        share = (beyond.sigma / beyond.factor**2 / text.reindex(beyond.index)).max()
        steepest, last = 0.0, list[float]()
        for _, some in rows.groupby("model"):
            middle = some.groupby("factor").sigma.median()
            slopes = np.diff(np.log(middle)) / np.diff(np.log(middle.index))
            steepest, last = max(steepest, slopes.max()), [*last, slopes[-1]]
        return Finding.of(
            share <= 1,
            f"at c times the radius of the text, c > 1, σ is at most {share:.2f}·c² times that of the text, in every "
            f"window. Medians grow at most like R^{steepest:.2f} between neighbouring radii, and between the two "
            f"largest like R^{min(last):.2f} to R^{max(last):.2f}.",
        )


class LayerNorm(Experiment):
    """The effect of normalisation: σ of the attention block alone, and with its residual and normalisation."""

    id = "layer-norm"
    paper = CASTIN
    title = "The effect of normalisation and residual"
    claim = "Measuring an attention block with its residual and LayerNorm shows the growth of the attention itself."
    setting = "Layers 0 and 3 of MiniLM (post-norm), random GPT-2 (pre-norm) and SmolLM2 on Alice in Wonderland."
    minutes = (1, 3, 8)
    takes = frozenset({"models", "text"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """A post-norm encoder and a pre-norm causal model."""
        small = ("minilm", "random:gpt2[layers=4]")
        models = options.models or options.pick(small, (*small, "smollm2"), (*small, "smollm2"))
        lengths = options.pick((8, 16, 32), (8, 16, 32, 64), (8, 16, 32, 64, 128))
        return [{"model": m, "length": n, "windows": options.pick(2, 4, 10)} for m in models for n in lengths]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Both parts at the same tokens."""
        scan = hs.scan(
            experiment_model(cell["model"]),
            options.text,
            what="attention,residual",
            lengths=cell["length"],
            windows=cell["windows"],
            layers=(0, 3),
            bounds="none",
            explain=False,
        )
        columns = ("what", "layer", "length", "window", "value", "lower", "upper")
        return [{"model": cell["model"]} | {name: row[name] for name in columns} for row in scan.rows]

    def draw(self, rows: Rows) -> Figure:
        """One panel per part."""
        rows = rows.assign(model=rows.model.map(model_label))
        labels = "number of tokens n", "σ_max(J) (measured)"
        for ax, part in panel_groups(rows, "what", _PARTS.__getitem__, *labels, sort=True):
            median_bands(ax, part, ["model", "layer"], "length", "value", "{}, layer {}".format)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """Compare the ratio and the growth of the two quantities."""
        parts, apart = [], []
        for (model, layer), some in rows.groupby(["model", "layer"]):
            medians = some.pivot_table(index="length", columns="what", values="value", aggfunc="median")
            alone, whole = (
                hs.growth(medians[part].tolist(), medians.index.tolist()).exponent for part in ("attention", "residual")
            )
            sizes = some.groupby("what").value.median()
            apart.append(abs(whole - alone))
            ratio = f"ratio {sizes.residual / sizes.attention:.3g}"
            parts.append(f"{model} layer {layer}: {ratio}, n^{whole:.2f} against n^{alone:.2f}")
        return Finding.of(
            max(apart) < 0.1, f"with residual and normalisation against the block alone: {'; '.join(parts)}."
        )
