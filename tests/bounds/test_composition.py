"""Layers, residuals and stacks: every constant attacked by gradient ascent, reached where it is tight."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds import layer_constants
from howsmooth.bounds.composition import Stack, Stage, chain, residual
from tests.bounds.steepness import SLACK, STARTS, WIDTH, attack, in_ball, normal, steepest, with_variance

# Layers


def test_linear_equals_dense_svd() -> None:
    for shape in ((4, 7), (7, 4), (5, 5)):
        weight = normal(*shape)
        expected = float(torch.linalg.svdvals(weight)[0])
        assert layer_constants.linear_constant(weight) == pytest.approx(expected, rel=1e-13)
        assert layer_constants.linear_constant(1e-200 * weight) == pytest.approx(1e-200 * expected, rel=1e-13)
    assert layer_constants.linear_constant(torch.zeros(3, 2)) == 0


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "selu", "mish"])
def test_mlp_is_never_steeper_than_its_bound(name: str) -> None:
    act = layer_constants.activation(name)
    weights = [normal(8, WIDTH, seed=1), normal(8, 8, seed=2), normal(3, 8, seed=3)]

    def f(x: Tensor) -> Tensor:
        return weights[2] @ act.function(weights[1] @ act.function(weights[0] @ x) + 0.3) + 1

    assert attack(f, normal(STARTS, WIDTH)) <= layer_constants.mlp(weights, name) * SLACK


def test_mlp_bound_is_reached_where_the_activation_is_steepest() -> None:
    weights = [torch.eye(3, dtype=torch.float64) * 2, torch.eye(3, dtype=torch.float64) * 5]
    at = torch.full((1, 3), 2**0.5 / 2, dtype=torch.float64)
    found = steepest(lambda x: weights[1] @ nn.functional.gelu(weights[0] @ x), at)
    assert found == pytest.approx(layer_constants.mlp(weights, "gelu"), rel=1e-12)
    assert found > layer_constants.mlp(weights, "relu")  # taking 1 for GELU's constant would be false


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "identity"])
def test_gated_mlp_is_never_steeper_than_its_bound_on_the_ball(name: str) -> None:
    act, radius = layer_constants.activation(name), 1.5
    gate, up, down = normal(6, 3, seed=1), normal(6, 3, seed=2), normal(3, 6, seed=3)
    gate_bias, up_bias = normal(6, seed=4), normal(6, seed=5)

    def f(x: Tensor) -> Tensor:
        return down @ (act.function(gate @ x + gate_bias) * (up @ x + up_bias))

    bound = layer_constants.gated_mlp(gate, up, down, name, radius, gate_bias=gate_bias, up_bias=up_bias)
    assert attack(f, 2 * normal(STARTS, 3), inside=in_ball(radius)) <= bound * SLACK
    assert attack(f, 9 * normal(STARTS, 3), inside=in_ball(20 * radius)) > bound  # outside the ball it is passed


def test_gated_mlp_bound_is_reached_by_a_square() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    assert steepest(torch.square, torch.tensor([[3.0]])) == layer_constants.gated_mlp(one, one, one, "identity", 3.0)


def test_gated_mlp_bound_is_reached_by_a_gate_that_does_not_move() -> None:
    one, closed = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    assert steepest(lambda x: torch.sigmoid(0 * x) * x, torch.ones(1, 1)) == 0.5
    assert layer_constants.gated_mlp(closed, one, one, "sigmoid", 3.0) == 0.5


def test_gated_mlp_is_refused_without_a_radius() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(hs.DoesNotApply, match="radius"):
        layer_constants.gated_mlp(one, one, one, "silu", None)
    with pytest.raises(hs.InvalidInput, match="radius"):
        layer_constants.gated_mlp(one, one, one, "silu", -1.0)


@pytest.mark.parametrize("floor", [None, 0.05, 1.0])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalisation_is_never_steeper_than_its_bound(kind: str, floor: float | None) -> None:
    norm = (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(WIDTH, eps=0.02, dtype=torch.float64)
    norm.weight.data = normal(WIDTH, seed=1)
    bound = layer_constants.normalisation(norm, floor)
    # A variance of at least v is a mean square of at least v.
    inside = (lambda x: x) if floor is None else with_variance(floor)
    found = attack(norm, 0.5 * normal(STARTS, WIDTH), inside=inside)
    assert 0.95 * bound < found <= bound * SLACK
    if floor is not None:  # below the floor it is passed
        assert attack(norm, 0.01 * normal(STARTS, WIDTH)) > 1.05 * bound


def test_layer_norm_bound_is_reached_at_constant_tokens() -> None:
    gain, eps = normal(WIDTH, seed=1), 1e-5
    norm = nn.LayerNorm(WIDTH, eps=eps, dtype=torch.float64)
    norm.weight.data = gain
    found = steepest(norm, torch.full((1, WIDTH), 0.7, dtype=torch.float64))
    centring = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH
    expected = float(torch.linalg.svdvals(gain.diag() @ centring)[0]) / eps**0.5
    assert found == pytest.approx(layer_constants.layer_norm(gain, eps), rel=1e-9)
    assert expected == pytest.approx(layer_constants.layer_norm(gain, eps), rel=1e-13)
    assert layer_constants.layer_norm(gain, eps) < float(gain.abs().max()) / eps**0.5


@pytest.mark.parametrize("variance", [1e-4, 0.3, 7.0])
def test_layer_norm_bound_is_reached_at_every_variance(variance: float) -> None:
    gain, eps = normal(WIDTH, seed=1), 1e-3
    norm = nn.LayerNorm(WIDTH, eps=eps, dtype=torch.float64)
    norm.weight.data = gain
    centring = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH
    top = torch.linalg.svd(gain.diag() @ centring).Vh[0]
    z = centring @ normal(WIDTH, seed=2)
    z = z - top * (top @ z)
    z = z * (variance * WIDTH) ** 0.5 / z.norm()
    assert steepest(norm, z[None]) == pytest.approx(layer_constants.layer_norm(gain, eps, variance), rel=1e-10)


def test_rms_norm_bound_is_reached_at_every_mean_square() -> None:
    gain = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    norm = nn.RMSNorm(3, eps=1e-3, dtype=torch.float64)
    norm.weight.data = gain
    for size in (0.0, 0.1, 5.0):
        x = torch.tensor([[size, 0.0, 0.0]], dtype=torch.float64)
        bound = layer_constants.rms_norm_constant(gain, 1e-3, size**2 / 3)
        assert steepest(norm, x) == pytest.approx(bound, rel=1e-12)


def test_normalisation_without_eps_needs_a_floor() -> None:
    with pytest.raises(hs.DoesNotApply, match="eps = 0"):
        layer_constants.layer_norm(torch.ones(4), 0.0)
    assert layer_constants.layer_norm(torch.ones(4), 0.0, 4.0) == pytest.approx(0.5)
    with pytest.raises(hs.InvalidInput):
        layer_constants.layer_norm(torch.ones(4), 1e-5, -1.0)
    with pytest.raises(hs.InvalidInput, match="LayerNorm"):
        layer_constants.normalisation(nn.BatchNorm1d(4))


def test_rms_norm_module_without_eps_uses_that_of_its_dtype() -> None:
    norm = nn.RMSNorm(3, dtype=torch.float64)
    found = steepest(norm, torch.zeros(1, 3, dtype=torch.float64))
    assert layer_constants.normalisation(norm) == pytest.approx(found, rel=1e-9)


# Rules of composition


def test_residual_is_reached_by_a_linear_map_and_false_without_its_one() -> None:
    lip = 2.5
    found = steepest(lambda x: x + lip * x, normal(1, 3))
    assert found == pytest.approx(residual(lip), rel=1e-14)
    assert found > lip


def test_residual_is_never_steeper_than_its_bound() -> None:
    weights = [normal(8, WIDTH, seed=1), normal(WIDTH, 8, seed=2)]
    bound = residual(layer_constants.mlp(weights, "gelu"))
    assert attack(lambda x: x + weights[1] @ nn.functional.gelu(weights[0] @ x), normal(STARTS, WIDTH)) <= bound


def test_stage_and_stack_follow_the_pure_rules() -> None:
    inner = [Stage.of("a: norm", 30.0, kind="normalisation"), Stage.of("a: MLP", 4.0, kind="MLP")]
    whole = Stack((Stage.around("a: skip", inner), Stage.of("b: norm", 7.0, kind="normalisation")))
    assert 10**whole.log10 == pytest.approx(chain([residual(chain([30.0, 4.0])), 7.0]))
    assert whole.layers == pytest.approx({"a": math.log10(121), "b": math.log10(7)})
    assert whole.worst.name == "a: norm"
    assert whole.kinds == pytest.approx({"normalisation": math.log10(121 * 7 / 5), "MLP": math.log10(121 / 31)})
    assert "2 normalisations contribute 2.2 of the 2.9 digits" in whole.vacuous
    assert "would be 10^0.7" in whole.vacuous
    assert json.loads(json.dumps(whole.to_dict()))["worst"] == "a: norm"


@pytest.mark.parametrize(("exponent", "expected"), [(-400.0, 0.0), (400.0, 400.0), (0.0, math.log10(2))])
def test_residual_in_logarithms_neither_overflows_nor_vanishes(exponent: float, expected: float) -> None:
    assert Stage.around("skip", [Stage("branch", exponent)]).log10 == pytest.approx(expected)


def test_constant_stages_and_negative_constants() -> None:
    nothing = Stage.of("zero", 0.0)
    assert Stage.around("skip", [nothing]).log10 == 0
    assert Stack((nothing, Stage.of("two", 2.0))).vacuous.startswith("0:")
    with pytest.raises(hs.InvalidInput, match="not negative"):
        Stage.of("broken", math.nan)
