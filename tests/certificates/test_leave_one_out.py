"""All tokens but one: their mean stays within its bound, which a smaller ball does not give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.certificates import draw
from howsmooth.certificates.ball import on_ball
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.point.head_gram import HeadsAt


def first_ball(attention: hs.AttentionMap, x: Tensor, radius: float) -> HeadBall:
    return on_ball.head_balls(HeadsAt(attention, x), on_ball.move_radii(len(x), radius, None))[0]


def mean_of_others(attention: hs.AttentionMap, x: Tensor, values: Tensor, row: int, key: int) -> Tensor:
    """Σ_l≠s P_l v_l/(1 − P_s) in the first head, the values as given."""
    weights = attention.weights(x).flatten(0, -3)[0, row]
    kept = torch.ones(len(x), dtype=torch.bool).index_fill(0, torch.tensor(key), False)
    return weights[kept] @ values[kept] / weights[kept].sum()


def farthest(attention: hs.AttentionMap, x: Tensor, values: Tensor, row: int, key: int, radius: float) -> float:
    """How far an ascent in the ball takes that mean."""
    here, worst = mean_of_others(attention, x, values, row, key), 0.0
    direction = torch.randn_like(here)
    for _ in range(4):
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mean_of_others(attention, at, values, row, key) @ direction, at)
        away = radius * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        direction = mean_of_others(attention, x + away, values, row, key) - here
        worst = max(worst, float(direction.norm()))
    return worst


def reached(seed: int, radius: float, share: float = 1.0) -> list[float]:
    """What is found ÷ the bound for a share of the radius, for the first head and every row that sees two others."""
    attention, x, _ = draw(seed)
    ball, found = first_ball(attention, x, share * radius), []
    for key in range(len(x)):
        others = ball.leave_one_out(torch.full_like(ball.group.heads, key))
        bound = (others.size * ball.value_moment(others.loads, others.centres).sqrt())[0]
        for row in range(len(x)):
            seen = ball.group.seen[0, row]
            if int(seen.sum()) - int(seen[key]) >= 2 and float(bound[row]) > 0:
                found.append(farthest(attention, x, ball.group.value[0], row, key, radius) / float(bound[row]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("radius", [1e-3, 0.1, 0.5])
def test_the_mean_of_all_others_stays_within_its_bound_and_half_the_ball_is_caught(radius: float) -> None:
    assert max(ratio for seed in range(5) for ratio in reached(seed, radius)) <= 1
    assert max(ratio for seed in range(3) for ratio in reached(seed, radius, 0.5)) > 1


def two_groups(gap: float) -> tuple[hs.SelfAttention, Tensor]:
    """One token far from five others that are close to each other, and much looked at."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 3).double() for _ in range(4)]
    x = 0.1 * torch.randn(6, 3).double()
    x[0] += gap
    return hs.SelfAttention(*weights), x


def test_others_that_are_close_to_each_other_hardly_move_however_far_the_one_is() -> None:
    sizes = []
    for gap in (1.0, 10.0):
        ball = first_ball(*two_groups(gap), 1e-3)
        others = ball.leave_one_out(torch.zeros(1, dtype=torch.long))
        sizes.append(float((others.size * ball.value_moment(others.loads, others.centres).sqrt())[0, 1:].amax()))
    assert sizes[1] < 20 * sizes[0]
    old = ball._other_mean_shift((1 - ball.group.upper_weights).clamp_min(1e-300))[0, 1:, 0]
    assert float(old.amax()) > 20 * sizes[1]


def test_a_row_that_sees_one_token_only_has_no_others() -> None:
    attention, x = hs.SelfAttention.random(4, mask="causal").in_dtype(torch.float64), torch.randn(3, 4).double()
    ball = first_ball(attention, x, 0.1)
    others = ball.leave_one_out(torch.zeros(1, dtype=torch.long))
    assert float(others.loads[0, 0].sum()) == 0.0
    assert bool(others.size.isfinite().all() and others.centres.isfinite().all())
    assert bool(ball.change().isfinite().all())
