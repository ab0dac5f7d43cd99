"""Distances of measures against scipy's programmes and assignments, and closed forms.

Ratios between measures against the bounds of the catalogue, on a sample of the evidence page.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import wasserstein_distance

import howsmooth as hs
from evidence import wasserstein as evidence
from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, conditional, distance, largest_ratio, local_constant, push, ratio, w2
from howsmooth.meanfield.distances import wasserstein
from tests.meanfield.attention_on_measures import build, draw


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


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["unmasked", "causal"])
def test_no_pair_passes_a_bound_and_close_pairs_reach_the_local_constant(causal: bool) -> None:
    found = evidence.count(24, causal)
    assert len(found.tallies) == 3 * (1 if causal else 2)
    for tally in found.tallies.values():
        assert (tally.pairs, tally.passed) == (24, 0)
        assert 0.001 < tally.largest <= 1
    for errors in found.deviations.values():
        assert len(errors) >= 12
        assert max(errors) < 1e-3


def test_a_bound_that_is_too_small_would_be_noticed() -> None:
    tally = evidence.Tally()
    tally.add(1.1, bound=1.0)
    tally.add(0.9, bound=1.0)
    assert (tally.pairs, tally.passed, tally.largest) == (2, 1, 1.1)


def test_random_pairs_cover_every_shape_and_stay_on_the_ball() -> None:
    generator = torch.Generator().manual_seed(0)
    skew = evidence.head(generator, "skew", 3, 2.0, False).query_weight[0]
    negative = evidence.head(generator, "negative definite", 3, 2.0, False).query_weight[0]
    low = evidence.head(generator, "low rank", 3, 2.0, False).query_weight[0]
    torch.testing.assert_close(skew, -skew.T)
    assert float(torch.linalg.eigvalsh(negative).max()) <= 1e-12
    assert int(torch.linalg.matrix_rank(low)) == 1
    for a in (skew, negative, low):
        assert float(torch.linalg.matrix_norm(a, 2)) == pytest.approx(2.0)
    assert all(evidence.draw(generator, 2, 1.5, None).support_radius <= 1.5 for _ in range(20))


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "heavy"), [(0.0, 1e3), (0.1, 1e4), (3.0, 1e5)])
def test_unmasked_bounds_are_false_under_a_mask(strength: float, heavy: float) -> None:
    found, unmasked, masked = evidence.misapplied(strength, heavy)
    assert unmasked * 1.02 < found <= masked


def test_running_means_stretch_by_nearly_two_where_the_unmasked_constants_are_one() -> None:
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    causal, plain = hs.SelfAttention.from_bilinear(zero, one, mask="causal"), hs.SelfAttention.from_bilinear(zero, one)
    expected = {2: 1.144, 10: 1.410, 100: 1.630, 1000: 1.748}
    for n, norm in expected.items():
        tokens = torch.zeros(n, 1)
        assert float(local_constant(causal, Measure.of_tokens(tokens), rtol=1e-4)) == pytest.approx(norm, abs=6e-4)
        assert float(local_constant(plain, Measure.empirical(tokens))) == pytest.approx(1.0, rel=1e-9)
    for name in evidence.UNMASKED:
        assert float(hs.bounds.get(name)(plain, over=hs.sets.Ball(1.0))) == 1.0
        with pytest.raises(hs.DoesNotApply):
            hs.bounds.get(name)(causal, over=hs.sets.Ball(1.0))
    assert float(hs.bounds.get("howsmooth.masked_mean_field")(causal, over=hs.sets.Ball(1.0))) == 2.0


def test_ratio_is_the_quotient_of_distances() -> None:
    attention, mu, nu = build("l2"), draw([1, 2]), draw([3, 1, 1], seed=1)
    assert ratio(attention, mu, nu) == w2(push(attention, mu), push(attention, nu)) / w2(mu, nu)


def test_largest_ratio_comes_with_its_pair() -> None:
    attention = build("dot_product")
    pairs = [(draw([1, 2], seed=i), draw([1, 1, 1], seed=50 + i)) for i in range(8)]
    value, pair = largest_ratio(attention, iter(pairs))
    assert value == max(ratio(attention, *each) for each in pairs) == ratio(attention, *pair)
    assert value > ratio(attention, *pairs[0]) or pair is pairs[0]


def test_pairs_without_a_ratio_are_refused() -> None:
    attention, mu = build("dot_product"), draw([1, 2])
    with pytest.raises(InvalidInput, match="the two measures are the same"):
        ratio(attention, mu, mu)
    masked = build("dot_product", causal=True)
    with pytest.raises(InvalidInput, match="different masses at some position"):
        ratio(masked, draw([1, 2], positions=[0.5, 1.0]), draw([2, 1], positions=[0.5, 1.0]))
    with pytest.raises(InvalidInput, match="at least one pair"):
        largest_ratio(attention, [])
    assert math.isfinite(ratio(attention, mu, draw([1, 2], seed=1)))
