"""Extreme inputs: the two-cluster input of the lower bound, and inputs scaled to a large radius."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import get, lower_bounds
from howsmooth.papers.experiment import CASTIN, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.experiment_inputs import attention_block
from howsmooth.papers.figure_style import (
    finish,
    line,
    lines,
    median_bands,
    model_label,
    panel_groups,
    panels,
    reference_line,
)

RADIUS, _LENGTHS = 100.0, (27, 37, 47, 57, 67, 77, 87, 97)
_CAUSAL = "random:gpt2[layers=7,width=768,heads=12,seed={seed}]"
_WIDTH, _TOKENS = 4, 16


class Adversarial(Experiment):
    """Adversarial inputs: the two-cluster input of the lower bound makes σ grow like √n on real heads."""

    id = "adversarial"
    paper = CASTIN
    title = "Adversarial inputs grow like √n"
    claim = "At the input of the lower bound σ of a real head grows like √n."
    setting = (
        "Heads of GPT-2 with random weights (or GPT-2's by the path of a safetensors file) and of MiniLM, R = 100."
    )
    minutes = (0.5, 3, 6)
    takes = frozenset({"models"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """A causal model (random GPT-2 in several draws, or GPT-2's own layers by path) and a trained encoder."""
        draws = [_CAUSAL.format(seed=seed) for seed in range(options.pick(2, 4, 10))]
        models = options.models or (*draws, "minilm")
        places = {"heads": options.pick(3, 12, 12), "lengths": options.pick((27, 57, 97), _LENGTHS, _LENGTHS)}
        return [{"model": m, "layer": 4 if m == "minilm" else 6, **places} for m in models]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """σ of each head at its own two-cluster input, in units of ‖V‖, with the theorem's lower and upper ends."""
        attention = attention_block(cell["model"], cell["layer"]).in_dtype(torch.float64)
        one = hs.measure_heads(attention, torch.zeros(1, attention.in_features, dtype=torch.float64)).value
        alone = [attention.head(head) for head in range(min(cell["heads"], attention.heads))]
        eigenpairs = lower_bounds.real_eigenpairs(attention)
        for n in cell["lengths"]:
            ends = {
                name: get(full)(attention, n=n, over=hs.sets.Ball(RADIUS), per_head=True)
                for name, full in (("upper", "howsmooth.sqrt_n"), ("lower", "howsmooth.two_cluster"))
            }
            for head, map_ in enumerate(alone):
                values, vectors = (each[head] for each in eigenpairs)
                inputs = [cluster_tokens(values, vectors, n, sign) for sign in (-1, 1)]
                sigma = max(float(hs.measure_heads(map_, x).value) for x in inputs if x is not None)
                yield (
                    {"model": cell["model"], "layer": cell["layer"], "head": head, "n": n, "sigma": sigma}
                    | {"value_norm": float(one[head])}
                    | {name: float(numbers[head]) for name, numbers in ends.items()}
                )

    def draw(self, rows: Rows) -> Figure:
        """σ in units of ‖V‖√n, and for each model σ of one head between the bounds."""
        rows = rows.assign(kind=rows.model.map(model_label), share=rows.sigma / rows.value_norm / rows.n**0.5)
        kinds = list(rows.kind.unique())
        titles = ["Every head at its own input", *(f"{kind}, head 0 between the bounds" for kind in kinds)]
        axes = panels(titles, "number of tokens n", "σ_max(J)", columns=2)
        axes[0].set(yscale="linear", ylim=(0.8, 1.2), ylabel="σ_max(J) ÷ (‖V‖√n)")
        median_bands(axes[0], rows, ["kind"], "n", "share", sort=False)
        reference_line(axes[0], 1, "√n (order of Theorem 3.3 and Proposition 3.4)")
        for ax, kind in zip(axes[1:], kinds, strict=True):
            first = rows[rows.kind == kind].query("head == 0").groupby("n", as_index=False).first()
            theorems = {"upper": "upper: howsmooth.sqrt_n", "lower": "lower: howsmooth.two_cluster"}
            lines(ax, first, "n", {"sigma": "two-cluster input (measured)"}, theorems)
        return finish(axes[0])

    def judge(self, rows: Rows) -> Finding:
        """σ ÷ (‖V‖√n), the mean over draws and heads, between 0.95 and 1.05; both bounds hold."""
        causal = rows[rows.model.str.startswith("random:gpt2") | rows.model.str.endswith(".safetensors")]
        share = (causal.sigma / causal.value_norm / causal.n**0.5).groupby(causal.n).mean()
        outside = len(rows.query("sigma > upper or sigma < lower * (1 - 1e-3)"))
        exponents = [
            hs.growth(some.sigma.tolist(), some.n.tolist()).exponent for _, some in rows.groupby(["model", "head"])
        ]
        return Finding.of(
            not outside and share.between(0.95, 1.05).all(),
            f"causal heads: σ ÷ (‖V‖√n) is {share.min():.3f} to {share.max():.3f} in the mean, n = {rows['n'].min()} … "
            f"{rows['n'].max()}, R = {RADIUS:g}; exponents of all heads {min(exponents):.3f} to {max(exponents):.3f}; "
            f"{outside or 'no'} values above howsmooth.sqrt_n or below howsmooth.two_cluster.",
            other_constant=not outside and min(exponents) > 0.4,
        )


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


class LargeRadius(Experiment):
    """Large radii: for almost every input the local constant tends to ‖V‖·√(largest in-degree) as the radius grows."""

    id = "large-radius"
    paper = CASTIN
    title = "Large radii"
    claim = (
        "For almost every X the local constant at R·X stays bounded as R → ∞, by ‖V‖ times the root of the largest "
        "number of tokens that look at one token; the exponential growth with R is that of rare inputs."
    )
    setting = f"Random heads of width {_WIDTH}, {_TOKENS} tokens, R = 0.1 … 316, with and without a causal mask."
    minutes = (0.1, 0.1, 0.2)

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Random heads and inputs, scaled."""
        radii = [10 ** (k / 4) for k in range(-4, 11)]
        return [
            {"seed": seed, "mask": mask, "radii": radii}
            for mask in (None, "causal")
            for seed in range(options.pick(3, 8, 25))
        ]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """σ_max at R·X beside the limit of the theorem."""
        generator = torch.Generator().manual_seed(cell["seed"])
        a, v = (torch.randn(_WIDTH, _WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        head = hs.SelfAttention.from_bilinear(a, v, mask=cell["mask"])
        x = torch.randn(_TOKENS, _WIDTH, dtype=torch.float64, generator=generator)
        x = x / x.norm(dim=1).amax()
        limit = float(lower_bounds.large_radius_limit(head, x).amax())
        common = {"seed": cell["seed"], "mask": cell["mask"] or "no mask", "limit": limit}
        for r in cell["radii"]:
            yield common | {"R": r, "sigma": float(hs.measure(head, r * x).value)}

    def draw(self, rows: Rows) -> Figure:
        """σ over its limit, one line per input."""
        labels = "radius R of the input", "σ_max(J) ÷ limit of the theorem"
        for ax, some in panel_groups(rows, "mask", str, *labels, sort=True):
            for number, (_, one) in enumerate(some.groupby("seed")):
                line(ax, number, one.R, one.sigma / one.limit, "" if number else "one random head and input each")
            reference_line(ax, 1, "limit: ‖V‖·√(largest in-degree)")
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """At the largest radius the ratio is 1."""
        last = rows[rows.R.max() == rows.R]
        ratio = last.sigma / last.limit
        near = (ratio - 1).abs() < 1e-3
        rest = ratio[~near]
        others = (
            "" if rest.empty else f" (the others: {rest.min():.4g} … {rest.max():.4g} times, two logits nearly equal)"
        )
        return Finding.of(
            near.mean() >= 0.8,
            f"at R = {last['R'].max():.3g} σ is within 10⁻³ of the limit for {int(near.sum())} of {len(last)} random "
            f"heads and inputs, with and without a causal mask{others}. On the way σ is up to "
            f"{(rows['sigma'] / rows['limit']).max():.3g} times the limit.",
        )
