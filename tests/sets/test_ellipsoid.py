"""Sets of tokens: balls, and what normalisation layers can give out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.sets import Point
from howsmooth.sets.ellipsoid import Ellipsoid

GAIN = torch.tensor([0.5, -2.0, 1.0, 0.1, 1.5])
SHIFT = torch.tensor([0.3, 0.0, -1.0, 0.2, 0.1])


@pytest.mark.parametrize("radius", [0.0, -1.0, float("inf"), float("nan")])
def test_a_radius_that_is_not_positive_and_finite_is_refused(radius: float) -> None:
    with pytest.raises(hs.InvalidInput, match="radius must be positive and finite"):
        Ellipsoid.ball(radius, width=3)


@pytest.mark.parametrize("make", [Ellipsoid.layer_norm, Ellipsoid.rms_norm])
def test_the_radius_after_normalisation_is_the_one_of_the_literature(make) -> None:
    expected = 5**0.5 * 2.0 + float(SHIFT.double().norm())
    assert make(GAIN, SHIFT).radius == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_every_normalised_token_lies_in_the_set(kind: str) -> None:
    norm = (nn.LayerNorm(5) if kind == "layer" else nn.RMSNorm(5)).double()
    norm.weight.data.copy_(GAIN)
    if kind == "layer":
        norm.bias.data.copy_(SHIFT)
    tokens = Ellipsoid.after(norm)
    x = norm(torch.randn(1000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10).detach()
    z = torch.linalg.lstsq(tokens.axes, (x - tokens.centre).mT, driver="gelsd").solution.mT
    assert torch.allclose(tokens.centre + z @ tokens.axes.mT, x, atol=1e-9)  # in the affine span
    assert float(z.norm(dim=-1).max()) <= tokens.reach * (1 + 1e-9)
    assert float(x.norm(dim=-1).max()) <= tokens.radius


def test_a_layer_norm_is_cut_by_the_centred_hyperplane() -> None:
    axes = Ellipsoid.layer_norm(GAIN).axes
    assert torch.linalg.matrix_rank(axes) == 4
    assert torch.linalg.matrix_rank(Ellipsoid.rms_norm(GAIN).axes) == 5


def test_the_ball_around_an_input_touches_its_largest_token() -> None:
    x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    ball = Point(x).ellipsoid(2)
    assert ball is not None
    assert ball.radius == 5.0
    assert ball.is_ball


def test_coordinates_in_the_unit_ball_become_tokens_of_the_set() -> None:
    tokens = Ellipsoid.rms_norm(GAIN, SHIFT)
    z = torch.zeros(2, 5, dtype=torch.float64)
    z[1, 1] = 1.0
    assert torch.equal(tokens.at(z)[0], SHIFT.double())
    assert float(tokens.at(z)[1, 1]) == pytest.approx(-2.0 * 5**0.5)


def test_modules_that_do_not_normalise_tokens_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="give a radius instead"):
        Ellipsoid.after(nn.Linear(3, 3))
    with pytest.raises(hs.InvalidInput, match="single tokens"):
        Ellipsoid.after(nn.LayerNorm((3, 4)))
    with pytest.raises(hs.InvalidInput, match="finite"):
        Ellipsoid.layer_norm(torch.tensor([1.0, float("nan")]))
    with pytest.raises(hs.InvalidInput, match="one length"):
        Ellipsoid.layer_norm(torch.ones(3), torch.ones(4))
