"""Adversarial inputs: the two-cluster input of the lower bound makes σ grow like √n on real heads."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import get, lower_bounds
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import attention_block
from howsmooth.papers.figure_style import finish, lines, median_bands, model_label, panels, reference_line

RADIUS, _LENGTHS = 100.0, (27, 37, 47, 57, 67, 77, 87, 97)
_CAUSAL = "random:gpt2[layers=7,width=768,heads=12,seed={seed}]"


def cells(options: ExperimentOptions) -> list[Record]:
    """A causal model (random GPT-2 in several draws, or GPT-2's own layers by path) and a trained encoder."""
    draws = [_CAUSAL.format(seed=seed) for seed in range(options.pick(2, 4, 10))]
    models = options.models or (*draws, "minilm")
    layer = {"minilm": 4}
    lengths = options.pick((27, 57, 97), _LENGTHS, _LENGTHS)
    return [
        {"model": m, "layer": layer.get(m, 6), "heads": options.pick(3, 12, 12), "lengths": lengths} for m in models
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """σ of each head at its own two-cluster input, in units of ‖V‖, with the theorem's lower and upper ends."""
    attention = attention_block(cell["model"], cell["layer"])
    attention = attention.in_dtype(torch.float64)
    one = hs.measure_heads(attention, torch.zeros(1, attention.in_features, dtype=torch.float64)).value
    alone = [attention.head(head) for head in range(min(cell["heads"], attention.heads))]
    eigenpairs = lower_bounds.real_eigenpairs(attention)
    rows = []
    for n in cell["lengths"]:
        ends = {
            name: get(full)(attention, n=n, over=hs.sets.Ball(RADIUS), per_head=True)
            for name, full in (("upper", "howsmooth.sqrt_n"), ("lower", "howsmooth.two_cluster"))
        }
        for head, map_ in enumerate(alone):
            values, vectors = (each[head] for each in eigenpairs)
            inputs = [cluster_tokens(values, vectors, n, sign) for sign in (-1, 1)]
            sigma = max(float(hs.measure_heads(map_, x).value) for x in inputs if x is not None)
            rows.append(
                {"model": cell["model"], "layer": cell["layer"], "head": head, "n": n, "sigma": sigma}
                | {"value_norm": float(one[head])}
                | {name: float(numbers[head]) for name, numbers in ends.items()}
            )
    return rows


def cluster_tokens(values: Tensor, vectors: Tensor, n: int, sign: int) -> Tensor | None:
    """Proposition 3.4: one token at −Ru and the others at Ru (γ < 0), or at Ru and the others at Ru/2 (γ > 0).

    u is the eigenvector of A with the eigenvalue γ that is largest in size among the real ones of this sign.
    """
    gamma = (sign * values).nan_to_num(nan=-torch.inf)
    if float(gamma.amax()) <= 0:
        return None
    u = vectors[int(gamma.argmax())]
    first, others = (-1.0, 1.0) if sign < 0 else (1.0, 0.5)
    return RADIUS * torch.stack([first * u, *[others * u] * (n - 1)])


def draw(rows: Rows) -> Figure:
    """σ in units of ‖V‖√n, and for each model σ of one head between the bounds."""
    rows = rows.assign(kind=rows["model"].map(model_label), share=rows["sigma"] / rows["value_norm"] / rows["n"] ** 0.5)
    kinds = list(rows["kind"].unique())
    titles = ["Every head at its own input", *(f"{kind}, head 0 between the bounds" for kind in kinds)]
    axes = panels(titles, "number of tokens n", "σ_max(J)", columns=2)
    axes[0].set(yscale="linear", ylim=(0.8, 1.2), ylabel="σ_max(J) ÷ (‖V‖√n)")
    median_bands(axes[0], rows, ["kind"], "n", "share", sort=False)
    reference_line(axes[0], 1, "√n (order of Theorem 3.3 and Proposition 3.4)")
    for ax, kind in zip(axes[1:], kinds, strict=True):
        first = rows[(rows["kind"] == kind) & (rows["head"] == 0)].groupby("n", as_index=False).first()
        theorems = {"upper": "upper: howsmooth.sqrt_n", "lower": "lower: howsmooth.two_cluster"}
        lines(ax, first, "n", {"sigma": "two-cluster input (measured)"}, theorems)
    return finish(*axes)


def judge(rows: Rows) -> Finding:
    """σ ÷ (‖V‖√n), the mean over draws and heads, between 0.95 and 1.05; both bounds hold."""
    causal = rows[rows["model"].str.startswith("random:gpt2") | rows["model"].str.endswith(".safetensors")]
    share = (causal["sigma"] / causal["value_norm"] / causal["n"] ** 0.5).groupby(causal["n"]).mean()
    outside = int(((rows["sigma"] > rows["upper"]) | (rows["sigma"] < rows["lower"] * (1 - 1e-3))).sum())
    exponents = [
        hs.growth(some["sigma"].tolist(), some["n"].tolist()).exponent for _, some in rows.groupby(["model", "head"])
    ]
    near = bool(share.between(0.95, 1.05).all())
    return Finding.of(
        not outside and near,
        f"causal heads: σ ÷ (‖V‖√n) is {share.min():.3f} to {share.max():.3f} in the mean, n = {rows['n'].min()} … "
        f"{rows['n'].max()}, R = {RADIUS:g}; exponents of all heads {min(exponents):.3f} to {max(exponents):.3f}; "
        f"{outside or 'no'} values above howsmooth.sqrt_n or below howsmooth.two_cluster.",
        other_constant=not outside and min(exponents) > 0.4,
    )


EXPERIMENT = Experiment(
    "adversarial",
    CASTIN,
    "Adversarial inputs grow like √n",
    "At the input of the lower bound σ of a real head grows like √n.",
    "Heads of GPT-2 with random weights (or GPT-2's by the path of a safetensors file) and of MiniLM, R = 100.",
    cells,
    run,
    draw,
    judge,
    (0.5, 3, 6),
    frozenset({"models"}),
)
