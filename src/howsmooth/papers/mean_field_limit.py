"""Attention on measures: the constant of long sequences, and the distance in which masked attention is Lipschitz."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator

import howsmooth as hs
from howsmooth.meanfield import Measure, conditional, push
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import ONE, bound_values
from howsmooth.papers.figure_style import COLOURS, finish, line, panels, reference_line
from howsmooth.search import MeasureWitness, worst_measure

UPPER = {"no mask": "howsmooth.mean_field", "causal": "howsmooth.masked_mean_field"}
SEARCHED = {"n": "worst of n tokens found", "R": "worst of two atoms found"}
LOWER = {"no mask": "howsmooth.two_atom", "causal": "howsmooth.masked_two_atom"}
_GRAINS = 2**16


class MeanField(Experiment):
    """The mean-field regime: at a fixed radius the constant stops growing with n, and grows exponentially with R²."""

    id = "mean-field"
    paper = CASTIN
    title = "Saturation in n and growth in R"
    claim = (
        "On a ball of fixed radius attention is Lipschitz in W₂ with a constant that does not depend on n and grows "
        "like e^{cR²}; with a causal mask the same holds in the conditional distance d₂."
    )
    setting = "Width 1, A = −1, V = 1: worst sequences of n tokens at R = 1, worst measures with two atoms against R."
    minutes = (0.3, 1, 5)

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Growth in n at R = 1 (A = −1), and the supremum over measures for several R."""
        lengths = [2**k for k in options.pick(range(1, 10, 2), range(1, 10), range(1, 12))]
        radii = [k / 4 for k in options.pick(range(2, 7, 2), range(2, 8), range(2, 10))]
        settings: list[Record] = []
        for mask in UPPER:
            settings += [{"against": "n", "mask": mask, "n": n, "R": 1.0} for n in lengths]
            settings += [{"against": "R", "mask": mask, "n": None, "R": r} for r in radii]
        return settings

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """The worst sequence of n tokens, or the worst measure with up to two atoms, between the theorems."""
        mask, ball = cell["mask"], hs.sets.Ball(cell["R"])
        head = hs.SelfAttention.from_bilinear(-ONE, ONE, mask=None if mask == "no mask" else mask)
        found: hs.Witness | MeasureWitness
        if cell["n"] is None:
            found = worst_measure(head, 2, over=ball, starts=6, steps=options.pick(80, 150, 300), seed=0)
        else:
            found = hs.worst_case(head, cell["n"], over=ball, starts=4, steps=options.pick(60, 120, 200), seed=0)
        ends = {"upper": UPPER[mask], "lower": LOWER[mask]}
        yield cell | {"value": found.value} | bound_values(ends, head, over=ball)

    def draw(self, rows: Rows) -> Figure:
        """Against n and against R."""
        axes = panels(["R = 1, A = −1, V = 1", "worst measure"], "number of tokens n", "largest σ found")
        axes[1].set(xlabel="radius R", ylabel="largest constant in W₂ (d₂ when masked)", xscale="linear")
        axes[1].xaxis.set_major_locator(AutoLocator())
        for ax, against in zip(axes, ("n", "R"), strict=True):
            for number, (mask, some) in enumerate(rows[rows.against == against].groupby("mask")):
                x = some[against]
                line(ax, number, x, some.value, f"{mask}: {SEARCHED[against]} (measured)")
                line(ax, number + 2, x, some.upper, f"{mask}: upper, {UPPER[str(mask)]}", marks=False)
                line(ax, number + 4, x, some.lower, f"{mask}: lower, {LOWER[str(mask)]}", marks=False)
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """n: the last doubling adds little and stays below the bound; R: the logarithm grows by 2γ per unit of R²."""
        parts, level = [], []
        for mask, some in rows.query("against == 'n'").sort_values("n").groupby("mask"):
            values = some.set_index("n").value
            level.append(values.iloc[-1] / values.iloc[-2])
            first, last = (f"{values[n]:.3g} at n = {n:g}" for n in (values.index[0], values.index[-1]))
            parts.append(f"{mask}: {first}, {last}")
        grown = rows.query("against == 'R' and mask == 'no mask'").sort_values("R")
        rate = float(np.diff(np.log(grown.value))[-1] / np.diff(grown.R**2)[-1])
        ratio = rows.upper / rows.value
        return Finding.of(
            ratio.min() >= 1 and max(level) < 1.25 and 0.8 < rate < 1.6,
            f"{'; '.join(parts)} (the last step in n adds {max(level) - 1:.1%} at most). Between the two largest radii "
            f"ln(constant) grows by {rate:.2f} per unit of R² (γ = 1 at width 1). The upper bound is "
            f"{ratio.min():.2f} to {ratio.max():.3g} times the value.",
        )


class MaskedDistance(Experiment):
    """Masked attention on measures: Lipschitz in the conditional distance d₂, not in the plain Wasserstein distance."""

    id = "masked-distance"
    paper = CASTIN
    title = "The conditional distance of masked measures"
    claim = (
        "Causal attention is Lipschitz on measures over (position, token) in the conditional optimal-transport "
        "distance d₂, which only moves mass within a position."
    )
    setting = "Random heads of width 1 to 3 and pairs of measures with four positions, distances by POT."
    minutes = (0.1, 0.1, 0.5)

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Random pairs of measures on (position, token)."""
        return [{"seed": seed, "pairs": 10} for seed in range(options.pick(4, 20, 200))]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Ratio of distances after and before causal attention, in d₂, over the bound."""
        generator = torch.Generator().manual_seed(cell["seed"])
        for pair in range(cell["pairs"]):
            width, radius = 1 + pair % 3, 0.3 + 1.2 * float(torch.rand(1, generator=generator))
            a, v = (torch.randn(width, width, dtype=torch.float64, generator=generator) for _ in range(2))
            a = a / torch.linalg.matrix_norm(a, 2) / radius**2
            head = hs.SelfAttention.from_bilinear(a, v, mask="causal")
            first, second = (_drawn(generator, width, radius) for _ in range(2))
            before = float(conditional(first, second))
            after = float(conditional(push(head, first), push(head, second)))
            bound = bound_values({"bound": "howsmooth.masked_mean_field"}, head, over=hs.sets.Ball(radius))
            yield {"seed": cell["seed"], "pair": pair, "before": before, "after": after} | bound

    def draw(self, rows: Rows) -> Figure:
        """Distance after against distance before, and the ratio over the bound."""
        (ax,) = panels(["Pairs of masked measures"], "d₂ before attention", "d₂ after ÷ (bound × before)", log="y")
        share = rows.after / rows.before / rows.bound
        ax.scatter(rows.before, share, s=10, color=COLOURS[0], label="pairs (measured)")
        reference_line(ax, 1, "upper: howsmooth.masked_mean_field")
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """No pair above the bound."""
        growth = rows.after / rows.before
        share = growth / rows.bound
        return Finding.of(
            share.max() <= 1 + 1e-9,
            f"{len(rows)} pairs: d₂ grows by at most {growth.max():.3g}, at most "
            f"{share.max():.1%} of the theorem's constant; none is above.",
        )


def _drawn(generator: torch.Generator, width: int, radius: float) -> Measure:
    """Four positions of equal mass with two atoms each, in the ball."""
    x = torch.randn(8, width, dtype=torch.float64, generator=generator)
    x = radius * x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)
    first = torch.randint(1, _GRAINS // 4, (4,), generator=generator).double() / _GRAINS
    weights = torch.stack([first, 0.25 - first], 1).flatten()
    return Measure(x, weights, torch.arange(4, dtype=torch.float64).repeat_interleave(2) / 3)
