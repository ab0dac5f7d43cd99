"""The largest mean of numbers under a distribution whose weights lie between two ends."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.numerics.roundoff import gamma


def largest_mean(numbers: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """max Σ_j p_j·number_j over low ≤ p ≤ high, Σp = 1, along the last axis.

    The free mass 1 − Σ low goes to the largest numbers first. It is known to within a few roundings of 1, a large
    relative error where one weight is nearly 1.

    >>> n, none, most = torch.tensor([1.0, 5.0, 3.0]), torch.zeros(3), torch.tensor([1.0, 0.25, 0.5])
    >>> float(largest_mean(n, none, most))  # ¼·5 + ½·3 + ¼·1
    3.0
    """
    order = numbers.argsort(-1, descending=True)
    sorted_numbers, floor, room = (t.gather(-1, order) for t in (numbers, low, high - low))
    free = (1 - low.sum(-1, keepdim=True) + gamma(8 * (numbers.shape[-1] + 2))).clamp_min(0.0)
    before = room.cumsum(-1) - room
    taken = torch.minimum((free - before).clamp_min(0.0), room)
    return ((floor + taken) * sorted_numbers).sum(-1) * (1 + gamma(8 * numbers.shape[-1]))
