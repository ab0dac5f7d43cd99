"""Ratios between measures against the bounds of the catalogue, on a sample of the evidence page."""

from __future__ import annotations

import math

import pytest
import torch

import howsmooth as hs
from evidence import wasserstein as evidence
from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, largest_ratio, local_constant, push, ratio, w2
from tests.meanfield.attention_on_measures import build, draw


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
