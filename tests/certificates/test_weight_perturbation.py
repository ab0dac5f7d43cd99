"""Weights, means and covariances of perturbed rows lie within their proved bounds; wrong variants do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from howsmooth.bounds.three_paths import scatter
from howsmooth.certificates.ball.weight_perturbation import WeightPerturbation

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
