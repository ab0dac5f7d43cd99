"""The two-atom lower bound against a numerical search, and against local constants of the measures it speaks of."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

import howsmooth as hs
from howsmooth import InvalidInput
from howsmooth.meanfield import local_constant, two_atom, two_atom_measure

U = torch.ones(1, dtype=torch.float64)
FORMULA = {1: "2.99", 2: "12.9", 3: "48", 4: "166", 5: "547"}
MEASURED = {1: 3.069, 2: 12.996, 3: 48.07, 4: 165.85, 5: 546.95}


def head(b: float) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(-b * torch.eye(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))


def stretch(b: float, heavy: float) -> float:
    e = math.exp(2 * b)
    p = e / (e + heavy)
    return heavy**0.5 * p * (1 + 2 * (1 - p) * b)


@pytest.mark.parametrize("b", FORMULA)
def test_value_is_the_supremum_over_mass_ratios(b: int) -> None:
    found = two_atom(b, 1.0)
    best = minimize_scalar(lambda log: -stretch(b, math.exp(log)), bounds=(0, 2 * b + 4), options={"xatol": 1e-9})
    assert found.value == pytest.approx(-best.fun, rel=1e-12)
    assert found.heavy == pytest.approx(math.exp(best.x), rel=1e-5)
    assert f"{found.value:.3g}" == FORMULA[b]
    assert two_atom(b / 4, 2.0) == found  # only γR² counts


@pytest.mark.slow
@pytest.mark.parametrize("b", MEASURED)
def test_measured_supremum_is_slightly_larger_and_below_the_bound(b: int) -> None:
    best = minimize_scalar(
        lambda log: -float(local_constant(head(b), two_atom_measure(U, 1.0, math.exp(log)))),
        bounds=(0, 2 * b + 4),
        method="bounded",
    )
    assert -best.fun == pytest.approx(MEASURED[b], rel=2e-4)
    assert (
        two_atom(b, 1.0).value
        < -best.fun
        <= float(hs.bounds.get("howsmooth.mean_field")(head(b), over=hs.sets.Ball(1.0)))
    )


@pytest.mark.parametrize("b", [0.3, 1.0, 2.5])
def test_value_is_below_the_local_constant_of_its_own_measure(b: float) -> None:
    found = two_atom(b, 1.0)
    assert found.value <= float(local_constant(head(b), two_atom_measure(U, 1.0, found.heavy)))
    assert found.value >= 0.5 * (1 + b) * math.exp(b)


def test_any_matrix_with_that_eigenvalue_will_do() -> None:
    u = torch.tensor([3.0, 4.0], dtype=torch.float64)
    a = (
        torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64) @ (torch.eye(2) - torch.outer(u, u) / 25)
        - 2 * torch.outer(u, u) / 25
    )
    v = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(a @ u, -2 * u)
    found = two_atom(2.0, 1.0)
    attention = hs.SelfAttention.from_bilinear(a, v)
    pull = float((v @ u / 5).norm())
    assert found.value * pull <= float(local_constant(attention, two_atom_measure(u, 1.0, found.heavy)))


def test_an_attractive_head_is_smooth_at_the_same_measure() -> None:
    found = two_atom(3.0, 1.0)
    attracted = local_constant(head(-3.0), two_atom_measure(U, 1.0, found.heavy))
    assert float(attracted) < 0.1 * found.value


@pytest.mark.parametrize(("gamma", "radius"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_bad_arguments_are_refused(gamma: float, radius: float) -> None:
    with pytest.raises(InvalidInput, match="two atoms need"):
        two_atom(gamma, radius)
