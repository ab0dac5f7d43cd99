"""The released scripts of Castin et al.: the quantity that they compute, and their other choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import plain_map
from howsmooth.models import alice, capture, target
from howsmooth.norms.local_constant import solve
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import experiment_model
from howsmooth.papers.figure_style import finish, median_band, median_bands, panels

SOURCE = "random:gpt2[layers=12,width=768,heads=12,seed={seed}]"
QUANTITIES = {"sigma": "σ_max(J)", "released": "√‖Jᵀf(X)‖, the released recipe"}


class ReleasedRecipe(Experiment):
    """The quantity of the released scripts, √‖Jᵀf(X)‖, beside σ_max(J) on the same inputs."""

    id = "released-recipe"
    paper = CASTIN
    title = "What the released scripts return"
    claim = "The growth near n^¼ reported for randomly initialised GPT-2 is that of the local Lipschitz constant."
    setting = "Random GPT-2, layer 6, attention block alone, dropout off, windows of Alice in Wonderland, n = 8 … 64."
    minutes = (0.3, 1.5, 6)

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Randomly initialised GPT-2, layer 6, n = 8 … 64, dropout off."""
        return [{"seed": s, "n": n} for s in range(options.pick(2, 5, 10)) for n in (8, 16, 32, 64)]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Both quantities for the attention block alone, at its input tokens."""
        model = experiment_model(SOURCE.format(seed=cell["seed"]))
        for number, window in enumerate(model.windows(alice(), length=cell["n"], count=options.pick(2, 5, 10))):
            site = capture(model.model, model.inputs(window), [6])[0]
            yield cell | {"window": number} | quantities(site.attention, site.x)

    def draw(self, rows: Rows) -> Figure:
        """Both quantities against n."""
        (ax,) = panels(["Random GPT-2, layer 6"], "number of tokens n", "value (measured)")
        for number, (name, label) in enumerate(QUANTITIES.items()):
            median_band(ax, number, rows, "n", name, label)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """Compare the growth of σ_max with that of the recipe's quantity."""
        alphas = exponents(rows)
        return Finding.of(
            abs(alphas["sigma"] - alphas["released"]) < 0.05,
            f"exponent of σ_max {alphas['sigma']:.3f}, of √‖Jᵀf(X)‖ {alphas['released']:.3f}, on the same inputs. The "
            "second is what the released scripts compute; whether it is what the printed figures show is not known.",
        )


def quantities(attention: AttentionMap | Callable[[Tensor], Tensor], x: Tensor, rtol: float = 1e-3) -> dict[str, float]:
    """Return σ_max(J), and √‖Jᵀf(X)‖: a power iteration with the primal output in place of the product."""
    j = hs.jacobian(attention, x)
    with torch.no_grad():
        back = j.rmatvec(attention(x))
    return {"sigma": float(solve(j, rtol=rtol).value), "released": float(back.norm().sqrt())}


def exponents(rows: Rows) -> dict[str, float]:
    """α of value ≈ c·n^α for both."""
    alphas = {}
    for name in QUANTITIES:
        table = rows.groupby("n")[name].apply(list)
        alphas[name] = hs.growth(table.tolist(), table.index.tolist(), paired=False).exponent
    return alphas


_CAUSAL, ENCODER = "random GPT-2, layer 6", "MiniLM, layer 4"
PLACES = {_CAUSAL: (SOURCE, 6), ENCODER: ("minilm", 4)}
_BLOCK = "attention block alone"
VARIANTS = {
    _CAUSAL: (_BLOCK, "dropout on", "residual and LayerNorm in", "heads cut by rows"),
    ENCODER: (_BLOCK, "residual and LayerNorm in"),
}
DROPPED = 0.1
"""The dropout rate of GPT-2, of the attention weights and of the output."""


class RecipeVariants(Experiment):
    """Other choices of the released scripts: dropout, residual and normalisation, heads cut by rows.

    Each choice is tested alone, by σ_max(J) and √‖Jᵀf(X)‖ on the same windows as the attention block.
    """

    id = "recipe-variants"
    paper = CASTIN
    title = "What else differs in the released scripts"
    claim = (
        "If the figures were made with the released scripts: residual and normalisation, dropout, and how heads are "
        "cut make no difference to the growth (not a statement of the paper)."
    )
    setting = (
        "Random GPT-2 layer 6 and MiniLM layer 4, windows of Alice in Wonderland, n = 8 … 64; the draw of dropout is "
        "held fixed, for with a new one in every product there is no single Jacobian."
    )
    minutes = (1.5, 4, 20)

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Variants × draws of the weights (the trained encoder has one) × n = 8 … 64."""
        draws, windows = options.pick((1, 2), (3, 3), (5, 10))
        return [
            {"place": stack, "variant": variant, "seed": seed, "n": n, "windows": windows}
            for stack, variants in VARIANTS.items()
            for seed in range(draws if stack == _CAUSAL else 1)
            for variant in variants
            for n in (8, 16, 32, 64)
        ]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Both quantities of one variant, at its input tokens in the windows."""
        source, layer = PLACES[cell["place"]]
        model = experiment_model(source.format(seed=cell["seed"]))
        for number, window in enumerate(model.windows(alice(), length=cell["n"], count=cell["windows"])):
            if cell["variant"] == "residual and LayerNorm in":
                map_, x = target(model, "residual", layer, window)
            else:
                [site] = capture(model.model, model.inputs(window), [layer])
                map_, x = varied(plain_map(site.attention, "this experiment"), cell["variant"], number), site.x
            common = {name: cell[name] for name in ("place", "variant", "seed", "n")}
            yield common | {"window": number} | quantities(map_, x, rtol=1e-2)

    def draw(self, rows: Rows) -> Figure:
        """One panel per quantity."""
        axes = panels(list(QUANTITIES.values()), "number of tokens n", "value (measured)")
        for ax, name in zip(axes, QUANTITIES, strict=True):
            median_bands(ax, rows, ["place", "variant"], "n", name, "{}: {}".format, sort=False)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """Compare the exponents of every variant with that of σ_max of the block (to 0.05)."""
        parts, moved = [], []
        for stack in VARIANTS:
            here = rows[rows.place == stack]
            block = exponents(here[here.variant == _BLOCK])["sigma"]
            for variant, some in here.groupby("variant", sort=False):
                alphas = exponents(some)
                moved += [value for value in alphas.values() if abs(value - block) >= 0.05]
                parts.append(f"{stack}, {variant}: {alphas['sigma']:.2f} and {alphas['released']:.2f}")
        return Finding.of(
            not moved,
            f"exponents of σ_max(J) and of √‖Jᵀf(X)‖: {'; '.join(parts)}. {len(moved)} of {2 * len(parts)} are 0.05 or "
            "more from that of σ_max(J) of the block. Which of these choices stand behind the printed figures is not "
            "known.",
        )


def varied(attention: AttentionMap, variant: str, seed: int) -> AttentionMap | Callable[[Tensor], Tensor]:
    """Return the block itself, with dropout, or with transposed weights."""
    if variant == "dropout on":
        return with_dropout(attention, seed)
    return cut_by_rows(attention) if variant == "heads cut by rows" else attention


def with_dropout(attention: AttentionMap, seed: int) -> Callable[[Tensor], Tensor]:
    """Return the block in training mode with one fixed draw of dropout."""

    def function(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        weights, values = attention.weights(x), attention.project(x[None])[2][0]
        mixed = (weights * dropout_factors(weights.shape, generator)) @ values
        out = (mixed @ attention.output_weight).sum(0)
        out = out if attention.output_bias is None else out + attention.output_bias
        return out * dropout_factors(out.shape, generator)

    return function


def dropout_factors(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw the factors of dropout: 0 with probability `DROPPED`, else 1/(1 − `DROPPED`)."""
    return (torch.rand(shape, generator=generator) >= DROPPED).float() / (1 - DROPPED)


def cut_by_rows(attention: AttentionMap) -> hs.SelfAttention:
    """Read the weights as outputs × inputs; GPT-2 stores inputs × outputs, so that heads become rows of W."""
    weights = attention.query_weight, attention.key_weight, attention.value_weight, attention.output_weight
    return hs.SelfAttention(*(weight.flatten(0, 1).T for weight in weights), heads=attention.heads, mask="causal")
