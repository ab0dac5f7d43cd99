"""Large radii: for almost every input the local constant tends to ‖V‖·√(largest in-degree) as the radius grows."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.bounds import lower_bounds
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, line, panels, reference_line

_WIDTH, _TOKENS = 4, 16


def cells(options: ExperimentOptions) -> list[Record]:
    """Random heads and inputs, scaled."""
    radii = [10 ** (k / 4) for k in range(-4, 11)]
    return [
        {"seed": seed, "mask": mask, "radii": radii}
        for mask in (None, "causal")
        for seed in range(options.pick(3, 8, 25))
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """σ_max at R·X beside the limit of the theorem."""
    generator = torch.Generator().manual_seed(cell["seed"])
    a, v = (torch.randn(_WIDTH, _WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    head = hs.SelfAttention.from_bilinear(a, v, mask=cell["mask"])
    x = torch.randn(_TOKENS, _WIDTH, dtype=torch.float64, generator=generator)
    x = x / x.norm(dim=1).amax()
    limit = float(lower_bounds.large_radius_limit(head, x).amax())
    common = {"seed": cell["seed"], "mask": cell["mask"] or "no mask", "limit": limit}
    return [common | {"R": r, "sigma": float(hs.measure(head, r * x).value)} for r in cell["radii"]]


def draw(rows: Rows) -> Figure:
    """σ over its limit, one line per input."""
    groups = list(rows.groupby("mask"))
    axes = panels([str(name) for name, _ in groups], "radius R of the input", "σ_max(J) ÷ limit of the theorem")
    for ax, (_, some) in zip(axes, groups, strict=True):
        for number, (_, one) in enumerate(some.groupby("seed")):
            line(ax, number, one["R"], one["sigma"] / one["limit"], "" if number else "one random head and input each")
        reference_line(ax, 1, "limit: ‖V‖·√(largest in-degree)")
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """At the largest radius the ratio is 1."""
    last = rows[rows["R"] == rows["R"].max()]
    ratio = last["sigma"] / last["limit"]
    near = (ratio - 1).abs() < 1e-3
    rest = ratio[~near]
    others = "" if rest.empty else f" (the others: {rest.min():.4g} … {rest.max():.4g} times, two logits nearly equal)"
    return Finding.of(
        near.mean() >= 0.8,
        f"at R = {last['R'].max():.3g} σ is within 10⁻³ of the limit for {int(near.sum())} of {len(last)} random heads "
        f"and inputs, with and without a causal mask{others}. On the way σ is up to "
        f"{(rows['sigma'] / rows['limit']).max():.3g} times the limit.",
    )


EXPERIMENT = Experiment(
    "large-radius",
    CASTIN,
    "Large radii",
    "For almost every X the local constant at R·X stays bounded as R → ∞, by ‖V‖ times the root of the largest number "
    "of tokens that look at one token; the exponential growth with R is that of rare inputs.",
    f"Random heads of width {_WIDTH}, {_TOKENS} tokens, R = 0.1 … 316, with and without a causal mask.",
    cells,
    run,
    draw,
    judge,
    (0.1, 0.1, 0.2),
)
