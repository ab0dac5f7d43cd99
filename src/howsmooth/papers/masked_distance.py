"""Masked attention on measures: Lipschitz in the conditional distance d₂, and not in the plain Wasserstein distance."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.meanfield import Measure, conditional, push
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, panels, reference_line

GRAINS = 2**16


def cells(options: ExperimentOptions) -> list[Record]:
    """Random pairs of measures on (position, token)."""
    return [{"seed": seed, "pairs": 10} for seed in range(options.pick(4, 20, 200))]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Ratio of distances after and before causal attention, in d₂, over the bound."""
    generator = torch.Generator().manual_seed(cell["seed"])
    rows = []
    for pair in range(cell["pairs"]):
        width, radius = 1 + pair % 3, 0.3 + 1.2 * float(torch.rand(1, generator=generator))
        a, v = (torch.randn(width, width, dtype=torch.float64, generator=generator) for _ in range(2))
        a = a / torch.linalg.matrix_norm(a, 2) / radius**2
        head = hs.SelfAttention.from_bilinear(a, v, mask="causal")
        first, second = (_drawn(generator, width, radius) for _ in range(2))
        before = float(conditional(first, second))
        after = float(conditional(push(head, first), push(head, second)))
        rows.append(
            {"seed": cell["seed"], "pair": pair, "before": before, "after": after}
            | {"bound": float(get("howsmooth.masked_mean_field")(head, over=hs.sets.Ball(radius)))}
        )
    return rows


def _drawn(generator: torch.Generator, width: int, radius: float) -> Measure:
    """Four positions of equal mass with two atoms each, in the ball."""
    x = torch.randn(8, width, dtype=torch.float64, generator=generator)
    x = radius * x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)
    first = torch.randint(1, GRAINS // 4, (4,), generator=generator).double() / GRAINS
    weights = torch.stack([first, 0.25 - first], 1).flatten()
    return Measure(x, weights, torch.arange(4, dtype=torch.float64).repeat_interleave(2) / 3)


def draw(rows: Rows) -> Figure:
    """Distance after against distance before, and the ratio over the bound."""
    (ax,) = panels(["Pairs of masked measures"], "d₂ before attention", "d₂ after ÷ (bound × before)", log="y")
    ax.scatter(
        rows["before"], rows["after"] / rows["before"] / rows["bound"], s=10, color="#0072B2", label="pairs (measured)"
    )
    reference_line(ax, 1, "upper: howsmooth.masked_mean_field")
    return finish(ax)


def judge(rows: Rows) -> Finding:
    """No pair above the bound."""
    share = rows["after"] / rows["before"] / rows["bound"]
    return Finding.of(
        bool((share <= 1 + 1e-9).all()),
        f"{len(rows)} pairs: d₂ grows by at most {(rows['after'] / rows['before']).max():.3g}, at most "
        f"{share.max():.1%} of the theorem's constant; none is above.",
    )


EXPERIMENT = Experiment(
    "masked-distance",
    CASTIN,
    "The conditional distance of masked measures",
    "Causal attention is Lipschitz on measures over (position, token) in the conditional optimal-transport distance "
    "d₂, which only moves mass within a position.",
    "Random heads of width 1 to 3 and pairs of measures with four positions, distances by POT.",
    cells,
    run,
    draw,
    judge,
    (0.1, 0.1, 0.5),
)
