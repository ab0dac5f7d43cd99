"""Lower bounds stay below what is measured on their own constructions, masked and not, in both branches."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from evidence.point_rounding import Case, truth
from howsmooth.bounds import get
from howsmooth.bounds.lower_bounds import large_radius_limit, lower_sqrt_n, real_eigenpairs, two_cluster_input
from howsmooth.sets.ellipsoid import Ellipsoid

EYE = torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("branch", [-1.0, 8.0])
@pytest.mark.parametrize("n", [2, 3, 10, 100, 1000])
def test_both_branches_are_below_the_measured_value(mask: str | None, branch: float, n: int) -> None:
    head = hs.SelfAttention.from_bilinear(branch * EYE, EYE, mask=mask)
    u, radius = torch.tensor([1.0, 0.0], dtype=torch.float64), 1.3
    first, rest = (-radius * u, radius * u) if branch < 0 else (radius * u, radius / 2 * u)
    x = torch.stack([first] + [rest] * (n - 1))
    measured = float(hs.measure(head, x).value)
    one = torch.ones(1, dtype=torch.float64)
    printed = float(lower_sqrt_n(one, one, radius, n))
    assert not printed > measured
    assert (printed == printed) == (n <= 1 + torch.e ** (2 * radius**2))
    best = two_cluster_input(head, Ellipsoid.ball(radius, 2), n)
    bound = float(get("howsmooth.two_cluster")(head, n=n, over=hs.sets.Ball(radius)))
    assert bound <= float(hs.measure(head, best).value) * (1 + 1e-12)
    assert bound >= float(get("castin2024.lower_sqrt_n")(head, n=n, over=hs.sets.Ball(radius)).nan_to_num())


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("seed", range(8))
def test_random_heads_with_biases_and_ellipsoids_are_below_too(mask: str | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, v = (torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    head = hs.SelfAttention.from_bilinear(a, v, torch.randn(4, dtype=torch.float64, generator=generator), mask=mask)
    tokens = Ellipsoid.layer_norm(torch.rand(4, generator=generator), torch.randn(4, generator=generator) * 0.2)
    x = two_cluster_input(head, tokens, n=30)
    bound = float(get("howsmooth.two_cluster")(head, n=30, over=tokens))
    measured = float(hs.measure(head, x).value)
    assert bound <= measured * (1 + 1e-12)
    assert bound > 0.2 * measured  # one column of the Jacobian
    assert measured <= float(get("howsmooth.sqrt_n")(head, n=30, over=tokens))


def test_the_symmetric_part_replaces_real_eigenvalues() -> None:
    """This A has no real eigenvalue, so the printed lower bound is empty; ours is not."""
    a = torch.tensor([[-1.0, 3.0], [-3.0, -1.0]], dtype=torch.float64)
    head = hs.SelfAttention.from_bilinear(a, EYE)
    assert bool(real_eigenpairs(head)[0].isnan().all())
    assert float(get("castin2024.lower_sqrt_n")(head, n=5, over=hs.sets.Ball(1.5))) == 0.0
    assert float(get("howsmooth.two_cluster")(head, n=5, over=hs.sets.Ball(1.5))) > 1.9


def test_eigenpairs_are_eigenpairs_of_the_low_rank_matrix() -> None:
    attention = hs.SelfAttention.random(12, heads=3, dtype=torch.float64)
    values, vectors = real_eigenpairs(attention)
    a = attention.key_weight.mT @ attention.query_weight * attention.scale
    found = ~values.isnan()
    assert bool(found.any())
    image = (a[:, None] @ vectors[..., None])[..., 0]
    assert torch.allclose(image[found], (values[..., None] * vectors)[found], atol=1e-10)
    assert torch.allclose(vectors[found].norm(dim=-1), torch.ones(int(found.sum()), dtype=torch.float64))


def test_heads_wider_than_the_tokens_have_no_eigenpairs_of_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 2, dtype=torch.float64, generator=generator)
    attention = hs.SelfAttention(query, key, torch.eye(6, 2, dtype=torch.float64), scale=1.0)
    values, vectors = real_eigenpairs(attention)
    a = key.mT @ query
    found = ~values.isnan()
    exact = torch.linalg.eigvals(a)
    assert int(found.sum()) == int((exact.imag == 0).sum())
    assert torch.allclose(vectors[found] @ a.mT, values[found][:, None] * vectors[found], atol=1e-10)
    nothing = hs.SelfAttention(query, 0 * key, torch.eye(6, 2, dtype=torch.float64), scale=1.0)
    assert bool(real_eigenpairs(nothing)[0].isnan().all())


@pytest.mark.parametrize("mask", [None, "causal"])
def test_no_lower_bound_is_above_what_its_input_reaches_in_fifty_digits(mask: str | None) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        a, v = torch.randn(2, 2, 2, dtype=torch.float64, generator=generator)
        head = hs.SelfAttention.from_bilinear(10.0**seed * a, v, mask=mask)
        tokens = Ellipsoid.ball(1.0, width=2)
        bound = float(get("howsmooth.two_cluster")(head, n=5, over=tokens))
        x = two_cluster_input(head, tokens, 5)
        if mask is None:
            assert bound <= truth(Case("", 10.0**seed * a, v, x))
        assert bound <= float(hs.measure(head, x, rtol=1e-6).upper)


def test_mean_field_lower_bounds_are_below_the_upper_ones() -> None:
    for b in (0.5, 1.0, 3.0, 200.0):
        plain = hs.SelfAttention.from_bilinear(-b * EYE, EYE)
        masked = hs.SelfAttention.from_bilinear(-b * EYE, EYE, mask="causal")
        low, high = (
            get("howsmooth.two_atom")(plain, over=hs.sets.Ball(1.0)),
            get("howsmooth.mean_field")(plain, over=hs.sets.Ball(1.0)),
        )
        assert 0.5 * (1 + b) * torch.e ** min(b, 300) <= float(low) <= float(high)
        low = get("howsmooth.masked_two_atom")(masked, over=hs.sets.Ball(1.0))
        assert 0 < float(low) <= float(get("howsmooth.masked_mean_field")(masked, over=hs.sets.Ball(1.0)))


@pytest.mark.slow
def test_the_masked_limit_is_approached_from_below() -> None:
    masked = hs.SelfAttention.from_bilinear(-3 * EYE, EYE, mask="causal")
    limit = float(get("howsmooth.masked_two_atom")(masked, over=hs.sets.Ball(1.0)))
    values = [float(get("howsmooth.two_cluster")(masked, n=n, over=hs.sets.Ball(1.0))) for n in (100, 10**4, 10**6)]
    assert values == sorted(values)
    assert values[-1] < limit < 1.01 * values[-1]


def test_a_block_of_several_heads_has_no_lower_bound_by_construction() -> None:
    attention = hs.SelfAttention.random(8, heads=2)
    with pytest.raises(hs.DoesNotApply, match="statement on single heads"):
        get("howsmooth.two_cluster")(attention, n=4, over=hs.sets.Ball(1.0))
    assert get("howsmooth.two_cluster")(attention, n=4, over=hs.sets.Ball(1.0), per_head=True).shape == (2,)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_far_out_the_norm_tends_to_the_in_degree_of_the_hardmax_map(mask: str | None) -> None:
    generator = torch.Generator().manual_seed(2)
    a, v = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    head = hs.SelfAttention.from_bilinear(a, v, mask=mask)
    x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
    limit = float(large_radius_limit(head, x))
    assert float(hs.measure(head, 100 * x)) == pytest.approx(limit, rel=1e-6)
    assert float(hs.measure(head, x)) != pytest.approx(limit, rel=1e-2)


@pytest.mark.parametrize("heads", [1, 3])
def test_equal_tokens_reach_their_bound_in_every_kind_of_block(heads: int) -> None:
    options = {"mask": "causal", "rotary": hs.Rotary.standard(2), "qk_norm": "rms", "softcap": 2.0, "seed": 4}
    attentions = [
        hs.SelfAttention.random(2 * heads, heads, dtype=torch.float64),
        hs.SelfAttention.random(2 * heads, heads, dtype=torch.float64, **options),
        hs.L2SelfAttention(*torch.randn(2, 2 * heads, 2 * heads, dtype=torch.float64), heads=heads),
    ]
    x = torch.full((1, 2 * heads), 0.7, dtype=torch.float64)
    for attention in attentions:
        bound = float(get("howsmooth.equal_tokens")(attention, over=hs.sets.Ball(2.0)))
        assert float(hs.measure(attention, x)) == pytest.approx(bound, rel=1e-12)  # one token: P = 1
        assert float(hs.measure(attention, x.repeat(5, 1)).value) >= bound * (1 - 1e-12)
        per_head = get("howsmooth.equal_tokens")(attention, over=hs.sets.Ball(2.0), per_head=True)
        assert torch.allclose(hs.measure_heads(attention, x).value, per_head, rtol=1e-12)


def test_normalised_values_are_refused_by_the_equal_tokens_bound() -> None:
    cosine = hs.CosineAttention(*torch.eye(2).repeat(3, 1, 1))
    with pytest.raises(hs.DoesNotApply, match="dot_product or l2 attention, not cosine"):
        get("howsmooth.equal_tokens")(cosine, over=hs.sets.Ball(1.0))
