"""Allocations against every possible one, and rivals against what they say they are."""

from __future__ import annotations

import itertools

import pytest
import torch

import howsmooth as hs
from evidence.rounding_baselines import by_sensitivity, rivals
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import cached_jacobian
from howsmooth.models import CapturedSite
from howsmooth.rounding import parse_format, parse_formats
from howsmooth.rounding.allocation import allocate, first_and_last, uniform
from howsmooth.rounding.kv_cache import Cache

FORMATS, BITS = parse_formats("int2,int4,int8"), [2.25, 4.25, 8.25]


def damages(layers: int, heads: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([4.0**-form.bits for form in FORMATS], dtype=torch.float64)
    part = 10 ** (2 * torch.randn(layers, 2, 1, heads, generator=generator, dtype=torch.float64))
    return part * sizes[:, None]


@pytest.mark.parametrize("budget", [2.25, 3.0, 4.25, 5.7, 8.25])
@pytest.mark.parametrize("per", ["model", "layer", "part", "head"])
def test_allocation_is_the_best_of_all(per: str, budget: float) -> None:
    damage = damages(3 if per != "head" else 2, heads=1 if per != "head" else 2)
    found = allocate(damage, FORMATS, BITS, budget, per)
    layers, parts, _, heads = damage.shape
    shape = {
        "model": (1, parts, 1),
        "layer": (layers, 1, 1),
        "part": (layers, parts, 1),
        "head": (layers, parts, heads),
    }[per]
    best = float("inf")
    for picks in itertools.product(range(3), repeat=torch.Size(shape).numel()):
        choice = torch.tensor(picks).reshape(shape).expand(layers, parts, heads)
        if float(torch.tensor(BITS, dtype=torch.float64)[choice].mean()) <= budget + 1e-9:
            best = min(best, float(damage.gather(2, choice[:, :, None]).sum()))
    assert found.damage == pytest.approx(best, rel=1e-12)
    assert found.bits <= budget + 1e-9


def test_more_bits_never_cost_damage_and_finer_units_never_do() -> None:
    damage = damages(6, heads=2)
    budgets = [2.25, 3, 4, 5, 6, 8.25]
    by_part = [allocate(damage, FORMATS, BITS, budget).damage for budget in budgets]
    by_head = [allocate(damage, FORMATS, BITS, budget, "head").damage for budget in budgets]
    assert by_part == sorted(by_part, reverse=True)
    assert all(fine <= coarse * (1 + 1e-12) for fine, coarse in zip(by_head, by_part, strict=True))


def test_allocation_is_never_worse_than_uniform_at_its_own_bits() -> None:
    """Heads of 48 numbers: a scale of 16 bits makes thirds of a bit, which no step of the budget meets."""
    bits = [form.bits_per_number(width=48, tokens=128) for form in FORMATS]
    damage = damages(6)
    for budget in bits:
        assert allocate(damage, FORMATS, bits, budget).damage <= uniform(damage, FORMATS, bits, budget).damage
    assert allocate(damage, FORMATS, bits, bits[1]).bits > bits[1] - 0.01


def test_uniform_and_first_and_last_stay_within_the_budget_and_are_what_they_say() -> None:
    damage = damages(10)
    same = uniform(damage, FORMATS, BITS, 5.0)
    assert set(same.choice.flatten().tolist()) == {1}
    ends = first_and_last(damage, FORMATS, BITS, 4.25)  # the others have int2: (4.25 − 2.25)/6 of ten layers
    assert ends.choice[:, 0, 0].tolist() == [2, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert ends.bits <= 4.25
    ours = allocate(damage, FORMATS, BITS, 4.25)
    assert ours.damage < min(ends.damage, uniform(damage, FORMATS, BITS, 4.25).damage)


def test_a_sensitivity_that_is_right_gives_the_same_allocation() -> None:
    damage = damages(6)
    root = (damage[:, :, 0, 0] * 4**2).sqrt()
    found = by_sensitivity(root, damage, FORMATS, BITS, 4.25)
    assert found.damage == pytest.approx(allocate(damage, FORMATS, BITS, 4.25).damage)
    worse = by_sensitivity(-root, damage, FORMATS, BITS, 4.25)
    assert worse.damage > found.damage


def test_assignments_name_formats_by_layer_part_and_head() -> None:
    found = allocate(damages(2, heads=2), FORMATS, BITS, 4.25, "head")
    assert set(found.assignment) == {(0, "key"), (0, "value"), (1, "key"), (1, "value")}
    assert all(len(formats) == 2 for formats in found.assignment.values())
    names = [[FORMATS[i].name for i in heads] for heads in found.choice[:, 1].tolist()]
    assert found.by_layer("value") == [row if row[0] != row[1] else row[:1] for row in names]


@pytest.mark.parametrize(
    ("budget", "said"),
    [(2.0, "below the smallest format .int2: 2.25 bits"), (9.0, "above the largest format .int8: 8.25 bits")],
)
def test_budgets_out_of_reach_are_refused(budget: float, said: str) -> None:
    for way in (allocate, uniform, first_and_last):
        with pytest.raises(InvalidInput, match=said):
            way(damages(2), FORMATS, BITS, budget)


def test_rivals_are_what_they_say() -> None:
    attention = hs.SelfAttention.random(32, heads=4, kv_heads=2, mask="causal", dtype=torch.float64)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    site, form = CapturedSite(0, "a", attention, x, 0.0), parse_format("int4")
    found, cache = rivals([site, site, site], form), Cache.of(site)
    error = cache.shared(cache.rounded("key", form) - cache.key)
    dense = cached_jacobian(attention, x, "keys", per_head=True).dense()
    sigma = torch.linalg.matrix_norm(dense, ord=2) * torch.linalg.matrix_norm(error)
    assert float(found["sigma"][1, 0]) == pytest.approx(float(sigma.norm()), rel=0.02)
    columns = dense.unflatten(-1, (12, 8)).square().sum((1, 3)) * error.square().mean(-1)
    assert float(found["gain"][2, 0]) == pytest.approx(float(columns.sum().sqrt()), rel=1e-6)
    weights = attention.weights(x)
    assert float(found["entropy"][0, 1]) == pytest.approx(-float(torch.special.entr(weights).sum(-1).mean()))
    assert found["ends"][:, 0].tolist() == [1.0, 0.5, 1.0]
