"""The product bound of whole models, attacked by gradient ascent and reached where it is tight."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.composition import compare
from howsmooth.bounds import layer_constants
from howsmooth.bounds.composition import Stack
from howsmooth.bounds.model_stack import measured_variances, stack
from howsmooth.jacobians.tokenwise import Activation, Diagonal
from howsmooth.network.nodes import Beside, Series, Tokenwise
from howsmooth.network.reader import Network
from tests.bounds.steepness import attack, in_ball, normal, steepest


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
    assert measured_variances(model, constant)["layers.0.norm1"] < 0.1
    assert math.log10(steepest(model, constant)) > bound.log10


@torch.no_grad()
def test_measured_variances_are_those_of_the_tokens() -> None:
    model = encoder(norm_first=True, norm=nn.RMSNorm(4, dtype=torch.float64))
    x = normal(2, 3, 4)
    found = measured_variances(model, x)
    assert found["layers.0.norm1"] == pytest.approx(float(x.var(-1, correction=0).min()))
    attended = x + model.layers[0]._sa_block(model.layers[0].norm1(x), None, None)
    assert found["layers.0.norm2"] == pytest.approx(float(attended.var(-1, correction=0).min()))
    hidden = model.layers[1](model.layers[0](x))
    assert found["norm"] == pytest.approx(float(hidden.square().mean(-1).min()))
    assert len(found) == 5


def test_variances_of_a_network_that_was_read_are_those_at_x() -> None:
    model, x = encoder(norm_first=True), normal(2, 3, 4)
    network = hs.read_network(model, 5 * x[0])
    assert measured_variances(network, x) == pytest.approx(measured_variances(model, x))
    assert measured_variances(network, x[0]) != pytest.approx(measured_variances(network, x[1]))
    with pytest.raises(hs.InvalidInput, match="was read at"):
        measured_variances(network, x[0, :2])


def test_floors_of_unknown_normalisations_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match=r"choose from layers\.0\.norm1"):
        stack(encoder(norm_first=True), 4, variance={"ln_1": 0.5})


def test_models_that_no_theorem_bounds_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="give one"):
        stack(nn.Sequential(nn.Linear(4, 4)), 4)
    mixed = encoder(norm_first=True)
    mixed.layers[1].norm_first = False
    with pytest.raises(hs.DoesNotApply, match=r"layers\.1: self_attn reads tokens without a normalisation"):
        stack(mixed, 4)
    squares = nn.TransformerEncoderLayer(4, 2, 6, activation=torch.square, norm_first=True).eval()
    with pytest.raises(hs.UnsupportedModel, match="activation"):
        stack(squares, 4)
    with pytest.raises(hs.DoesNotApply, match="product"):
        stack(Product(), x=normal(3, 4))
    with pytest.raises(hs.UnsupportedModel, match="cumsum"):
        stack(Sums(), x=normal(3, 4))


class Product(nn.Module):
    """Tokens times a mean of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(0, keepdim=True)


class Sums(nn.Module):
    """Sums of squares of all tokens before."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().cumsum(0)


def test_layers_that_compute_something_else_are_bounded_as_what_they_compute() -> None:
    class Louder(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.1 * super().forward(*args, **kwargs)

    layers = [kind(4, 2, 6, norm_first=True).eval() for kind in (Louder, nn.TransformerEncoderLayer)]
    layers[1].load_state_dict(layers[0].state_dict())
    louder, own = (stack(layer, 4).log10 for layer in layers)
    assert louder == pytest.approx(own + math.log10(1.1), rel=1e-12)


def test_any_network_is_bounded_at_the_shape_of_its_input() -> None:
    linear = nn.Linear(4, 3, dtype=torch.float64)
    bound = stack(linear, x=normal(5, 4))
    assert 10**bound.log10 == pytest.approx(float(torch.linalg.svdvals(linear.weight.detach())[0]))


class Gated(nn.Module):
    """A gate behind another linear map, and behind a normalisation or not."""

    def __init__(self, norm: bool):
        super().__init__()
        self.norm = nn.RMSNorm(4, dtype=torch.float64, eps=0.1) if norm else nn.Identity()
        self.first = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.gate, self.up = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = 30 * self.first(self.norm(x))
        return nn.functional.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("norm", [False, True])
def test_a_gate_is_bounded_on_what_the_maps_before_it_give_out(norm: bool) -> None:
    """Negative control: the ball of the input, thirty times smaller, would give a bound that is passed."""
    model = Gated(norm)
    over = None if norm else hs.sets.Ball(2.0)
    bound = 10 ** stack(model, x=normal(1, 4), over=over).log10
    found = attack(model, normal(20, 1, 4), steps=20, inside=in_ball(2.0))
    assert found <= bound
    if norm:
        return
    gate, up = (part.weight.detach() for part in (model.gate, model.up))
    eye = torch.eye(3, dtype=torch.float64)
    biases = {"gate_bias": model.gate.bias.detach(), "up_bias": model.up.bias.detach()}
    small = layer_constants.gated_mlp(gate, up, eye, "silu", 2.0, **biases)
    first = 30 * float(torch.linalg.svdvals(model.first.weight.detach())[0])
    assert found > small * first
    with pytest.raises(hs.DoesNotApply, match="give their set"):
        stack(model, x=normal(1, 4))


def test_side_by_side_is_the_root_of_the_sum_of_squares_however_large() -> None:
    x = normal(2, 3)

    def bound(*factors: float) -> float:
        scaled = [Series(*(Tokenwise(Activation(torch.relu, "relu"), Diagonal(f)) for f in factors))] * 2
        root = Beside(*scaled, Tokenwise(Diagonal(1.0)))
        return stack(Network(root, "both", root, x, x.shape, x.shape, 0.0)).log10

    assert 10 ** bound(2.0) == pytest.approx(3)
    assert bound(1e200, 1e200) == pytest.approx(400 + math.log10(2) / 2)


def test_the_names_of_an_encoder_are_the_same_with_a_causal_mask() -> None:
    model = encoder(norm_first=True)
    floors = measured_variances(model, normal(3, 4))
    assert measured_variances(model, normal(3, 4), causal=True).keys() == floors.keys()
    names = [stage.name for stage in stack(model, 3, variance=floors, causal=True).stages]
    assert names == [stage.name for stage in stack(model, 3).stages]
    assert names[:2] == ["layers.0: x + self_attn", "layers.0: x + MLP"]


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
