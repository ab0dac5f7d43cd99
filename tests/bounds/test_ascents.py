"""The attack on the upper bounds: is the engine right, does it leave no bound out, and what does a small run find?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.ascent import Case, ascend, exact, follow, refine
from evidence.bound_ascents import CONTROLS, Control, Effort, attack, cases_for, disprove, upper_bounds
from evidence.bound_cases import KINDS, Draw, coordinates, kinds, places, stream
from howsmooth.bounds import Bound
from howsmooth.bounds.catalogue import Assumption
from howsmooth.bounds.l2_bounds import phi_inverse
from howsmooth.sets.ellipsoid import Ellipsoid

pytestmark = pytest.mark.slow

SMALL = Effort(least=8, starts=8, steps=40)
ONE = torch.ones(1, 1, dtype=torch.float64)


def head(score: Tensor, mask: str | None = None) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(score, torch.eye(len(score), dtype=torch.float64), mask=mask)


def quiet(_: str) -> None:
    """Progress is not shown in tests."""


def test_value_equals_dense_svd_of_the_closed_form() -> None:
    draw = Draw(0)
    attention, z = hs.SelfAttention.random(4, heads=2, dtype=torch.float64, mask="causal"), draw.normal(3, 5, 4)
    case = Case("", {"z": z}, lambda _: attention)
    expected = torch.linalg.svdvals(hs.jacobian(attention, z).dense())[:, 0]
    torch.testing.assert_close(exact(case, case.start), expected, rtol=1e-12, atol=0)


def test_atoms_with_masses_equal_repeated_tokens() -> None:
    draw = Draw(1)
    score, z, copies = draw.normal(2, 2), draw.normal(1, 3, 2), torch.tensor([2, 3, 4])
    case = Case("", {"z": z, "log_mass": copies.double().log()[None]}, lambda _: head(score))
    repeated = Case("", {"z": z.repeat_interleave(copies, 1)}, lambda _: head(score))
    torch.testing.assert_close(exact(case, case.start), exact(repeated, repeated.start), rtol=1e-12, atol=0)


def test_ordered_atoms_know_the_mask_and_the_splitting_of_mass() -> None:
    """max(‖J‖, max_i ‖C_i A‖) for equal masses, J causal and C_i the covariance of the tokens up to i."""
    draw = Draw(2)
    score, z = 3 * draw.normal(2, 2), 2 * draw.normal(4, 5, 2)
    case = Case("", {"z": z, "log_mass": torch.zeros(4, 5)}, lambda _: head(score, "causal"), ordered=True)
    joint = exact(Case("", {"z": z}, lambda _: head(score, "causal")), {"z": z})
    weights = head(score, "causal").weights(z)[:, 0]
    centred = z[:, None] - (weights @ z)[:, :, None]
    covariance = centred.mT @ (weights[..., None] * centred)
    splitting = torch.linalg.matrix_norm(covariance @ score, 2).amax(1)
    torch.testing.assert_close(exact(case, case.start), torch.maximum(joint, splitting), rtol=1e-10, atol=0)


@pytest.mark.parametrize("norm", [2, math.inf])
def test_gradient_through_fixed_vectors_equals_difference_quotient(norm: float) -> None:
    draw = Draw(3)
    start = {"z": draw.normal(4, 5, 2), "query": draw.normal(4, 2, 2), "value": draw.normal(4, 2, 2)}
    case = Case("", start, lambda free: hs.L2SelfAttention(free["query"], free["value"], mask="causal"))
    left = refine(case, start, draw.normal(4, 5, 2), norm, rounds=150)
    free = {name: value.clone().requires_grad_() for name, value in start.items()}
    _, height = follow(case, free, left, norm)
    torch.testing.assert_close(height.detach(), exact(case, start, norm), rtol=1e-9, atol=0)
    height.sum().backward()
    step = {name: 1e-6 * draw.normal(*value.shape) for name, value in start.items()}
    ahead, behind = ({name: start[name] + sign * step[name] for name in start} for sign in (1, -1))
    quotient = (exact(case, ahead, norm) - exact(case, behind, norm)) / 2
    slope = sum((free[name].grad * step[name]).flatten(1).sum(1) for name in start)
    torch.testing.assert_close(quotient, slope, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(("b", "supremum"), [(1.0, 3.069), (2.0, 12.996)])
def test_ascent_finds_the_worst_two_atoms(b: float, supremum: float) -> None:
    draw = Draw(4)
    start = {"z": coordinates(draw, 2, 1, 8), "log_mass": draw.normal(8, 2)}
    case = Case("", start, lambda _: head(-b * ONE), Ellipsoid.ball(1.0, 1))
    found = exact(case, ascend(case)).max()
    assert float(found) == pytest.approx(supremum, rel=5e-4)


def test_ascent_finds_the_worst_tokens_of_l2_attention_in_the_infinity_norm() -> None:
    """Between the tight construction and the theorem: 4φ⁻¹ − 1 + 2/(1+φ⁻¹) ≤ Lip_∞ ≤ 4φ⁻¹ + 1, N = 9."""
    case = Case("", {"z": 2 * Draw(5).normal(12, 9, 1)}, lambda _: hs.L2SelfAttention(ONE, ONE))
    found, c = float(exact(case, ascend(case, norm=math.inf, steps=100), math.inf).max()), phi_inverse(8)
    assert 4 * c - 1 + 2 / (1 + c) <= found <= 4 * c + 1


def test_tokens_stay_where_they_may_be() -> None:
    draw = Draw(6)
    centre, score = draw.normal(4, 2), draw.normal(2, 2)
    inside = Case("", {"z": 3 * draw.normal(6, 4, 2)}, lambda _: head(score), Ellipsoid.ball(1.5, 2))
    near = Case("", {"z": 3 * draw.normal(6, 4, 2)}, lambda _: head(score), centre=centre, eps=0.2)
    for case, middle, reach in ((inside, 0.0, 1.5), (near, centre, 0.2)):
        moved = (case.input(ascend(case, steps=20)) - middle).norm(dim=-1)
        assert reach * 0.99 < float(moved.max()) <= reach * (1 + 1e-12)


@pytest.mark.parametrize("bound", upper_bounds(), ids=lambda bound: bound.name)
def test_no_upper_bound_is_left_unattacked(bound: Bound) -> None:
    assert places(bound), f"{bound.name}: no place is known for the scope {bound.scope!r}"
    assert set(kinds(bound)) <= set(KINDS)
    for place in places(bound):
        next(cases_for(place, [bound], {bound.name: 1}, Effort(starts=1)))


def test_bound_without_cases_is_reported() -> None:
    never = replace(hs.bounds.get("howsmooth.sqrt_n"), assumptions=(Assumption("pigs fly", lambda where: False),))
    with pytest.raises(AssertionError, match=r"no case is drawn \(set\) that howsmooth.sqrt_n take"):
        attack([never], replace(SMALL, patience=20), quiet)


def test_cases_cover_what_bounds_cover() -> None:
    """Every option and both ends of the shapes turn up in the cases of a full run."""
    words = [case.where for _, case in zip(range(300), stream(["dot_product"], "set", 1), strict=False)]
    for option in (
        *("n=2,", "n=64, d=8", "d=1,", "skew", "negative definite", "low rank", "random A", "two heads"),
        *("mask none", "mask causal", "mask window", "query bias", "rotary", "ALiBi", "soft-cap", "q/k norm"),
        *("after LayerNorm", "after RMSNorm"),
    ):
        assert any(option in line for line in words), option


@pytest.mark.slow
@pytest.mark.parametrize("place", sorted({place for bound in upper_bounds() for place in places(bound)} - {"free"}))
def test_bounds_on_sets_survive(place: str) -> None:
    found = attack([bound for bound in upper_bounds() if place in places(bound)], SMALL, quiet)
    assert found
    for name, record in found.items():
        assert record.maximisations >= SMALL.least, name
        assert record.violations == 0, f"{name} is passed {record.largest:.6f} times: {record.where}"


@pytest.mark.slow
@pytest.mark.parametrize("bound", [b for b in upper_bounds() if "free" in places(b)], ids=lambda bound: bound.name)
def test_bound_climbed_by_itself_survives(bound: Bound) -> None:
    record = attack([bound], SMALL, quiet)[bound.name]
    assert record.maximisations >= SMALL.least
    assert record.violations == 0, f"{bound.name} is passed {record.largest:.6f} times: {record.where}"


def test_bound_that_is_too_small_does_not_survive() -> None:
    true = hs.bounds.get("howsmooth.three_path")
    small = replace(true, evaluate=lambda where, folded: 0.9 * true.evaluate(where, folded))
    assert attack([small], SMALL, quiet)[true.name].violations > 0


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.words)
def test_false_bound_is_passed(control: Control) -> None:
    assert disprove(control, most=1).violations > 0
