"""Weights, means and covariances of perturbed rows lie within their proved bounds; wrong variants do not."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.certificates import draw
from howsmooth.bounds.three_paths import scatter
from howsmooth.certificates.ball import on_ball
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.weight_perturbation import WeightPerturbation, largest_mean
from howsmooth.certificates.point.head_gram import HeadsAt

ROWS, KEYS, WIDTH = 4, 7, 3


class Drawn:
    """Rows of weights with values and keys, and every perturbation of them."""

    def __init__(self, seed: int, size: float):
        g, self.size = torch.Generator().manual_seed(seed), size
        self.scores = 2 * torch.randn(1, ROWS, KEYS, generator=g).double()
        self.scores[0, 0, 2:4] = -torch.inf
        self.weights = torch.softmax(self.scores, -1)
        self.value = torch.randn(1, KEYS, WIDTH, generator=g).double()
        keys = torch.randn(1, KEYS, WIDTH, generator=g).double()
        self.mean = self.weights @ self.value
        self.apart = keys[:, None] - (self.weights @ keys)[:, :, None]
        lean = (self.weights[..., None] * self.apart).mT @ self.apart
        alpha = torch.linalg.matrix_norm(lean, 2).sqrt()
        bounds = torch.full_like(self.scores, size)
        off = torch.full_like(self.scores[..., :1], 1e-12)
        self.perturbation = WeightPerturbation(
            self.scores, self.weights * (1 + 1e-12), off, size * self.apart.norm(dim=-1), bounds, size * alpha
        )
        step = torch.randn(1, ROWS, WIDTH, generator=g).double()
        self.own = (self.apart @ (size * step / step.norm(dim=-1, keepdim=True))[..., None])[..., 0]
        self.keys = size * (torch.rand(1, ROWS, KEYS, generator=g) > 0.5).double().mul(2).sub(1)
        self.probe = torch.randn(1, ROWS, KEYS, generator=g).double()

    def moment(self, weights: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(scatter(weights.expand(1, ROWS, KEYS), self.value, self.mean), 2)

    def product_norm(self, drift: Tensor, share: float = 1.0) -> Tensor:
        apart, mixed = self.value[:, None] - self.mean[:, :, None], self.perturbation.mixture
        pairs = (apart[..., :, None] * self.apart[..., None, :]).flatten(-2) * mixed.sqrt()[..., None]
        lean = torch.linalg.matrix_norm(self.apart * mixed.sqrt()[..., None], 2)
        return share * self.size * (torch.linalg.matrix_norm(pairs, 2) + 0.5 * drift * lean)

    def perturbed(self) -> Tensor:
        return torch.softmax(self.scores + self.own + self.keys, -1)

    def covariance(self, weights: Tensor) -> Tensor:
        centred = self.probe - (weights * self.probe).sum(-1, keepdim=True)
        return torch.einsum("gij,gjk->gik", weights * centred, self.value)


def outside(seed: int, size: float, share: float = 1.0) -> dict[str, float]:
    """The excess of perturbed rows over bounds made for a share of the perturbation, relative to the bounds."""
    drawn = Drawn(seed, size)
    t = drawn.perturbation
    t = replace(
        t,
        query_shifts=share * t.query_shifts,
        key_shifts=share * t.key_shifts,
        query_deviation=share * t.query_deviation,
    )
    after, spread = drawn.perturbed(), drawn.moment(drawn.weights).sqrt()
    drift = t.mean_shift_by_query(spread) + drawn.moment(t.upper(0.0)).sqrt() * torch.sinh(t.max_key_shift)
    product_norm = drawn.product_norm(t.mean_shift_by_query(spread), share)
    steps = [t.query_step(drawn.moment, t.mean_shift_by_query(spread), product_norm), *t.key_steps(drawn.moment)]
    change = sum(2 * s.factor * (s.mixture * drawn.probe.square()).sum(-1).sqrt() for s in steps)
    moved = ((after - drawn.weights) @ drawn.value).norm(dim=-1)
    turned = (drawn.covariance(after) - drawn.covariance(drawn.weights)).norm(dim=-1)
    return {
        "high": float((after - t.upper()).max()),
        "low": float((t.lower() - after).max()),
        "mean": float((moved / drift).max()) - 1,
        "covariance": float((turned / change).max()) - 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 2.0])
def test_perturbed_rows_stay_within_their_bounds(size: float) -> None:
    found = [outside(seed, size) for seed in range(100)]
    assert all(value <= 1e-12 for one in found for value in one.values())


@pytest.mark.slow
def test_perturbations_that_are_assumed_too_small_are_caught() -> None:
    found = [outside(seed, 0.3, share=0.25) for seed in range(200)]
    assert all(max(one[name] for one in found) > 0 for name in ("high", "low", "mean", "covariance"))


def test_a_perturbation_whose_mean_is_not_zero_leaves_its_ends() -> None:
    """Weights grow by no more than e^B because β has mean zero under P⁰; with another mean they do."""
    worst = 0.0
    for seed in range(50):
        drawn = Drawn(seed, 0.5)
        still = replace(drawn.perturbation, key_shifts=torch.zeros_like(drawn.keys))
        lopsided = drawn.perturbation.query_shifts.clone()
        lopsided[..., 1:] *= -1
        worst = max(worst, float((torch.softmax(drawn.scores + lopsided, -1) - still.upper()).max()))
    assert worst > 1e-3


def test_no_perturbation_leaves_the_weights_as_they_are() -> None:
    t = Drawn(0, 0.0).perturbation
    assert torch.allclose(t.upper(), t.weights, rtol=1e-11)
    assert torch.allclose(t.lower(), t.weights, rtol=1e-11)


def test_ends_hold_for_perturbations_beyond_all_exponents() -> None:
    t = Drawn(0, 1e4).perturbation
    assert bool((t.upper() >= t.lower()).all() and t.upper().isfinite().all() and t.lower().isfinite().all())
    assert float(t.upper()[0, 0, 2]) == 0.0


def exact(numbers: Tensor, low: Tensor, high: Tensor) -> Fraction:
    """The largest mean, without rounding."""
    free, total = 1 - sum(map(Fraction, low.tolist()), Fraction(0)), Fraction(0)
    for j in numbers.argsort(descending=True).tolist():
        number, least, most = (Fraction(float(t[j])) for t in (numbers, low, high))
        more = max(Fraction(0), min(free, most - least))
        total, free = total + (least + more) * number, free - more
    return total


@pytest.mark.parametrize("nearly", [2.0, 15.0, 33.0, 36.0])
def test_the_largest_mean_is_never_below_that_of_exact_fractions(nearly: float) -> None:
    """One weight is 1 − e^{−nearly} or so; beyond 30 what the others may take is a few roundings of 1."""
    closest = 0.0
    for _ in range(100):
        logits = torch.cat([torch.zeros(1), -nearly - 3 * torch.rand(4)]).double()
        weights = torch.softmax(logits, -1)[torch.randperm(5)]
        first = int(weights.argmax())
        low, high = 0.5 * weights, (2 * weights).clamp_max(1.0)
        low[first] = 1 - 2 * (1 - weights[first])
        numbers = torch.rand(5, dtype=torch.float64)
        numbers[first] = 0
        share = float(exact(numbers, low, high) / Fraction(float(largest_mean(numbers, low, high))))
        assert share <= 1
        closest = max(closest, share)
    assert closest > 1 - 1e-7 or nearly > 30


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
    assert bool(ball.change.isfinite().all())
