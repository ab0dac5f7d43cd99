"""Layers, residuals and whole stacks: every constant attacked by gradient ascent, reached where it is tight."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from evidence.composition import compare
from howsmooth.bounds import layer_constants
from howsmooth.bounds.composition import Stack, Stage, chain, residual
from howsmooth.bounds.model_stack import measured_variances, stack

STARTS, WIDTH = 40, 5
SLACK = 1 + 1e-10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slopes(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """σ_max of the dense autograd Jacobian of f at every item of x."""

    def one(item: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(jacrev(f)(item).reshape(-1, item.numel()), 2)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be batched
        return vmap(one)(x)


def steepest(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return float(slopes(f, x).detach().max())


def attack(
    f: Callable[[Tensor], Tensor],
    starts: Tensor,
    steps: int = 40,
    inside: Callable[[Tensor], Tensor] = lambda x: x,
) -> float:
    """The largest slope that projected gradient ascent finds from all starts; random search where slopes are flat."""
    x = inside(starts).clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1, maximize=True)
    best = 0.0
    for _ in range(steps):
        found = slopes(f, x)
        best = max(best, float(found.detach().max()))
        if found.requires_grad:
            optimiser.zero_grad()
            found.sum().backward()
            optimiser.step()
        with torch.no_grad():
            x.copy_(inside(x if found.requires_grad else torch.randn_like(x)))
    return best


def in_ball(radius: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def with_variance(floor: float) -> Callable[[Tensor], Tensor]:
    def inside(x: Tensor) -> Tensor:
        mean, spread = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        return mean + (x - mean) * (floor / spread).sqrt().clamp(min=1)

    return inside


# Activations


@pytest.mark.parametrize("entry", layer_constants.ACTIVATIONS.values(), ids=lambda entry: entry.name)
def test_activation_constant_equals_the_numerical_supremum(entry: layer_constants.KnownActivation) -> None:
    grid = torch.arange(-400_000, 400_001, dtype=torch.float64) / 10_000
    kinks = torch.tensor([-3.0, 0.0, 3.0, 6.0], dtype=torch.float64)
    t = torch.cat([grid, kinks - 1e-9, kinks + 1e-9]).requires_grad_()
    (slope,) = torch.autograd.grad(entry.function(t).sum(), t)
    found = float(slope.abs().max())
    assert found <= entry.lipschitz * (1 + 1e-12)
    assert found == pytest.approx(entry.lipschitz, abs=1e-6)


def test_activations_have_their_known_constants() -> None:
    known = {"gelu": 1.12890, "gelu_tanh": 1.12899, "silu": 1.09984, "quick_gelu": 1.09984, "sigmoid": 0.25}
    for name, constant in known.items():
        assert layer_constants.activation(name).lipschitz == pytest.approx(constant, abs=5e-6)


def test_activations_are_recognised_by_what_they_compute() -> None:
    from transformers.activations import ACT2FN

    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu"}
    for theirs, ours in names.items():
        assert layer_constants.activation(ACT2FN[theirs]).name == ours
    assert layer_constants.activation(nn.SiLU()).name == "silu"
    assert layer_constants.activation(nn.functional.relu).name == "relu"


@pytest.mark.parametrize("unknown", ["relu7", torch.square, nn.LeakyReLU(3.0), nn.PReLU()])
def test_unknown_activations_are_refused(unknown: Any) -> None:
    with pytest.raises(hs.InvalidInput, match="activation"):
        layer_constants.activation(unknown)


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


# Whole models


def encoder(norm_first: bool, activation: str = "gelu", eps: float = 1e-5, norm: nn.Module | None = None) -> Any:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, batch_first=True, norm_first=norm_first, activation=activation, layer_norm_eps=eps, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_random_encoder_is_never_steeper_than_the_product(norm_first: bool, causal: bool) -> None:
    model = encoder(norm_first, eps=0.1, norm=nn.LayerNorm(4, dtype=torch.float64))
    radius = 2.0
    bound = stack(model, 3, over=hs.sets.Ball(radius), causal=causal)
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64) if causal else None
    found = attack(lambda x: model(x, mask), normal(30, 3, 4), steps=12, inside=in_ball(radius))
    assert math.log10(found) < bound.log10


def test_product_is_reached_by_post_norm_layers_whose_branches_are_zero() -> None:
    model = encoder(norm_first=False)
    for layer in model.layers:
        for weight in (layer.self_attn.out_proj, layer.linear2):
            nn.init.zeros_(weight.weight)
            nn.init.zeros_(weight.bias)
        for norm in (layer.norm1, layer.norm2):
            nn.init.ones_(norm.weight)
            nn.init.zeros_(norm.bias)
    found = steepest(model, torch.full((1, 2, 4), 0.5, dtype=torch.float64))
    bound = stack(model, 2, over=hs.sets.Ball(1.0))
    assert found == pytest.approx(10**bound.log10, rel=1e-9)
    assert found == pytest.approx(1e10, rel=1e-9)  # four times 1/√ε
    # Leaving out one 1/√ε would be false.
    assert math.log10(found) > bound.log10 - bound.contribution(lambda leaf: leaf is bound.leaves[1]) + 2


def test_product_is_reached_by_pre_norm_layers_whose_branches_are_zero() -> None:
    model = encoder(norm_first=True)
    for layer in model.layers:
        for weight in (layer.self_attn.out_proj, layer.linear2):
            nn.init.zeros_(weight.weight)
    assert stack(model, 2).log10 == 0
    assert steepest(model, normal(1, 2, 4)) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_product_equals_the_product_of_its_factors(norm_first: bool) -> None:
    layer = encoder(norm_first, activation="relu").layers[0]
    found = stack(layer, 5, over=hs.sets.Ball(1.3))
    centring = torch.eye(4, dtype=torch.float64) - 0.25
    norms = [
        float(torch.linalg.svdvals(norm.weight.detach().diag() @ centring)[0]) / 1e-5**0.5
        for norm in (layer.norm1, layer.norm2)
    ]
    dense = math.prod(float(torch.linalg.svdvals(w.weight.detach())[0]) for w in (layer.linear1, layer.linear2))
    where = {"over": layer.norm1} if norm_first else {"over": hs.sets.Ball(1.3)}
    names = [bound.name for bound in hs.bounds.catalogue.applicable(hs.bounds.setting(layer.self_attn, n=5, **where))]
    uppers = [hs.bounds.get(name) for name in names]
    attention = min(
        float(bound(layer.self_attn, n=5, **where)) for bound in uppers if bound.side == "upper" and bound.norm == 2
    )
    if norm_first:
        expected = (1 + norms[0] * attention) * (1 + norms[1] * dense)
    else:
        expected = (1 + attention) * norms[0] * (1 + dense) * norms[1]
    assert found.log10 == pytest.approx(math.log10(expected), rel=1e-12)


def test_attention_is_bounded_on_what_the_normalisation_before_it_gives_out() -> None:
    def radii(found: Stack) -> list[float]:
        scopes = [leaf.scope for leaf in found.leaves if leaf.kind == "attention"]
        return [float(scope.split("≤ ")[1].split()[0]) for scope in scopes]

    def after(norm: nn.Module) -> Any:
        return pytest.approx(hs.sets.Normalised(norm).radius, rel=5e-3)

    last, first, bert, gpt2 = encoder(norm_first=False), encoder(norm_first=True), tiny_bert(), tiny_gpt2()
    for model in (bert, gpt2):
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    assert radii(stack(last, 4, over=hs.sets.Ball(1.25))) == [1.25, after(last.layers[0].norm2)]
    assert radii(stack(first, 4, over=hs.sets.Ball(1.25))) == [after(layer.norm1) for layer in first.layers]
    norms = [bert.embeddings.LayerNorm, bert.encoder.layer[0].output.LayerNorm]
    assert radii(stack(bert, 4)) == [after(norm) for norm in norms]
    assert radii(stack(gpt2, 4)) == [after(block.ln_1) for block in gpt2.h]


def test_post_norm_encoder_needs_a_radius_for_its_first_attention() -> None:
    with pytest.raises(hs.DoesNotApply, match="give their set"):
        stack(encoder(norm_first=False), 4)
    stack(encoder(norm_first=True), 4)


def test_tokens_outside_the_radius_pass_a_post_norm_bound() -> None:
    model = encoder(norm_first=False, eps=1.0).layers[0]
    for parameter in (model.linear1.weight, model.linear2.weight):
        parameter.data.zero_()
    small = stack(model, 3, over=hs.sets.Ball(1e-3))
    assert attack(model, normal(10, 3, 4), steps=5, inside=in_ball(1e-3)) <= 10**small.log10
    attention = hs.SelfAttention.from_torch(model.self_attn)
    inner = next(leaf for leaf in small.leaves if leaf.kind == "attention")
    assert attack(attention, 5 * normal(10, 3, 4), steps=20) > 10**inner.log10


@pytest.mark.parametrize("norm_first", [False, True])
def test_variance_floors_bound_the_inputs_they_were_measured_on(norm_first: bool) -> None:
    model = encoder(norm_first)
    x = normal(6, 3, 4)
    floors = measured_variances(model, x)
    bound = stack(model, 3, over=hs.sets.Ball(float(x.norm(dim=-1).max())), variance=floors)
    everywhere = stack(model, 3, over=hs.sets.Ball(float(x.norm(dim=-1).max())))
    assert math.log10(steepest(model, x)) < bound.log10 < everywhere.log10 - 2
    assert all(leaf.scope.startswith("token variance") for leaf in bound.leaves if leaf.kind == "normalisation")


def test_variances_below_the_floor_pass_the_bound() -> None:
    model = encoder(norm_first=False, eps=1e-6)
    for layer in model.layers:
        for weight in (layer.self_attn.out_proj, layer.linear2):
            nn.init.zeros_(weight.weight)
            nn.init.zeros_(weight.bias)
    bound = stack(model, 2, over=hs.sets.Ball(1.0), variance=0.1)
    constant = torch.full((1, 2, 4), 0.5, dtype=torch.float64)
    assert measured_variances(model, constant)["layer 0: norm after attention"] < 0.1
    assert math.log10(steepest(model, constant)) > bound.log10


@torch.no_grad()
def test_measured_variances_are_those_of_the_tokens() -> None:
    model = encoder(norm_first=True, norm=nn.RMSNorm(4, dtype=torch.float64))
    x = normal(2, 3, 4)
    found = measured_variances(model, x)
    assert found["layer 0: norm before attention"] == pytest.approx(float(x.var(-1, correction=0).min()))
    attended = x + model.layers[0]._sa_block(model.layers[0].norm1(x), None, None)
    assert found["layer 0: norm before MLP"] == pytest.approx(float(attended.var(-1, correction=0).min()))
    hidden = model.layers[1](model.layers[0](x))
    assert found["end: norm"] == pytest.approx(float(hidden.square().mean(-1).min()))
    assert len(found) == 5


def test_floors_of_unknown_normalisations_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="choose from layer 0: norm before attention"):
        stack(encoder(norm_first=True), 4, variance={"ln_1": 0.5})


def test_models_that_are_not_read_are_refused() -> None:
    with pytest.raises(hs.UnsupportedModel, match="one by one"):
        stack(nn.Sequential(nn.Linear(4, 4)), 4)
    mixed = encoder(norm_first=True)
    mixed.layers[1].norm_first = False
    with pytest.raises(hs.UnsupportedModel, match="norm_first"):
        stack(mixed, 4)
    with pytest.raises(hs.UnsupportedModel, match="activation"):
        stack(nn.TransformerEncoderLayer(4, 2, 6, activation=torch.square, norm_first=True), 4)


def test_layers_that_compute_something_else_are_refused() -> None:
    class Louder(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.1 * super().forward(*args, **kwargs)

    with pytest.raises(hs.UnsupportedModel, match="differ from what it computes"):
        stack(Louder(4, 2, 6, norm_first=True), 4)


def tiny_bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=50,
        layer_norm_eps=0.1,
    )
    return BertModel(config).double().eval()


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config).double().eval()


@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt2])
@pytest.mark.slow
def test_transformers_models_stay_below_both_bounds(make: Callable[[], Any]) -> None:
    model = make()
    for parameter in model.parameters():
        parameter.data *= 4
    before = copy.deepcopy(model.state_dict())
    ids = torch.tensor([3, 14, 15, 9, 26])
    result = compare(model, ids)
    sigma = steepest(
        lambda x: model(inputs_embeds=x[None]).last_hidden_state[0], model.get_input_embeddings()(ids[None])
    )
    assert float(result.measured) == pytest.approx(sigma, rel=1e-3)
    assert math.log10(sigma) < result.floored.log10 < result.everywhere.log10
    assert [row[0] for row in result.rows()][-1] == "all"
    assert sum(leaf.kind == "normalisation" for leaf in result.everywhere.leaves) == 5
    assert "σ = " in result.sentence()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_half_precision_models_are_bounded_in_single_precision() -> None:
    model = tiny_gpt2()
    for parameter in model.parameters():  # so loud that half precision would not reproduce the model
        parameter.data *= 8
    model = model.to(torch.bfloat16)
    assert stack(model, 4).log10 == pytest.approx(stack(copy.deepcopy(model).float(), 4).log10, rel=1e-6)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_transformers_know_their_own_mask() -> None:
    with pytest.raises(hs.InvalidInput, match="causal"):
        stack(tiny_gpt2(), 4, causal=True)


@pytest.mark.slow
def test_minilm_loses_most_digits_to_its_normalisations() -> None:
    from howsmooth import models

    opened = models.open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    ids = models.attention_inputs(model, tokenizer, models.alice(), length=16, layers=[0]).ids[0]
    result = compare(model, ids)
    assert float(result.measured.value.log10()) < result.floored.log10 < result.everywhere.log10
    kinds = result.everywhere.kinds
    assert next(iter(kinds)) == "normalisation"
    # 13 times 1/√ε = 10⁶, and the gains around one
    assert kinds["normalisation"] == pytest.approx(13 * 6, abs=1.5)
    assert "13 normalisations contribute 78.4 of the" in result.everywhere.vacuous
