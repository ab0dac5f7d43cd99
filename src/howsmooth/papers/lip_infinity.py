"""The tightness of the bound on Lip_∞ of L2 attention: Figure 2 of Kim et al. 2021, with a construction and a proof."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import ONE
from howsmooth.papers.figure_style import finish, lines, panels

KNOWN_ASCENTS = {10: 4.407, 100: 10.095, 200: 12.093, 500: 14.875, 1000: 17.066}
"""Best values of long ascents that share no code with the search."""


def cells(options: ExperimentOptions) -> list[Record]:
    """Lengths up to 1000; 50 random starts in full. Beyond 200 tokens steps are slow, and 60 of them are enough."""
    lengths = options.pick((10, 100, 1000), (10, 20, 50, 100, 200, 500, 1000), (10, 20, 50, 100, 200, 500, 1000))
    steps = options.pick(60, 120, 200)
    near, far = options.pick((4, 2), (16, 2), (50, 50))
    return [{"n": n, "starts": near if n <= 200 else far, "steps": steps if n <= 200 else 60} for n in lengths]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """The maxima of ascents from random starts alone and with the construction, between both theorems."""
    n, head = cell["n"], hs.L2SelfAttention(ONE, ONE)
    search = {"norm": math.inf, "steps": cell["steps"], "seed": 0}
    alone = hs.worst_case(head, n, constructions=False, starts=cell["starts"], **search)
    best = hs.worst_case(head, n, starts=0, **search)
    return [
        cell
        | {"random": alone.value, "construction": best.value}
        | {"kim": float(get("kim2021.lip_inf")(head, n=n)), "howsmooth": float(get("howsmooth.l2_lip_inf")(head, n=n))}
        | {"lower": float(get("howsmooth.l2_tight_lower")(head, n=n))}
    ]


def draw(rows: Rows) -> Figure:
    """Searches between the theorems."""
    (ax,) = panels(["Lip_∞ of L2 attention, D = H = 1"], "number of tokens N", "largest ‖J‖_∞ found", log="x")
    measured = {"construction": "search from the construction (measured)"}
    measured["random"] = "search from random starts (measured)"
    theorems = {"kim": "upper: Kim et al., Theorem 3.2, 4φ⁻¹(N−1) + 1"}
    theorems["lower"] = "lower: howsmooth.l2_tight_lower, proved at the construction"
    lines(ax, rows, "n", measured, theorems)
    return finish(ax)


def judge(rows: Rows) -> Finding:
    """Searches end below the bound, and reach the values known from elsewhere to half a percent."""
    best = rows[["random", "construction"]].max(axis=1)
    below = bool((best <= rows["kim"]).all() and (best >= rows["lower"] * (1 - 1e-9)).all())
    missed = [abs(value / KNOWN_ASCENTS[n] - 1) for n, value in zip(rows["n"], best, strict=True) if n in KNOWN_ASCENTS]
    ratios = best / rows["kim"]
    return Finding.of(
        below and max(missed) < 5e-3,
        f"the search reaches {ratios.min():.1%} to {ratios.max():.1%} of 4φ⁻¹(N−1) + 1, N = {rows['n'].min()} … "
        f"{rows['n'].max()}, never more; it agrees with independent ascents to {max(missed):.1e}. The bound is tight "
        f"up to a constant: the construction proves at least {(rows['lower'] / rows['kim']).max():.1%} of it.",
    )


EXPERIMENT = Experiment(
    "lip-infinity",
    KIM,
    "Tightness of the bound on Lip_∞",
    "The bound O(log N) on Lip_∞ of L2 attention is tight in its growth: optimised inputs follow it (Figure 2).",
    "D = H = 1, W = 1, N to 1000; 50 random starts in full, and the input 0, ±c, ±c, … that proves the lower end.",
    cells,
    run,
    draw,
    judge,
    (0.1, 1, 5),
)
