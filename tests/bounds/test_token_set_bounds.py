"""Bounds on sets: never worse than the papers', tighter on ellipsoids, and false where they must be."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.bounds.lower_bounds import two_cluster_input
from howsmooth.bounds.token_set_bounds import castin_mean_field as printed_mean_field
from howsmooth.bounds.token_set_bounds import crossover
from howsmooth.sets.ellipsoid import Ellipsoid

WIDTH = 4


def _head(seed: int, scale: float = 1.0, **options) -> hs.SelfAttention:
    generator = torch.Generator().manual_seed(seed)
    a, v = (torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return hs.SelfAttention.from_bilinear(scale * a, v, **options)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n", [1, 2, 17, 1000])
def test_own_bounds_are_never_above_those_of_the_paper(seed: int, n: int) -> None:
    head = _head(seed, scale=10.0 ** (seed % 3 - 2))
    where = {"n": n, "over": hs.sets.Ball(0.5 + seed / 4)}
    assert get("howsmooth.sqrt_n")(head, **where) <= get("castin2024.sqrt_n")(head, **where)
    assert get("howsmooth.mean_field")(head, **where) <= get("castin2024.mean_field")(head, **where)
    least = min(get("howsmooth.sqrt_n")(head, **where), get("howsmooth.mean_field")(head, **where))
    assert get("howsmooth.unified")(head, **where) == least


@pytest.mark.parametrize("name", ["sqrt_n", "mean_field", "unified"])
def test_the_ellipsoid_after_normalisation_is_tighter_than_its_ball(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    gain, shift = torch.rand(WIDTH, generator=generator) + 0.1, 0.3 * torch.randn(WIDTH, generator=generator)
    bound = get(f"howsmooth.{name}")
    for seed in range(5):
        head = _head(seed, 0.1, bias=torch.randn(WIDTH, dtype=torch.float64, generator=generator))
        tokens = Ellipsoid.layer_norm(gain, shift)
        assert bound(head, n=50, over=tokens) < 0.9 * bound(head, n=50, over=hs.sets.Ball(tokens.radius))


def test_bounds_scale_with_the_value_matrix() -> None:
    for name in ("howsmooth.sqrt_n", "howsmooth.mean_field", "howsmooth.unified", "castin2024.sqrt_n"):
        one, three = (
            get(name)(hs.SelfAttention.from_bilinear(a, c * v), n=9, over=hs.sets.Ball(1.0))
            for c, (a, v) in ((c, torch.eye(WIDTH, dtype=torch.float64).repeat(2, 1, 1)) for c in (1.0, 3.0))
        )
        assert float(three) == pytest.approx(3 * float(one), rel=1e-14)


def test_the_regimes_cross_at_e_to_the_2a() -> None:
    head = hs.SelfAttention.from_bilinear(-2 * torch.eye(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    n = float(crossover(hs.bounds.setting(head, n=1, over=hs.sets.Ball(1.0)).numbers(True)))
    assert n == pytest.approx(torch.e**4)
    below, above = (get("howsmooth.unified")(head, n=int(m), over=hs.sets.Ball(1.0)) for m in (n - 10, n + 10))
    assert below == get("howsmooth.sqrt_n")(head, n=int(n - 10), over=hs.sets.Ball(1.0))
    assert above == get("howsmooth.mean_field")(head, over=hs.sets.Ball(1.0))


def test_a_query_bias_enters_and_the_papers_refuse_it() -> None:
    bias = torch.ones(WIDTH, dtype=torch.float64)
    with_bias, without = _head(0, bias=bias), _head(0)
    assert get("howsmooth.sqrt_n")(with_bias, n=8, over=hs.sets.Ball(1.0)) > get("howsmooth.sqrt_n")(
        without, n=8, over=hs.sets.Ball(1.0)
    )
    with pytest.raises(hs.DoesNotApply, match=r"queries have no bias.*howsmooth\.sqrt_n"):
        get("castin2024.sqrt_n")(with_bias, n=8, over=hs.sets.Ball(1.0))


def test_the_block_takes_the_better_of_two_sums_over_heads() -> None:
    attention = hs.SelfAttention.random(8, heads=4, dtype=torch.float64)
    bound = get("howsmooth.sqrt_n")
    where = hs.bounds.setting(attention, n=10, over=hs.sets.Ball(1.0))
    summed = bound.evaluate(where, True).sum()
    stacked = torch.linalg.matrix_norm(attention.output_weight.flatten(0, 1), 2) * bound.evaluate(where, False).norm()
    assert bound(attention, n=10, over=hs.sets.Ball(1.0)) == torch.minimum(summed, stacked)
    assert torch.equal(bound(attention, n=10, over=hs.sets.Ball(1.0), per_head=True), bound.evaluate(where, True))
    x = Ellipsoid.ball(1.0, 8).at(torch.nn.functional.normalize(torch.randn(10, 8, dtype=torch.float64)))
    assert float(hs.measure(attention, x)) <= float(bound(attention, n=10, over=hs.sets.Ball(1.0)))


def test_unmasked_constants_are_false_under_a_causal_mask() -> None:
    """A = 0 under a mask is the Cesàro matrix of norm → 2, but the unmasked constants are ‖V‖ = 1."""
    head = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), torch.ones(1, 1), mask="causal")
    measured = float(hs.measure(head, torch.zeros(100, 1), seed=1).lower)
    zero, one = torch.zeros(1), torch.ones(1)
    assert measured > 1.62 > float(printed_mean_field(one, zero, 1.0)) == 1.0
    assert measured < float(get("howsmooth.masked_mean_field")(head, over=hs.sets.Ball(1.0))) == 2.0
    for name in ("castin2024.mean_field", "howsmooth.mean_field", "howsmooth.unified"):
        with pytest.raises(hs.DoesNotApply, match="assumes that logits depend on the tokens alone"):
            get(name)(head, n=100, over=hs.sets.Ball(1.0))


def test_the_sqrt_n_bound_with_half_the_radius_is_false() -> None:
    head = hs.SelfAttention.from_bilinear(-torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    x = two_cluster_input(head, Ellipsoid.ball(8**0.5, 2), n=32)
    bound = get("howsmooth.sqrt_n")
    assert float(bound(head, n=32, over=hs.sets.Ball(8**0.5))) > float(hs.measure(head, x).lower)
    violated = [
        float(hs.measure(head, two_cluster_input(head, Ellipsoid.ball(r, 2), n)).lower)
        > float(bound(head, n=n, over=hs.sets.Ball(r / 2)))
        for r in (0.8, 1.0, 1.4, 2.0)
        for n in (8, 32, 128)
    ]
    assert any(violated)


def test_masked_mean_field_holds_for_long_causal_sequences() -> None:
    head = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1), mask="causal")
    x = two_cluster_input(head, Ellipsoid.ball(1.0, 1), n=1000)
    assert float(hs.measure(head, x)) < float(get("howsmooth.masked_mean_field")(head, over=hs.sets.Ball(1.0)))
