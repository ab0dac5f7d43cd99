"""The balanced mass against enumeration, its bound against the token norm, and the entropy floor under attack."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.bounds.softmax_jacobian import balanced_mass, entropy_floor, printed_floor
from howsmooth.testing import check_bound


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_balanced_mass_is_the_norm_from_the_largest_entry_to_the_sum(size: float) -> None:
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64)
    for seed in range(20):
        p = (size * gaussian(8, seed=seed)).softmax(-1)
        jacobian = torch.diag(p) - torch.outer(p, p)
        norm = float((signs @ jacobian).abs().sum(-1).max())
        lower, upper = map(float, balanced_mass(p))
        assert lower <= norm * (1 + 1e-12)
        assert norm <= upper * (1 + 1e-12)
        if float(p.max()) >= 0.5:
            assert lower == pytest.approx(norm, rel=1e-12)
            assert upper == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("size", [0.3, 1.0, 5.0])
def test_bound_holds_in_the_token_norm(mask: str | None, size: float) -> None:
    bound = get("emadi2026.balanced_mass")
    for seed in range(4):
        attention = hs.SelfAttention.random(6, heads=2, mask=mask, seed=seed, dtype=torch.float64)
        x = size * gaussian(7, 6, seed=seed)
        block, heads = hs.measure(attention, x, norm="token"), hs.measure_heads(attention, x, norm="token")
        assert float(block.lower) <= float(bound(attention, over=x))
        assert bool((heads.lower <= bound(attention, over=x, per_head=True)).all())


def test_half_of_the_bound_is_exceeded() -> None:
    """Negative control: a constant in front that is too small is found out."""
    attention = hs.SelfAttention.from_bilinear(torch.zeros(3, 3), torch.eye(3)).double()
    x = gaussian(5, 3)
    bound = float(get("emadi2026.balanced_mass")(attention, over=x))
    assert float(hs.measure(attention, x, norm="token").lower) > 0.5 * bound
    assert 0 < check_bound("emadi2026.balanced_mass", attention, over=x) <= 1


def test_table_of_the_token_norm_holds_bound_and_measurement() -> None:
    attention, x = hs.SelfAttention.random(4), gaussian(5, 4)
    rows = hs.bounds.table(attention, over=x, norm="token")
    assert [row.name for row in rows] == ["measured", "emadi2026.balanced_mass"]
    assert {row.norm for row in rows} == {"token"}
    usual = hs.bounds.table(attention, over=x)
    assert "emadi2026.balanced_mass" in usual.refused
    assert {row.norm for row in usual} <= {2, math.inf}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 8, 40])
@pytest.mark.parametrize("length", [0.5, 2.0, 6.0, 15.0])
def test_no_logits_of_a_length_have_less_entropy_than_the_floor(n: int, length: float) -> None:
    u = gaussian(500, n)
    starts = torch.cat([u, u.abs().pow(4), torch.nn.functional.one_hot(torch.arange(n), n).double()])
    starts = (starts - starts.mean(-1, keepdim=True)).requires_grad_()
    optimiser = torch.optim.Adam([starts], lr=0.1)
    for _ in range(150):
        logits = length * torch.nn.functional.normalize(starts - starts.mean(-1, keepdim=True), dim=-1)
        p = logits.softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        optimiser.zero_grad()
        entropy.sum().backward()
        optimiser.step()
    least = float(entropy.detach().min())
    assert least >= float(entropy_floor(length, n)) - 4 * n * torch.finfo(torch.float64).eps
    rounding = 4 * n * torch.finfo(torch.float64).eps  # of weights near one, whose entropy is near zero
    assert least >= float(printed_floor(length, n)) - rounding  # as printed: never undercut, not proved here
    assert least <= float(printed_floor(length, n)) * (1 + 1e-2)
