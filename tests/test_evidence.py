"""The evidence on real heads, on maps small enough for a test."""

from __future__ import annotations

import torch

import howsmooth as hs
from evidence.certified_steps import row, steps


def test_certificate_takes_at_least_as_many_steps_as_the_value() -> None:
    attention = hs.SelfAttention.random(48, heads=3, dtype=torch.float64)
    found = steps(attention, torch.randn(40, 48, dtype=torch.float64))
    assert len(found) == 3
    assert all(1 <= right <= certified for right, certified in found)


def test_row_gives_least_median_and_most() -> None:
    assert row("x", [(1, 4), (2, 9), (3, 5)]) == ["x", "1, 2, 3", "4, 5, 9"]
