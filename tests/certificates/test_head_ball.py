"""Parts of the input taken apart: the bound is the largest value of its form, and never below it."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.certificates.ball.head_ball import norm_of_partitioned_sum


def largest(columns: Tensor, blocks: Tensor) -> float:
    """max over unit a ≥ 0 of c·a + |q∘a|, by many starts of a fixed point and as many random vectors."""
    a = torch.randn(20_000, len(columns), dtype=torch.float64).abs()
    a = a / a.norm(dim=-1, keepdim=True)
    for _ in range(200):
        slope = columns + blocks.square() * a / (blocks * a).norm(dim=-1, keepdim=True).clamp_min(1e-300)
        a = slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return float((a @ columns + (blocks * a).norm(dim=-1)).amax())


def test_the_bound_is_attained() -> None:
    for parts in (1, 2, 3, 5):
        for _ in range(5):
            columns, blocks = 10 ** torch.randn(2, parts, dtype=torch.float64)
            bound, true = float(norm_of_partitioned_sum(columns, blocks)), largest(columns, blocks)
            assert true <= bound <= 1.02 * true


def test_the_bound_holds_for_maps_of_which_only_the_norms_are_known() -> None:
    """K sends each part anywhere, Q keeps them apart: all columns into one vector, which Q's largest part meets."""
    for _ in range(50):
        columns, blocks = 10 ** torch.randn(2, 4, dtype=torch.float64)
        onto = torch.eye(4, dtype=torch.float64)[torch.randint(4, (1,))].mT
        assert float(torch.linalg.matrix_norm(onto * columns + torch.diag(blocks), 2)) <= float(
            norm_of_partitioned_sum(columns, blocks)
        )


def test_equal_blocks_add_up_and_it_is_never_above_the_sum_of_the_norms() -> None:
    columns = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert abs(float(norm_of_partitioned_sum(columns, torch.full_like(columns, 2.0))) - 7.0) < 1e-6
    for blocks in ([0.0, 0.0], [1e-200, 1.0], [1e200, 0.0]):
        q = torch.tensor(blocks, dtype=torch.float64)
        assert float(norm_of_partitioned_sum(columns, q)) <= (5 + float(q.amax())) * (1 + 1e-12)
    assert float(norm_of_partitioned_sum(torch.zeros(2).double(), torch.zeros(2).double())) == 0.0
