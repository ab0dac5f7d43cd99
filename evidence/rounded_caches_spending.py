"""What a budget of bits is best spent on: allocations, what everybody can do, and rivals, run on held-out windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence.rounded_caches_windows import Step, in_windows
from evidence.rounding_baselines import by_sensitivity
from evidence.tables import table
from howsmooth.models import OpenModel, Window
from howsmooth.rounding import parse_formats
from howsmooth.rounding.allocation import Allocation, allocate, first_and_last, uniform
from howsmooth.rounding.quantisation import Check, Tensors, checks, window_outcomes
from howsmooth.rounding.rounded_model import RoundedModel, Scores

SPENT = "int8,int6,int4,int3,int2"
BUDGETS = ("int3", "int4", "int6")
"""Budgets are what these formats take everywhere, so that uniform spends all of it."""
SPENDING_RIVALS = ("entropy", "norm", "local error", "sigma", "gain")


@dataclass(frozen=True)
class Spending:
    """What a budget may be spent on.

    Attributes:
        damage: predicted, of every layer, part, format and key–value head.
        bits: per number of every format of `SPENT`.
    """

    damage: Tensor
    bits: tuple[float, ...]

    @classmethod
    def of(cls, opened: OpenModel, scores: Scores, length: int) -> Spending:
        """From sampled scores of windows of a length."""
        config = opened.model.config
        width = config.hidden_size // config.num_attention_heads
        bits = (form.bits_per_number(width, length, config.num_key_value_heads) for form in parse_formats(SPENT))
        return cls(scores.by_cache, tuple(bits))

    @property
    def budgets(self) -> list[float]:
        """What the formats of `BUDGETS` take everywhere."""
        names = [form.name for form in parse_formats(SPENT)]
        return [self.bits[names.index(name)] for name in BUDGETS]

    def choices(self) -> dict[str, Allocation | None]:
        """The exact model, and for every budget the allocations and what everybody can do."""
        found: dict[str, Allocation | None] = {"exact": None}
        for budget in self.budgets:
            given = (self.damage, parse_formats(SPENT), self.bits, budget)
            found |= {
                f"{budget:.4g} | allocation, per head": allocate(*given, "head"),
                f"{budget:.4g} | allocation": allocate(*given, "part"),
                f"{budget:.4g} | uniform": uniform(*given),
                f"{budget:.4g} | first and last N": first_and_last(*given),
            }
        return found

    def rival_choices(self, others: dict[str, Tensor]) -> dict[str, Allocation | None]:
        """What the same knapsack chooses by the rivals."""
        return {
            f"{budget:.4g} | {name}": by_sensitivity(others[name], self.damage, parse_formats(SPENT), self.bits, budget)
            for budget in self.budgets
            for name in SPENDING_RIVALS
        }


def run_choices(
    opened: OpenModel, windows: Sequence[Window], choices: dict[str, Allocation | None], what: str, tell: Step
) -> list[Check]:
    """Every choice on held-out windows."""

    def of(reader: RoundedModel, window: Window) -> Tensors:
        return window_outcomes(reader, choices)

    settings = [[name, None if one is None else one.choice.tolist()] for name, one in choices.items()]
    return list(checks(choices, in_windows(opened, windows, what, settings, of, tell)))


def spending_table(run: Sequence[Check]) -> str:
    """What was run, the exact model first, budget by budget."""
    exact, *rest = run
    ours = {check.name.split(" | ")[0]: check for check in rest if check.name.endswith("| allocation")}
    head = ["budget", "choice", "bits", "predicted KL", "KL", "± 95 %", "KL less that of the allocation, ± 95 %"]
    places = list(ours)
    rest.sort(key=lambda check: places.index(check.name.split(" | ")[0]))
    rows = [_spent(check, ours[check.name.split(" | ")[0]]) for check in rest]
    return table([*head, "perplexity"], rows) + f"\n\nPerplexity without rounding: {exact.perplexity:.4g}."


def _spent(check: Check, ours: Check) -> list[str]:
    assert check.allocation is not None
    apart = torch.tensor(check.damage).double() - torch.tensor(ours.damage).double()
    wide = 1.96 * float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return [
        *check.name.split(" | "),
        f"{check.allocation.bits:.3f}",
        f"{check.allocation.damage:.4g}",
        f"{check.mean:.4g}",
        f"{1.96 * check.error:.2g}",
        f"{float(apart.mean()):+.2g} ± {wide:.2g}",
        f"{check.perplexity:.4g}" if check.perplexity is not None else "–",
    ]
