"""Costs of the upper bound on real heads: steps until the value is right, and until its upper bound is as close."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import torch

from evidence.tables import table
from howsmooth.attention import AttentionMap
from howsmooth.jacobians import attention_jacobian
from howsmooth.models import alice, attention_inputs, open_model
from howsmooth.models.attention_reader import from_transformers
from howsmooth.norms import golub_kahan

TITLE = "What the upper bound costs on real heads"
RTOL = 1e-3


def steps(attention: AttentionMap, x: torch.Tensor) -> list[tuple[int, int]]:
    """For every head: steps to a relative error of 1e-3, known to an oracle, and to convergence."""
    operator = attention_jacobian(attention, x, per_head=True, reduced=True)
    truth = golub_kahan(operator, rtol=1e-9).value.tolist()
    found = []
    for head, sigma in enumerate(truth):
        one = operator.subset(torch.tensor([head]))
        right = golub_kahan(one, rtol=RTOL, stop_at=(1 - RTOL) * sigma)
        converged = golub_kahan(one, rtol=RTOL)
        assert bool(converged.converged.all())
        found.append(((right.products - 1) // 2, (converged.products - 1) // 2))  # the last product takes the value
    return found


def row(name: str, found: Iterable[tuple[int, int]]) -> list[str]:
    """Minimum, median and maximum of the steps of both kinds."""
    return [name, *(f"{min(s)}, {median(s):g}, {max(s)}" for s in zip(*found, strict=True))]


def parts(progress: Callable[[str], None], length: int = 128) -> list[str]:
    """The text and table of the documentation page."""
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    text = alice()
    inputs = attention_inputs(model, tokenizer, text[text.index("Alice was beginning") :], length)
    rows, every = [], []
    for layer, x in sorted(inputs.hidden.items()):
        progress(f"layer {layer}")
        found = steps(from_transformers(model, layer).in_dtype(torch.float64), x[0].double())
        every += found
        rows.append(row(f"layer {layer}", found))
    return [
        f"The {len(every)} heads of all-MiniLM-L6-v2 on the first {length} tokens of the story of Alice in Wonderland, "
        "in float64, from a random start (seed 0): steps (two products each) until the value is within 1e-3 "
        "of the truth, as an oracle sees it, and until an upper bound with 99 % is within 1e-3 of it and the residual "
        "is below 1e-3. Minimum, median, maximum.",
        table(["heads of", "value within 1e-3", "upper bound within 1e-3"], [*rows, row("all", every)]),
    ]
