"""Bounds at an input against 50-digit truth where float64 loses most, and what their radii promise."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.attention_cases import grid, tokens
from evidence.point_rounding import CLUSTERS, LOGITS, far_clusters, large_logits, ratios, truth
from howsmooth.attention.stages import TokenDerivative, TokenStage
from howsmooth.bounds.point_bounds import three_path
from howsmooth.bounds.three_paths import paths
from howsmooth.meanfield import Measure, local_constant


@pytest.mark.slow
@pytest.mark.parametrize("size", LOGITS)
def test_no_bound_is_false_behind_large_logits(size: float) -> None:
    for seed in range(2):
        found = ratios(large_logits(size, seed, n=5))
        assert min(found.values()) >= 1, found
        assert found["howsmooth.three_path"] <= 5**0.5 * (1 + 1e-9)  # no more than weights on one token would give


@pytest.mark.slow
@pytest.mark.parametrize(("apart", "spread", "slope"), CLUSTERS)
def test_no_bound_is_false_on_clusters_far_apart(apart: float, spread: float, slope: float) -> None:
    for seed in range(3):
        found = ratios(far_clusters(apart, spread, slope, seed, n=6))
        assert min(found.values()) >= 1, found


def test_bounds_stay_sharp_where_clusters_are_close_enough() -> None:
    """Rounding is about 1e-15 of the squared ratio of distance and spread: nothing at 1e4, as it must be."""
    assert ratios(far_clusters(1e2, 0.01, 1e6, 0))["howsmooth.three_path"] < 1.1
    assert ratios(far_clusters(1e8, 0.3, 1e3, 0))["howsmooth.three_path"] < 1.5  # pair by pair nothing cancels


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dot_product", "l2", "sigmoid", "cosine"])
def test_ordinary_inputs_have_tiny_radii(kind: str) -> None:
    x = tokens()
    for name, attention in itertools.islice(grid(kind, "causal"), 0, 400, 97):
        for part in paths(attention, x):
            assert bool((part.upper_weights >= part.weights).all()), name
            assert bool((part.upper_slopes >= part.slopes * (1 - 1e-15)).all()), name
            assert 0 < float(part.radii.weights.max()) < 1e-10, name
            for radius, vectors in ((part.radii.value, part.value), (part.radii.pull, part.pull)):
                assert 0 <= float(radius.max()) < 1e-10 * (1 + float(vectors.abs().max())), name


def test_half_precision_maps_are_promoted_exactly() -> None:
    attention, x = hs.SelfAttention.random(8, heads=2), torch.randn(5, 8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low = copy.deepcopy(attention).to(dtype)
        exact = copy.deepcopy(low).double()
        assert torch.equal(three_path(low, x.to(dtype)), three_path(exact, x.to(dtype).double()))


class Shift(TokenStage, TokenDerivative):
    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        return x + 1, self

    def jvp(self, dx: Tensor) -> Tensor:
        return dx

    def vjp(self, gy: Tensor) -> Tensor:
        return gy

    def select(self, index: Tensor) -> TokenDerivative:
        return self

    def to(self, dtype: torch.dtype) -> TokenDerivative:
        return self

    def size(self) -> float:
        return 1.0


def test_stages_of_unknown_rounding_are_refused() -> None:
    attention = hs.SelfAttention.random(4)
    attention.query_stages.append(Shift())
    with pytest.raises(hs.DoesNotApply, match="the rounding of Shift is not known"):
        three_path(attention, torch.ones(3, 4))


def test_local_constants_of_measures_know_the_rounding_of_logits() -> None:
    case = large_logits(1e5, 0)
    head = hs.SelfAttention.from_bilinear(case.score, case.value)
    found = local_constant(head, Measure.empirical(case.x), rtol=1e-6)
    exact = float(truth(case))
    assert found.moving.lower <= exact <= found.moving.upper
