"""Numerical invertibility: x + c·F(x) inverted by its fixed point, L2 against dot-product attention (Figure 3)."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from howsmooth.nn import DotProductAttention, L2Attention
from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, line, panels

_TOKENS = _WIDTH = 64
HEADS, ITERATIONS = 8, 25
_KINDS = {"L2": L2Attention, "dot-product": DotProductAttention}


def cells(options: ExperimentOptions) -> list[Record]:
    """c ∈ {.5, .7, .9}, several draws of Glorot weights."""
    return [
        {"kind": k, "c": c, "seed": s} for k in _KINDS for c in (0.5, 0.7, 0.9) for s in range(options.pick(2, 5, 20))
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """The largest error of an entry after each step of x ← y − c·F(x), from y; one token at 0, the others in ±10."""
    torch.manual_seed(cell["seed"])
    layer = _KINDS[cell["kind"]](_WIDTH, HEADS).double().eval()
    x = 20 * torch.rand(1, _TOKENS, _WIDTH, dtype=torch.float64) - 10
    x[:, 0] = 0
    rows = []
    with torch.no_grad():
        y = x + cell["c"] * layer(x)[0]
        point = y
        for step in range(1, ITERATIONS + 1):
            point = y - cell["c"] * layer(point)[0]
            rows.append(cell | {"step": step, "error": float((point - x).abs().max())})
    return rows


def draw(rows: Rows) -> Figure:
    """Errors against iterations."""
    axes = panels(list(_KINDS), "fixed-point iterations", "largest error of an entry", log="y")
    for ax, kind in zip(axes, _KINDS, strict=True):
        for number, (c, some) in enumerate(rows[rows["kind"] == kind].groupby("c")):
            middle = some.groupby("step")["error"].median()
            line(ax, number, middle.index, middle.to_numpy(), f"c = {c}")
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """L2 attention comes back to x; dot-product attention does not."""
    last = rows[rows["step"] == ITERATIONS]
    back = {kind: last[last["kind"] == kind]["error"] for kind in _KINDS}
    right = bool((back["L2"] < 1e-6).all() and (back["dot-product"] > 1).all())
    return Finding.of(
        right,
        f"after {ITERATIONS} iterations the largest error is {back['L2'].min():.1g} to {back['L2'].max():.1g} for L2 "
        f"and {back['dot-product'].min():.3g} to {back['dot-product'].max():.3g} for dot-product attention "
        f"({len(back['L2'])} draws each).",
    )


EXPERIMENT = Experiment(
    "inversion",
    KIM,
    "Numerical invertibility",
    "x + c·F(x) is inverted by its fixed point for L2 attention, and not for dot-product attention (Figure 3).",
    "N = D = 64, H = 8, Glorot weights, one token at 0 and the others uniform in [−10, 10], c ∈ {.5, .7, .9}.",
    cells,
    run,
    draw,
    judge,
    (0.1, 0.1, 0.1),
)
