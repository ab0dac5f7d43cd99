"""The quantity of the released scripts, √‖Jᵀf(X)‖, beside σ_max(J) on the same inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.models import alice, capture
from howsmooth.norms.local_constant import solve
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import experiment_model
from howsmooth.papers.figure_style import finish, median_band, panels

SOURCE, LAYER = "random:gpt2[layers=12,width=768,heads=12,seed={seed}]", 6
QUANTITIES = {"sigma": "σ_max(J)", "released": "√‖Jᵀf(X)‖, the released recipe"}


def cells(options: ExperimentOptions) -> list[Record]:
    """Randomly initialised GPT-2, layer 6, n = 8 … 64, dropout off."""
    return [{"seed": s, "n": n} for s in range(options.pick(2, 5, 10)) for n in (8, 16, 32, 64)]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Both quantities for the attention block alone, at its input tokens."""
    model = experiment_model(SOURCE.format(seed=cell["seed"]))
    rows = []
    for number, window in enumerate(model.windows(alice(), length=cell["n"], count=options.pick(2, 5, 10))):
        site = capture(model.model, model.inputs(window), [LAYER])[0]
        rows.append(cell | {"window": number} | quantities(site.attention, site.x))
    return rows


def quantities(attention: AttentionMap | Callable[[Tensor], Tensor], x: Tensor, rtol: float = 1e-3) -> dict[str, float]:
    """Return σ_max(J), and √‖Jᵀf(X)‖: a power iteration with the primal output in place of the product."""
    j = hs.jacobian(attention, x)
    with torch.no_grad():
        back = j.rmatvec(attention(x))
    return {"sigma": float(solve(j, rtol=rtol).value), "released": float(back.norm().sqrt())}


def draw(rows: Rows) -> Figure:
    """Both quantities against n."""
    (ax,) = panels(["Random GPT-2, layer 6"], "number of tokens n", "value (measured)")
    for number, (name, label) in enumerate(QUANTITIES.items()):
        median_band(ax, number, rows, "n", name, label)
    return finish(ax)


def exponents(rows: Rows) -> dict[str, float]:
    """α of value ≈ c·n^α for both."""
    alphas = {}
    for name in QUANTITIES:
        table = rows.groupby("n")[name].apply(list)
        alphas[name] = hs.growth(table.tolist(), table.index.tolist(), paired=False).exponent
    return alphas


def judge(rows: Rows) -> Finding:
    """Compare the growth of σ_max with that of the recipe's quantity."""
    alphas = exponents(rows)
    alike = abs(alphas["sigma"] - alphas["released"]) < 0.05
    return Finding.of(
        alike,
        f"exponent of σ_max {alphas['sigma']:.3f}, of √‖Jᵀf(X)‖ {alphas['released']:.3f}, on the same inputs. The "
        "second is what the released scripts compute; whether it is what the printed figures show is not known.",
    )


EXPERIMENT = Experiment(
    "released-recipe",
    CASTIN,
    "What the released scripts return",
    "The growth near n^¼ reported for randomly initialised GPT-2 is that of the local Lipschitz constant.",
    "Random GPT-2, layer 6, attention block alone, dropout off, windows of Alice in Wonderland, n = 8 … 64.",
    cells,
    run,
    draw,
    judge,
    (0.3, 1.5, 6),
)
