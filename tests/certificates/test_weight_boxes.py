"""The largest mean of numbers under weights with two ends, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from howsmooth.certificates.ball.weight_boxes import largest_mean


def exact(numbers: Tensor, low: Tensor, high: Tensor) -> Fraction:
    """The largest mean, without rounding."""
    free, total = 1 - sum(map(Fraction, low.tolist()), Fraction(0)), Fraction(0)
    for j in numbers.argsort(descending=True).tolist():
        number, least, most = (Fraction(float(t[j])) for t in (numbers, low, high))
        more = max(Fraction(0), min(free, most - least))
        total, free = total + (least + more) * number, free - more
    return total


@pytest.mark.parametrize("nearly", [2.0, 15.0, 33.0, 36.0])
def test_the_largest_mean_is_never_below_that_of_exact_fractions(nearly: float) -> None:
    """One weight is 1 − e^{−nearly} or so; beyond 30 what the others may take is a few roundings of 1."""
    closest = 0.0
    for _ in range(100):
        logits = torch.cat([torch.zeros(1), -nearly - 3 * torch.rand(4)]).double()
        weights = torch.softmax(logits, -1)[torch.randperm(5)]
        first = int(weights.argmax())
        low, high = 0.5 * weights, (2 * weights).clamp_max(1.0)
        low[first] = 1 - 2 * (1 - weights[first])
        numbers = torch.rand(5, dtype=torch.float64)
        numbers[first] = 0
        share = float(exact(numbers, low, high) / Fraction(float(largest_mean(numbers, low, high))))
        assert share <= 1
        closest = max(closest, share)
    assert closest > 1 - 1e-7 or nearly > 30
