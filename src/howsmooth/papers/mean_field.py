"""The mean-field regime: for a fixed radius the constant stops growing with n, and it grows exponentially with R²."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import ONE
from howsmooth.papers.figure_style import finish, line, panels
from howsmooth.search import worst_measure

UPPER = {"no mask": "howsmooth.mean_field", "causal": "howsmooth.masked_mean_field"}
SEARCHED = {"n": "worst of n tokens found", "R": "worst of two atoms found"}
LOWER = {"no mask": "howsmooth.two_atom", "causal": "howsmooth.masked_two_atom"}


def cells(options: ExperimentOptions) -> list[Record]:
    """Growth in n at R = 1 (A = −1), and the supremum over measures for several R."""
    lengths = options.pick(
        (2, 8, 32, 128, 512), (2, 4, 8, 16, 32, 64, 128, 256, 512), (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    )
    radii = options.pick(
        (0.5, 1.0, 1.5), (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25)
    )
    settings: list[Record] = []
    for mask in UPPER:
        settings += [{"against": "n", "mask": mask, "n": n, "R": 1.0} for n in lengths]
        settings += [{"against": "R", "mask": mask, "n": None, "R": r} for r in radii]
    return settings


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """The worst sequence of n tokens, or the worst measure with up to two atoms, between the theorems."""
    mask, radius = cell["mask"], cell["R"]
    head = hs.SelfAttention.from_bilinear(-ONE, ONE, mask=None if mask == "no mask" else mask)
    if cell["n"] is None:
        value = worst_measure(
            head, 2, over=hs.sets.Ball(radius), starts=6, steps=options.pick(80, 150, 300), seed=0
        ).value
    else:
        value = hs.worst_case(
            head, cell["n"], over=hs.sets.Ball(radius), starts=4, steps=options.pick(60, 120, 200), seed=0
        ).value
    ends = {"upper": UPPER[mask], "lower": LOWER[mask]}
    return [
        cell | {"value": value} | {end: float(get(name)(head, over=hs.sets.Ball(radius))) for end, name in ends.items()}
    ]


def draw(rows: Rows) -> Figure:
    """Against n and against R."""
    axes = panels(["R = 1, A = −1, V = 1", "worst measure"], "number of tokens n", "largest σ found")
    axes[1].set(xlabel="radius R", ylabel="largest constant in W₂ (d₂ when masked)", xscale="linear")
    axes[1].xaxis.set_major_locator(AutoLocator())
    for ax, against in zip(axes, ("n", "R"), strict=True):
        for number, (mask, some) in enumerate(rows[rows["against"] == against].groupby("mask")):
            line(ax, number, some[against], some["value"], f"{mask}: {SEARCHED[against]} (measured)")
            line(ax, number + 2, some[against], some["upper"], f"{mask}: upper, {UPPER[str(mask)]}", marks=False)
            line(ax, number + 4, some[against], some["lower"], f"{mask}: lower, {LOWER[str(mask)]}", marks=False)
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """n: the last doubling adds little and stays below the bound; R: the logarithm grows by 2γ per unit of R²."""
    inside = bool((rows["value"] <= rows["upper"]).all())
    parts, level = [], []
    for mask, some in rows[rows["against"] == "n"].groupby("mask"):
        last = some.sort_values("n")["value"].to_numpy()
        level.append(last[-1] / last[-2])
        parts.append(f"{mask}: {last[0]:.3g} at n = {some['n'].min():g}, {last[-1]:.3g} at n = {some['n'].max():g}")
    grown = rows[(rows["against"] == "R") & (rows["mask"] == "no mask")].sort_values("R")
    rate = (math.log(grown["value"].iloc[-1]) - math.log(grown["value"].iloc[-2])) / (
        grown["R"].iloc[-1] ** 2 - grown["R"].iloc[-2] ** 2
    )
    return Finding.of(
        inside and max(level) < 1.25 and 0.8 < rate < 1.6,
        f"{'; '.join(parts)} (the last step in n adds {max(level) - 1:.1%} at most). Between the two largest radii "
        f"ln(constant) grows by {rate:.2f} per unit of R² (γ = 1 at width 1). The upper bound is "
        f"{(rows['upper'] / rows['value']).min():.2f} to {(rows['upper'] / rows['value']).max():.3g} times the value.",
    )


EXPERIMENT = Experiment(
    "mean-field",
    CASTIN,
    "Saturation in n and growth in R",
    "On a ball of fixed radius attention is Lipschitz in W₂ with a constant that does not depend on n and grows like "
    "e^{cR²}; with a causal mask the same holds in the conditional distance d₂.",
    "Width 1, A = −1, V = 1: worst sequences of n tokens at R = 1, worst measures with two atoms against R.",
    cells,
    run,
    draw,
    judge,
    (0.3, 1, 5),
)
