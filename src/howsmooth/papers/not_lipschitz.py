"""Dot-product attention is not Lipschitz: Theorem 3.1 of Kim et al. 2021."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.bounds import l2_bounds
from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import ONE
from howsmooth.papers.figure_style import finish, line, panels


def cells(options: ExperimentOptions) -> list[Record]:
    """One token at 0, half of the others at t, half at −t."""
    distances = options.pick(4, 7, 13)
    return [{"n": n, "t": 10 ** (4 * k / (distances - 1))} for n in (3, 11, 101) for k in range(distances)]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """The largest row sum ‖J‖_∞ and σ_max, for dot-product and for tied L2 attention, A = V = W = 1."""
    x = l2_bounds.not_lipschitz_witness(cell["n"], cell["t"])
    dot, l2 = hs.SelfAttention.from_bilinear(ONE, ONE), hs.L2SelfAttention(ONE, ONE)
    return [
        cell
        | {"attention": name, "infinity": float(hs.measure(attention, x, norm=math.inf).value)}
        | {"two": float(hs.measure(attention, x).value), "theorem": 1 + cell["t"] ** 2 * (cell["n"] - 1) / cell["n"]}
        for name, attention in (("dot-product", dot), ("L2, tied", l2))
    ]


def draw(rows: Rows) -> Figure:
    """‖J‖_∞ against how far the tokens lie apart."""
    (ax,) = panels(["One token at 0, the others at ±t"], "t (distance of the tokens from 0)", "‖J‖_∞ (measured)")
    for number, ((name, n), some) in enumerate(rows.groupby(["attention", "n"])):
        line(ax, number, some["t"], some["infinity"], f"{name}, n = {n}")
    some = rows[(rows["n"] == rows["n"].max()) & (rows["attention"] == "dot-product")]
    line(ax, 6, some["t"], some["theorem"], "Theorem 3.1: 1 + t²(n−1)/n", marks=False)
    return finish(ax)


def judge(rows: Rows) -> Finding:
    """‖J‖_∞ of dot-product attention is at least 1 + t²(n−1)/n; that of L2 attention stays below its bound."""
    dot, l2 = (rows[rows["attention"] == name] for name in ("dot-product", "L2, tied"))
    held = bool((dot["infinity"] >= dot["theorem"] * (1 - 1e-9)).all())
    bounded = all(row["infinity"] <= 4 * l2_bounds.phi_inverse(row["n"] - 1) + 1 for _, row in l2.iterrows())
    return Finding.of(
        held and bounded,
        f"dot-product: ‖J‖_∞ from {dot['infinity'].min():.3g} to {dot['infinity'].max():.3g}, at least "
        f"1 + t²(n−1)/n in {len(dot)} of {len(dot)} inputs; tied L2 attention on the same inputs: at most "
        f"{l2['infinity'].max():.3g}, below 4φ⁻¹(n−1) + 1.",
    )


EXPERIMENT = Experiment(
    "not-lipschitz",
    KIM,
    "Dot-product attention is not Lipschitz",
    "The Jacobian of dot-product self-attention is unbounded over inputs in every norm; that of L2 attention is not.",
    "One head, width 1, A = V = 1; one token at 0, half of the others at t and half at −t, t = 1 … 10⁴.",
    cells,
    run,
    draw,
    judge,
    (0.1, 0.1, 0.1),
)
