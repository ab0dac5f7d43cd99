"""Heads taken together: never below the norm of their sum, and below the sum of their norms."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from howsmooth.certificates.ball.norm_of_head_sum import norm_of_head_sum


def drawn(seed: int, heads: int = 3, width: int = 2, out: int = 8) -> hs.SelfAttention:
    torch.manual_seed(seed)
    weights = [torch.randn(heads * width, 5, dtype=torch.float64) for _ in range(3)]
    return hs.SelfAttention(*weights, torch.randn(out, heads * width, dtype=torch.float64), heads=heads)


@pytest.mark.parametrize("seed", range(20))
def test_the_norm_of_a_sum_of_maps_that_write_where_heads_write_is_bounded(seed: int) -> None:
    attention = drawn(seed)
    sizes = (10 ** torch.randn(3, dtype=torch.float64)).tolist()
    bound = norm_of_head_sum(attention, sizes)
    assert max(sizes) <= bound * (1 + 1e-12)
    assert bound <= sum(sizes) * (1 + 1e-9)
    worst = 0.0
    for _ in range(200):
        maps = [output.mT.double() @ torch.randn(2, 3, dtype=torch.float64) for output in attention.output_weight]
        unit = [size * m / torch.linalg.matrix_norm(m, 2) for size, m in zip(sizes, maps, strict=True)]
        worst = max(worst, float(torch.linalg.matrix_norm(torch.stack(unit).sum(0), 2)))
    assert worst <= bound


def attained(attention: hs.SelfAttention, sizes: list[float]) -> float:
    """The largest |Σ_h s_hw_h| that an alternating search meets over unit vectors w_h that the heads can write."""
    bases, worst = torch.linalg.qr(attention.output_weight.double().mT).Q, 0.0
    for _ in range(8):
        total = torch.randn(bases.shape[1], dtype=torch.float64)
        for _ in range(30):
            written = (bases @ (bases.mT @ total)[..., None])[..., 0]
            written = written / written.norm(dim=-1, keepdim=True)
            total = (torch.tensor(sizes, dtype=torch.float64)[:, None] * written).sum(0)
            worst = max(worst, float(total.norm()))
    return worst


def test_sums_of_what_heads_can_write_stay_below_the_bound_and_the_closest_is_near_it() -> None:
    shares = []
    for seed in range(12):
        attention = drawn(seed, heads=2 + seed % 2, width=1 + seed % 3, out=4)
        sizes = (10 ** (0.3 * torch.randn(attention.heads, dtype=torch.float64))).tolist()
        shares.append(attained(attention, sizes) / norm_of_head_sum(attention, sizes))
    assert 0.98 < max(shares) <= 1
    assert min(shares) > 0.8


def test_heads_that_write_into_the_same_directions_add_up_and_others_do_not() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    weights = [torch.randn(4, 2, dtype=torch.float64) for _ in range(3)]
    same = hs.SelfAttention(*weights, torch.cat([eye, 2 * eye], 1), heads=2)
    assert norm_of_head_sum(same, [1.0, 3.0]) == pytest.approx(4.0, rel=1e-9)
    apart = hs.SelfAttention(*weights, torch.block_diag(eye, 2 * eye), heads=2)
    assert norm_of_head_sum(apart, [1.0, 3.0]) == pytest.approx(10**0.5, rel=1e-9)


def test_an_output_matrix_without_full_rank_gains_nothing() -> None:
    weights = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    attention = hs.SelfAttention(*weights, torch.ones(6, 4, dtype=torch.float64), heads=2)
    assert norm_of_head_sum(attention, [1.0, 3.0]) == pytest.approx(4.0, rel=1e-9)


def test_nothing_and_infinity_pass_through() -> None:
    assert norm_of_head_sum(drawn(0), [0.0, 0.0, 0.0]) == 0.0
    assert norm_of_head_sum(drawn(0), [1.0, float("inf"), 0.0]) == float("inf")
