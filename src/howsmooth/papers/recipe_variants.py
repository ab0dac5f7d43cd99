"""Other choices of the released scripts: dropout, residual and normalisation, heads cut by rows.

Each choice is tested alone, by σ_max(J) and √‖Jᵀf(X)‖ on the same windows as the attention block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import plain_map
from howsmooth.models import alice, capture, target
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import experiment_model
from howsmooth.papers.figure_style import finish, median_bands, panels
from howsmooth.papers.released_recipe import QUANTITIES, SOURCE, exponents, quantities

_CAUSAL, ENCODER = "random GPT-2, layer 6", "MiniLM, layer 4"
PLACES = {_CAUSAL: (SOURCE, 6), ENCODER: ("minilm", 4)}
_BLOCK = "attention block alone"
VARIANTS = {
    _CAUSAL: (_BLOCK, "dropout on", "residual and LayerNorm in", "heads cut by rows"),
    ENCODER: (_BLOCK, "residual and LayerNorm in"),
}
DROPPED = 0.1
"""The dropout rate of GPT-2, of the attention weights and of the output."""


def cells(options: ExperimentOptions) -> list[Record]:
    """Variants × draws of the weights (the trained encoder has one) × n = 8 … 64."""
    draws, windows = options.pick((1, 2), (3, 3), (5, 10))
    return [
        {"place": stack, "variant": variant, "seed": seed, "n": n, "windows": windows}
        for stack, variants in VARIANTS.items()
        for seed in range(draws if stack == _CAUSAL else 1)
        for variant in variants
        for n in (8, 16, 32, 64)
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Both quantities of one variant, at its input tokens in the windows."""
    source, layer = PLACES[cell["place"]]
    model = experiment_model(source.format(seed=cell["seed"]))
    rows = []
    for number, window in enumerate(model.windows(alice(), length=cell["n"], count=cell["windows"])):
        if cell["variant"] == "residual and LayerNorm in":
            map_, x = target(model, "residual", layer, window)
        else:
            [site] = capture(model.model, model.inputs(window), [layer])
            map_, x = varied(plain_map(site.attention, "this experiment"), cell["variant"], number), site.x
        rows.append({name: cell[name] for name in ("place", "variant", "seed", "n")} | {"window": number})
        rows[-1] |= quantities(map_, x, rtol=1e-2)
    return rows


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
    query, key, value = (
        weight.flatten(0, 1).T for weight in (attention.query_weight, attention.key_weight, attention.value_weight)
    )
    output = attention.output_weight.flatten(0, 1).T
    return hs.SelfAttention(query, key, value, output, heads=attention.heads, mask="causal")


def draw(rows: Rows) -> Figure:
    """One panel per quantity."""
    axes = panels(list(QUANTITIES.values()), "number of tokens n", "value (measured)")
    for ax, name in zip(axes, QUANTITIES, strict=True):
        median_bands(ax, rows, ["place", "variant"], "n", name, "{}: {}", sort=False)
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """Compare the exponents of every variant with that of σ_max of the block (to 0.05)."""
    parts, moved = [], []
    for stack in VARIANTS:
        here = rows[rows["place"] == stack]
        block = exponents(here[here["variant"] == _BLOCK])["sigma"]
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


EXPERIMENT = Experiment(
    "recipe-variants",
    CASTIN,
    "What else differs in the released scripts",
    "If the figures were made with the released scripts: residual and normalisation, dropout, and how heads are cut "
    "make no difference to the growth (not a statement of the paper).",
    "Random GPT-2 layer 6 and MiniLM layer 4, windows of Alice in Wonderland, n = 8 … 64; the draw of dropout is held "
    "fixed, for with a new one in every product there is no single Jacobian.",
    cells,
    run,
    draw,
    judge,
    (1.5, 4, 20),
)
