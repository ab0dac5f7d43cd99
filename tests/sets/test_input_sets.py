"""Sets keep what they promise: projections land in them, random starts lie in them, empty ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.sets import Around, Ball, Box, Everywhere, InputSet, Normalised, Point, Sphere, Tokens
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.input_sets import check_inside
from howsmooth.sets.near_sets import as_set

N, D = 4, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ellipsoid() -> Ellipsoid:
    return Ellipsoid.layer_norm(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.1, -0.2, 0.3]))


SETS: dict[str, InputSet] = {
    "ball": Ball(1.5),
    "sphere": Sphere(1.5),
    "ellipsoid": Normalised(ellipsoid()),
    "surface": Normalised(ellipsoid(), surface=True),
    "rms ellipsoid": Normalised(Ellipsoid.rms_norm(torch.tensor([0.0, 1.0, 2.0]))),
    "per token": Around(draw(N, D, seed=1), 0.3),
    "all tokens": Around(draw(N, D, seed=1), 0.3, per_token=False),
    "a point": Point(draw(N, D, seed=1)),
    "no distance": Around(draw(N, D, seed=1), 0.0),
    "one token": Around(draw(N, D, seed=1), 0.3, moving=[1]),
    "box": Box(draw(N, D, seed=1) - 0.2, draw(N, D, seed=1) + draw(N, D, seed=2).abs()),
    "everywhere": Everywhere(),
}


@pytest.mark.parametrize("name", SETS)
def test_projections_land_in_the_set_and_leave_its_points_alone(name: str) -> None:
    over = SETS[name]
    x = 5 * draw(7, N, D)
    inside = over.project_(x.clone())
    assert over.excess(inside) < 1e-14
    assert torch.allclose(over.project_(inside.clone()), inside, atol=1e-14)
    if name != "everywhere":
        assert over.excess(x) > 1
        assert torch.equal(over.project_(x), x), "in place"


@pytest.mark.parametrize("name", ["ball", "sphere", "per token", "all tokens"])
def test_projections_go_to_the_nearest_point(name: str) -> None:
    """Against a general solver; the ellipsoids are left out, as they project in their own metric."""
    over, x = SETS[name], 2 * draw(N, D)
    centre = torch.zeros(N, D, dtype=torch.float64) if over.centre is None else over.centre

    def inside(flat: np.ndarray) -> np.ndarray:
        moved = flat.reshape(N, D) - centre.numpy()
        squares = np.array([(moved**2).sum()]) if name == "all tokens" else (moved**2).sum(1)
        return over.reach**2 - squares

    found = minimize(
        lambda flat: ((flat - x.numpy().ravel()) ** 2).sum(),
        jac=lambda flat: 2 * (flat - x.numpy().ravel()),
        x0=(centre + 0.1).numpy().ravel(),
        constraints={"type": "eq" if name == "sphere" else "ineq", "fun": inside},
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert found.success
    projected = over.project_(x.clone())
    assert torch.allclose(projected.flatten(), torch.as_tensor(found.x), atol=1e-5)


@pytest.mark.parametrize("name", SETS)
def test_random_inputs_lie_in_the_set_at_its_edge(name: str) -> None:
    over = SETS[name]
    x = over.random(torch.Generator().manual_seed(0), N, D)
    assert x.shape == (N, D)
    assert over.excess(x) < 1e-14
    if name not in ("everywhere", "a point", "no distance"):
        middle = over.at(torch.zeros(N, over.rank(D), dtype=torch.float64))
        assert over.excess(middle + 1.01 * (x - middle)) > 1e-3
    again = over.random(torch.Generator().manual_seed(0), N, D)
    assert torch.equal(x, again)


@pytest.mark.parametrize("name", SETS)
def test_gradients_are_pulled_back_by_the_chain_rule(name: str) -> None:
    over = SETS[name]
    z = draw(2, N, over.rank(D)).requires_grad_()
    g = draw(2, N, D, seed=3)
    (expected,) = torch.autograd.grad(over.at(z), z, g)
    assert torch.allclose(over.pull(g), expected, atol=1e-14)


@pytest.mark.parametrize("name", ["sphere", "surface"])
def test_steps_on_spheres_are_tangent(name: str) -> None:
    over = SETS[name]
    z = over.restrict_(draw(2, N, over.rank(D)))
    step = over.tangent(z, draw(2, N, over.rank(D), seed=5))
    assert float((z * step).sum(-1).abs().max()) < 1e-14
    assert torch.allclose(over.tangent(z, step), step, atol=1e-14)


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.RMSNorm(6)])
def test_what_a_normalisation_gives_out_lies_in_its_set(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.copy_(draw(6))
    out = layer(100 * draw(20, 6, seed=2).float()).detach()
    over = Normalised(layer)
    assert over.excess(out) < 1e-5
    assert Normalised(layer, surface=True).excess(out) < 1e-4
    assert over.excess(2 * out) > 0.1
    shrunk = over.excess(0.5 * out)
    assert shrunk < 1e-5
    assert Normalised(layer, surface=True).excess(0.5 * out) > 0.1


def test_layer_norm_has_a_plane_that_rms_norm_has_not() -> None:
    gain = torch.ones(3)
    constant = torch.ones(1, 3)
    assert Normalised(Ellipsoid.layer_norm(gain)).excess(constant) == pytest.approx(3**0.5)
    assert Normalised(Ellipsoid.rms_norm(gain)).excess(constant) < 1e-14


@pytest.mark.parametrize(
    "name", ["ball", "sphere", "ellipsoid", "surface", "per token", "all tokens", "a point", "one token", "box"]
)
def test_the_ellipsoid_holds_every_token(name: str) -> None:
    over = SETS[name]
    tokens = over.ellipsoid(D)
    assert tokens is not None
    x = torch.stack([over.random(torch.Generator().manual_seed(s), N, D) for s in range(20)])
    assert float(x.norm(dim=-1).max()) <= tokens.radius * (1 + 1e-12)
    assert Normalised(tokens).excess(x) < 1e-12


def test_the_ellipsoid_of_a_ball_has_the_width_that_is_given() -> None:
    known = Ball(2.0).ellipsoid(3)
    assert known is not None
    assert known.radius == 2.0
    assert known.width == 3
    assert known.is_ball
    assert Ball(0.0).ellipsoid(3) is None
    assert Everywhere().ellipsoid(3) is None


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_empty_sets_are_refused(bad: float) -> None:
    for make in (Ball, Sphere, lambda eps: Around(torch.zeros(2, 2), eps)):
        with pytest.raises(InvalidInput, match="empty"):
            make(bad)


def test_other_bad_sets_are_refused() -> None:
    with pytest.raises(InvalidInput, match="positive radius"):
        Sphere(0.0)
    with pytest.raises(InvalidInput, match="at least one, got"):
        Tokens(torch.zeros(0, 3))
    with pytest.raises(InvalidInput, match="at least one, got"):
        Tokens(torch.zeros(3, 3, dtype=torch.long))
    with pytest.raises(InvalidInput, match="NaN"):
        Tokens(torch.full((2, 2), torch.nan))
    with pytest.raises(InvalidInput, match="NaN"):
        Around(torch.full((2, 2), torch.nan), 0.1)
    with pytest.raises(InvalidInput, match="one input"):
        Around(torch.zeros(1, 2, 2), 0.1)
    with pytest.raises(InvalidInput, match="not a LayerNorm"):
        Normalised(nn.Linear(2, 2))


def test_a_set_may_be_meant_by_an_input_or_a_normalisation() -> None:
    ball = Ball(2.0)
    assert as_set(ball) is ball
    assert isinstance(as_set(None), Everywhere)
    assert isinstance(as_set(torch.ones(2, 3)), Point)
    assert isinstance(as_set(ellipsoid()), Normalised)
    assert isinstance(as_set(nn.RMSNorm(3)), Normalised)
    with pytest.raises(InvalidInput, match="got float"):
        as_set(1.0)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="width 3"):
        SETS["ellipsoid"].check(4, 5)
    with pytest.raises(InvalidInput, match="4 tokens"):
        SETS["per token"].check(5, 3)
    SETS["per token"].check(4, 3)


def test_sequences_are_rounded_to_the_nearest_tokens() -> None:
    matrix = draw(11, D)
    over = Tokens(matrix)
    x = draw(5, D, seed=4)
    expected = torch.cdist(x, matrix).argmin(-1)
    assert torch.equal(over.nearest(x), expected)
    assert over.excess(over.sequence(expected)) == 0
    assert over.excess(x) == pytest.approx(float(torch.cdist(x, matrix).amin(-1).max()))
    tokens = over.ellipsoid(D)
    assert tokens is not None
    assert tokens.radius == pytest.approx(float(matrix.norm(dim=-1).max()))
    shifted = Tokens(matrix, transform=lambda e: e + 1)
    assert torch.equal(shifted.sequence(expected), matrix[expected] + 1)
    assert shifted.ellipsoid(D) is None
    with pytest.raises(InvalidInput, match="give ids"):
        shifted.project_(x)


@pytest.mark.parametrize("ask", [hs.bounds.setting, hs.bounds.table])
def test_an_input_outside_its_set_is_refused_by_whoever_is_asked(ask: Callable[..., object]) -> None:
    attention, x = hs.SelfAttention.random(4, seed=1), torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    for tokens in (nn.LayerNorm(4), Ellipsoid.layer_norm(torch.ones(4))):
        with pytest.raises(hs.InvalidInput, match="token 1 of the input lies outside the set"):
            ask(attention, over=Point(x, within=tokens))
        ask(attention, over=Point(x[:1], within=tokens))
    for ball in (Ball(1.9), Ellipsoid.ball(1.9, 4)):
        with pytest.raises(hs.InvalidInput, match=r"its norm 2 is outside the radius 1\.9"):
            ask(attention, over=Point(x, within=ball))
        with pytest.raises(hs.InvalidInput, match=r"its norm 2 is outside the radius 1\.9"):
            ask(attention, over=Around(x, 0.1, within=ball))


def test_the_rounding_of_an_input_does_not_put_it_outside_its_ball() -> None:
    exact = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    radius = float(exact.norm(dim=-1).max())
    rounded = exact.bfloat16()
    assert float(rounded.double().norm(dim=-1).max()) > radius * (1 + 1e-5)
    hs.bounds.setting(hs.SelfAttention.random(4), over=hs.sets.Point(rounded, within=hs.sets.Ball(radius)))
    with pytest.raises(hs.InvalidInput, match="outside the radius"):
        hs.bounds.setting(hs.SelfAttention.random(4), over=hs.sets.Point(rounded.double(), within=hs.sets.Ball(radius)))


def test_a_token_set_and_its_input_set_agree_on_what_is_inside() -> None:
    generator = torch.Generator().manual_seed(0)
    gain, shift = torch.rand(5, generator=generator) + 0.5, torch.randn(5, generator=generator)
    tokens = Ellipsoid.layer_norm(gain, shift)
    for size, inside in ((0.3, True), (1.0, True), (1.001, False)):
        z = torch.randn(50, 5, generator=generator, dtype=torch.float64)
        z = z - z.mean(-1, keepdim=True)
        x = tokens.at(size * z / z.norm(dim=-1, keepdim=True))
        assert (Normalised(tokens).excess(x) <= 1e-9) == inside
        for i in range(len(x)):
            with nullcontext() if inside else pytest.raises(hs.InvalidInput, match="outside the set"):
                check_inside(x[i : i + 1], tokens)
