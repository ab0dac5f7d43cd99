"""Allocation of formats to caches: the minimum predicted damage within a budget of bits.

Damages of separate roundings nearly add (their errors are unrelated), so a choice costs the sum of its parts, and the
best one within a budget is a knapsack with one choice for each part: solved exactly by dynamic programming over the
bits, in steps of 1/64 bit per number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from howsmooth._util.validation import check_number, check_tensor, validated
from howsmooth.errors import InvalidInput
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.number_formats import Format
from howsmooth.rounding.rounded_model import Assignment

Unit = Literal["model", "layer", "part", "head"]
STEPS = 64
"""Steps of the budget in one bit per number; what a format takes above the smallest is rounded up to them."""


@dataclass(frozen=True)
class Allocation:
    """A format for every layer, part and key–value head.

    Attributes:
        formats: to choose from, ``choice`` holds positions in it.
        choice: ``(layers, 2, kv_heads)``, keys first.
        bits: per cached number, scales included.
        damage: the sum of the predicted damages.
    """

    formats: tuple[Format, ...]
    choice: Tensor
    bits: float
    damage: float

    @property
    def assignment(self) -> Assignment:
        """As `RoundedModel.outcome` takes it."""
        return {
            (layer, part): tuple(self.formats[index] for index in heads)
            for layer, parts in enumerate(self.choice.tolist())
            for part, heads in zip(PARTS, parts, strict=True)
        }

    def by_layer(self, part: str) -> list[list[str]]:
        """Names of the formats of the heads of every layer; one name where all heads agree."""
        index = PARTS.index(part)
        rows = [[self.formats[i].name for i in heads] for heads in self.choice[:, index].tolist()]
        return [row[:1] if len(set(row)) == 1 else row for row in rows]


@validated
def allocate(
    damage: Tensor, formats: Sequence[Format], bits: Sequence[float], budget: float, per: Unit = "part"
) -> Allocation:
    """The formats of least damage within a budget.

    Args:
        damage: of every layer, part, format and key–value head, ``(layers, 2, formats, kv_heads)``.
        bits: per number of every format.
        budget: bits per cached number, on average.
        per: choose one format for all keys and one for all values ("model"), one for every layer, for its keys and
            values apart ("part"), or for every key–value head.

    >>> from howsmooth.rounding import parse_formats
    >>> damage = torch.tensor([9.0, 1.0]).view(1, 1, 2, 1) * torch.tensor([1.0, 0.1, 0.01]).view(3, 1, 1, 1)
    >>> allocation = allocate(damage.expand(3, 2, 2, 1), parse_formats("int4,int8"), [4.25, 8.25], budget=5.6)
    >>> allocation.by_layer("key"), round(allocation.bits, 3), round(allocation.damage, 2)
    ([['int8'], ['int4'], ['int4']], 5.583, 3.98)
    """
    layers, parts, count, heads = _checked(damage, formats, bits, budget)
    shape = {
        "model": (1, parts, 1),
        "layer": (layers, 1, 1),
        "part": (layers, parts, 1),
        "head": (layers, parts, heads),
    }
    apart = damage.movedim(2, 3).double().cpu()  # formats last
    for axis, size in enumerate(shape[per]):
        apart = apart if size > 1 else apart.sum(axis, keepdim=True)
    picked = torch.from_numpy(_knapsack(apart.reshape(-1, count).numpy(), bits, budget))
    return assigned(damage, formats, bits, picked.reshape(shape[per]).expand(layers, parts, heads).clone())


def assigned(damage: Tensor, formats: Sequence[Format], bits: Sequence[float], choice: Tensor) -> Allocation:
    """An allocation from the positions of its formats, ``(layers, 2, kv_heads)``."""
    used = torch.tensor(list(bits), dtype=torch.float64)[choice]
    total = damage.gather(2, choice[:, :, None]).sum()
    return Allocation(tuple(formats), choice, float(used.mean()), float(total))


@validated
def uniform(damage: Tensor, formats: Sequence[Format], bits: Sequence[float], budget: float) -> Allocation:
    """One format everywhere: the one with the maximum number of bits within the budget."""
    layers, parts, _, heads = _checked(damage, formats, bits, budget)
    best = max((i for i in range(len(formats)) if bits[i] <= budget + 1e-9), key=lambda i: bits[i])
    return assigned(damage, formats, bits, torch.full((layers, parts, heads), best))


@validated
def first_and_last(damage: Tensor, formats: Sequence[Format], bits: Sequence[float], budget: float) -> Allocation:
    """The first and last N layers in the format with most bits, the others in the best below the budget; N as it fits.

    Where the budget is that of a format itself, the others have the one below it.
    """
    layers, parts, _, heads = _checked(damage, formats, bits, budget)
    order = sorted(range(len(formats)), key=lambda i: bits[i])
    high = order[-1]
    below = [i for i in order if bits[i] < budget - 1e-9]
    low = below[-1] if below else order[0]
    share = (budget - bits[low]) / (bits[high] - bits[low]) if high != low else 0.0
    count = math.floor(share * layers + 1e-9)
    choice = torch.full((layers, parts, heads), low)
    choice[: (count + 1) // 2] = high
    choice[layers - count // 2 :] = high
    return assigned(damage, formats, bits, choice)


def frontier(damage: Tensor, formats: Sequence[Format], bits: Sequence[float], points: int = 25) -> list[Allocation]:
    """The least predicted damage for budgets between the smallest and the largest format.

    >>> from howsmooth.rounding import parse_formats
    >>> damage = torch.tensor([9.0, 1.0]).view(1, 1, 2, 1).expand(2, 2, 2, 1)
    >>> [(one.bits, one.damage) for one in frontier(damage, parse_formats("int4,int8"), [4.0, 8.0], 3)]
    [(4.0, 36.0), (6.0, 20.0), (8.0, 4.0)]
    """
    return [allocate(damage, formats, bits, float(b)) for b in np.linspace(min(bits), max(bits), points)]


def _checked(
    damage: Tensor, formats: Sequence[Format], bits: Sequence[float], budget: float
) -> tuple[int, int, int, int]:
    """Layers, parts, formats and heads of a damage that goes with the formats, within a budget that they allow."""
    layers, parts, count, heads = check_tensor(damage, "damage", dims=(4,)).shape
    if not len(formats) == len(bits) == count or parts != len(PARTS):
        raise InvalidInput(
            f"damage has shape (layers, 2, formats, heads) and every format its bits: got {tuple(damage.shape)}, "
            f"{len(formats)} formats and {len(bits)} numbers of bits."
        )
    check_budget(budget, formats, bits)
    return layers, parts, count, heads


def check_budget(budget: float, formats: Sequence[Format], bits: Sequence[float]) -> None:
    """Refuse a budget below the smallest or above the largest format."""
    check_number(budget, "the budget")
    for size in bits:
        check_number(size, "bits of a format", least=0.0)
    smallest, largest = min(bits), max(bits)
    if not smallest - 1e-9 <= budget <= largest + 1e-9:
        side, end = ("below the smallest", smallest) if budget < smallest else ("above the largest", largest)
        raise InvalidInput(
            f"a budget of {budget:g} bits is {side} format ({formats[list(bits).index(end)].name}: {end:g} bits per "
            f"number, scales included): ask for {smallest:g} to {largest:g}, or give other formats."
        )


def _knapsack(costs: np.ndarray, bits: Sequence[float], budget: float) -> np.ndarray:
    """The choice of every unit, ``(units,)``, with the least total cost within the budget."""
    units, count = costs.shape
    base = min(bits)  # only what is above the smallest is spent
    extra = [math.ceil((size - base) * STEPS - 1e-6) for size in bits]
    room = math.floor((budget - base) * STEPS * units + 1e-6)
    best = np.zeros(max(room, 0) + 1)
    taken = np.zeros((units, len(best)), dtype=np.int16)
    for unit in range(units):
        options = np.full((count, len(best)), np.inf)
        for form in range(count):
            if extra[form] < len(best):
                options[form, extra[form] :] = best[: len(best) - extra[form]] + costs[unit, form]
        taken[unit] = options.argmin(0)
        best = options.min(0)
    rest, picked = len(best) - 1, np.zeros(units, dtype=np.int64)
    for unit in reversed(range(units)):
        picked[unit] = taken[unit, rest]
        rest -= extra[picked[unit]]
    return picked
