"""Distances of measures against scipy's programmes and assignments, and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import wasserstein_distance

from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, conditional, distance, w2
from howsmooth.meanfield.distances import wasserstein
from tests.meanfield.attention_on_measures import draw


def by_linprog(mu: Measure, nu: Measure, p: float) -> float:
    """The definition: least cost over all plans with these marginals."""
    m, n = len(mu), len(nu)
    costs = torch.cdist(mu.atoms, nu.atoms, compute_mode="donot_use_mm_for_euclid_dist") ** p
    marginals = np.vstack([np.kron(np.eye(m), np.ones(n)), np.kron(np.ones(m), np.eye(n))])
    masses = torch.cat([mu.weights, nu.weights]).numpy()
    return float(linprog(costs.flatten().numpy(), A_eq=marginals, b_eq=masses, method="highs").fun ** (1 / p))


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 1.5, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_wasserstein_equals_the_linear_programme(p: float, seed: int) -> None:
    mu, nu = draw([1, 1e-4, 3, 2], seed=seed), draw([1, 0.1, 0.7], seed=100 + seed)
    assert wasserstein(mu, nu, p) == pytest.approx(by_linprog(mu, nu, p), rel=1e-9)


def test_equal_weights_are_an_assignment() -> None:
    x, y = torch.randn(2, 40, 3, dtype=torch.float64)
    costs = torch.cdist(x, y).square().numpy()
    best = costs[linear_sum_assignment(costs)].sum()
    assert w2(Measure.empirical(x), Measure.empirical(y)) == pytest.approx((best / 40) ** 0.5, rel=1e-12)


def test_on_the_line_it_is_the_distance_of_quantiles() -> None:
    mu, nu = draw([1, 2, 3, 4], width=1), draw([5, 1, 1], width=1, seed=1)
    arrays = (part.flatten().numpy() for part in (mu.atoms, nu.atoms, mu.weights, nu.weights))
    assert wasserstein(mu, nu, 1) == pytest.approx(wasserstein_distance(*arrays), rel=1e-12)


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-9])
def test_small_distances_are_exact(step: float) -> None:
    mu = draw([1, 1e-6, 3, 2])
    displacement = torch.randn(4, 3, dtype=torch.float64)
    expected = step * (mu.weights[:, None] * displacement.square()).sum().sqrt()
    assert w2(mu, mu.moved(step * displacement)) == pytest.approx(float(expected), rel=1e-6)
    assert w2(mu, mu) == 0


@pytest.mark.parametrize("scale", [1e-150, 1e100])
def test_distances_scale_with_the_space(scale: float) -> None:
    mu, nu = draw([1, 2, 3]), draw([1, 4], seed=1)
    there, back = (Measure(scale * part.atoms, part.weights) for part in (mu, nu))
    assert w2(there, back) == pytest.approx(scale * w2(mu, nu), rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(1, 5))
def test_it_is_a_distance(seed: int, p: float) -> None:
    a, b, c = draw([1, 2, 3], seed=seed), draw([1, 0.3], seed=seed + 1), draw([2, 1, 1, 5], seed=seed + 2)
    assert wasserstein(a, b, p) == pytest.approx(wasserstein(b, a, p), rel=1e-9)
    assert wasserstein(a, c, p) <= wasserstein(a, b, p) + wasserstein(b, c, p) + 1e-9
    assert wasserstein(a, b, 1) <= wasserstein(a, b, p) + 1e-9  # monotone in p


def test_conditional_distance_sums_over_positions() -> None:
    places = [0.25, 0.25, 0.75]
    mu, nu = draw([1, 3, 4], positions=places), draw([2, 2, 4], positions=places, seed=1)
    first = w2(Measure(mu.atoms[:2], [0.25, 0.75]), Measure(nu.atoms[:2], [0.5, 0.5]))
    second = float((mu.atoms[2] - nu.atoms[2]).norm())
    assert conditional(mu, nu) == pytest.approx((0.5 * first**2 + 0.5 * second**2) ** 0.5, rel=1e-12)
    assert conditional(mu, nu, p=3) != pytest.approx(conditional(mu, nu))
    assert distance(mu, nu) == conditional(mu, nu)


def test_conditional_distance_is_at_least_the_one_that_forgets_positions() -> None:
    places, gains = [0.25, 0.5, 0.75], []
    for seed in range(10):
        mu, nu = draw([1, 3, 4], positions=places, seed=seed), draw([2, 6, 8], positions=places, seed=50 + seed)
        gains.append(conditional(mu, nu) / w2(Measure(mu.atoms, mu.weights), Measure(nu.atoms, nu.weights)))
    assert min(gains) >= 1 - 1e-12
    assert max(gains) > 1.05


@pytest.mark.parametrize(
    ("weights", "places"), [([1, 1], [0.25, 0.75]), ([1, 3], [0.25, 0.5]), ([1, 3 + 1e-6], [0.25, 0.75])]
)
def test_mass_cannot_change_its_position(weights: list[float], places: list[float]) -> None:
    mu = draw([1, 3], positions=[0.25, 0.75])
    assert conditional(mu, draw(weights, positions=places)) == math.inf
    assert conditional(mu, draw([1, 3], positions=[0.25, 0.75])) == 0


def test_calls_that_mean_nothing_are_refused() -> None:
    plain, masked = draw([1, 2]), draw([1, 2], positions=[0.5, 1.0])
    with pytest.raises(InvalidInput, match="compare measures that have them with `conditional`"):
        w2(plain, masked)
    with pytest.raises(InvalidInput, match="d_p needs positions in both"):
        distance(plain, masked)
    with pytest.raises(InvalidInput, match=r"R\^3 and R\^2"):
        w2(plain, draw([1], width=2))
    for p in (0.5, math.inf, math.nan):
        with pytest.raises(InvalidInput, match="finite p ≥ 1"):
            wasserstein(plain, plain, p)
