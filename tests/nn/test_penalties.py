"""Penalties against dense autograd, and that each steers what it speaks of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from howsmooth import nn as layers
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.nn.hosting.replacement import replace_attention
from howsmooth.nn.layers.weight_norms import SpectralCaps
from howsmooth.nn.penalties import JacobianPenalty, SoftmaxJacobianPenalty, power_method_norm, softmax_jacobian_penalty
from howsmooth.testing import dense_jacobian
from tests.models.tiny import TINY

D, HEADS, N = 8, 2, 5


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian, differentiable in what f depends on."""
    return dense_jacobian(f, x, create_graph=True)


def norm_and_gradients(layer: nn.Module, x: Tensor, power: int) -> tuple[Tensor, list[Tensor]]:
    """The mean of σ^power over texts from dense Jacobians, and what autograd makes of it."""
    norms = [torch.linalg.matrix_norm(dense(lambda y: layer(y)[0], each), 2) ** power for each in x]
    value = torch.stack(norms).mean()
    return value.detach(), list(torch.autograd.grad(value, list(layer.parameters()), allow_unused=True))


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("kind", [layers.L2Attention, layers.DotProductAttention, layers.SigmoidAttention])
def test_value_and_gradient_are_those_of_dense_autograd(kind: type[layers.AttentionLayer], power: int) -> None:
    layer, x = kind(D, HEADS).double(), torch.randn(3, N, D, dtype=torch.float64)
    exact, gradients = norm_and_gradients(layer, x, power)
    penalty = JacobianPenalty(layer, power=power, steps=300)
    layer(x)
    value = penalty()
    torch.testing.assert_close(value.detach(), exact, rtol=1e-6, atol=0)
    found = torch.autograd.grad(value, list(layer.parameters()))
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_gradient_for_fixed_vectors_passes_gradcheck() -> None:
    """Far from convergence too: |Jᵀu|² and |Jᵀu| are differentiated exactly for the vector u that was used."""
    layer, x = layers.L2Attention(4, 2).double(), torch.randn(3, 4, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    _, left = power_method_norm(lambda y: layer(y)[0], x, steps=1)

    def value(*weights: Tensor) -> Tensor:
        state = dict(zip(names, weights, strict=True))
        y = x.clone().requires_grad_()
        out = torch.func.functional_call(layer, state, (y,))[0]
        (pulled,) = torch.autograd.grad(out, y, left, create_graph=True)
        return pulled.square().sum()

    weights = tuple(parameter.detach().clone().requires_grad_() for parameter in layer.parameters())
    assert torch.autograd.gradcheck(value, weights)
    mine, used = power_method_norm(lambda y: layer(y)[0], x, left, steps=1, power=2)
    left = used
    theirs = value(*weights)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(mine, list(layer.parameters())), torch.autograd.grad(theirs, weights), rtol=1e-9, atol=1e-12
    )


def test_value_never_exceeds_the_norm_and_warm_vectors_bring_it_near() -> None:
    layer, x = layers.DotProductAttention(D, HEADS).double(), torch.randn(2, N, D, dtype=torch.float64)
    exact, _ = norm_and_gradients(layer, x, 1)
    penalty, values = JacobianPenalty(layer, power=1), []
    for _ in range(40):
        layer(x)
        values.append(float(penalty().detach()))
    assert max(values) <= float(exact) * (1 + 1e-12)
    assert values[0] < 0.99 * float(exact)
    assert values[-1] > 0.999 * float(exact)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_blocks_of_transformers_have_penalties_with_gradients(name: str) -> None:
    """Their default kernels cannot be differentiated twice; a cache must not be filled twice."""
    model = TINY[name].build().train()
    model.set_attn_implementation("sdpa")
    penalty = JacobianPenalty(model)
    model(input_ids=torch.randint(3, 97, (2, 6)))
    penalty().backward()
    for layer in range(2):
        gradient = model.get_submodule(TINY[name].output.format(layer)).weight.grad
        assert gradient is not None
        assert gradient.any()
        assert gradient.isfinite().all()


def test_dropout_is_off_and_modes_come_back() -> None:
    layer = layers.L2Attention(D, HEADS, dropout=0.5).double().train()
    x = torch.randn(1, N, D, dtype=torch.float64)
    penalty = JacobianPenalty(layer, steps=300)
    layer(x)
    value = penalty().detach()
    assert layer.training
    torch.testing.assert_close(value, norm_and_gradients(layer.eval(), x, 2)[0], rtol=1e-6, atol=0)


def test_penalties_need_a_forward_pass_and_something_to_speak_of() -> None:
    layer = layers.L2Attention(D, HEADS)
    for kind in (JacobianPenalty, SoftmaxJacobianPenalty):
        penalty = kind(layer)
        with pytest.raises(InvalidInput, match="run the model"):
            penalty()
        layer(torch.randn(1, N, D))
        penalty()
        with pytest.raises(InvalidInput, match="run the model"):
            penalty()
        penalty.close()
    for options in ({"power": 3}, {"steps": 0}):
        with pytest.raises(InvalidInput, match=f"{next(iter(options))} must be"):
            JacobianPenalty(layer, **options)
    for other in (layers.SigmoidAttention(D, HEADS), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(InvalidInput, match="no softmax weights"):
            SoftmaxJacobianPenalty(other, layers=[""])
    with pytest.raises(NotDifferentiable, match="does not depend"):
        power_method_norm(lambda x: torch.ones(3, 2), torch.zeros(3, 2))


def test_no_penalty_is_nan() -> None:
    """NaN in the tokens, in a weight, and weights of rows that see nothing as torch gives them: said, not returned."""
    for kind in (JacobianPenalty, SoftmaxJacobianPenalty):
        layer = layers.DotProductAttention(D, HEADS)
        penalty = kind(layer)
        layer(torch.full((1, N, D), torch.nan))
        with pytest.raises(InvalidInput, match="NaN"):
            penalty()
        layer(torch.randn(1, N, D))
        assert bool(penalty().isfinite())
        with torch.no_grad():
            layer.in_proj.weight[0, 0] = torch.inf
        layer(torch.randn(1, N, D))
        with pytest.raises(InvalidInput, match="NaN"):
            penalty()
        penalty.close()
    blind = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]])
    with pytest.raises(InvalidInput, match="weights holds 2 NaN"):
        softmax_jacobian_penalty(blind)


def test_penalties_of_padded_causal_batches_are_those_of_finite_layers() -> None:
    """Padded on the left: a padded token sees nothing but padding."""
    padded = torch.zeros(2, N, dtype=torch.bool)
    padded[0, :2] = True
    for kind in (JacobianPenalty, SoftmaxJacobianPenalty):
        layer = layers.L2Attention(D, HEADS)
        penalty = kind(layer)
        layer(torch.randn(2, N, D), key_padding_mask=padded, is_causal=True)
        penalty().backward()
        gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        assert gradients
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_a_vanishing_jacobian_gives_zero_with_finite_gradients() -> None:
    layer = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(layer.weight)
    for power in (1, 2):
        penalty = JacobianPenalty(layer, layers=[""], power=power)
        for _ in range(2):
            layer(torch.randn(2, 3))
            value = penalty()
            assert value == 0
            assert torch.autograd.grad(value, layer.weight)[0].isfinite().all()


# --- the softmax Jacobian


def test_softmax_penalty_bounds_the_norm_of_the_softmax_jacobian() -> None:
    p = torch.softmax(3 * torch.randn(50, 7, dtype=torch.float64), dim=-1)
    exact = torch.linalg.matrix_norm(torch.diag_embed(p) - p[:, :, None] * p[:, None], 2)
    assert exact.mean() <= softmax_jacobian_penalty(p) <= 0.5
    assert softmax_jacobian_penalty([p[:25], p[25:]]).isclose(softmax_jacobian_penalty(p))


def test_softmax_penalty_passes_gradcheck() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: softmax_jacobian_penalty(torch.softmax(s, -1)), (logits,))


def test_softmax_penalty_of_a_layer_is_that_of_its_weights() -> None:
    layer, x = layers.L2Attention(D, HEADS, dropout=0.5).double(), torch.randn(2, N, D, dtype=torch.float64)
    penalty = SoftmaxJacobianPenalty(layer)
    padding = torch.tensor([[False] * N, [False] * 3 + [True] * 2])
    layer(x, is_causal=True, key_padding_mask=padding)
    value = penalty()
    weights = layer.eval()(x, is_causal=True, key_padding_mask=padding, need_weights=True, average_attn_weights=False)[
        1
    ]
    rows = weights.transpose(1, 2)[~padding]  # padded tokens see nothing and do not count
    torch.testing.assert_close(value, softmax_jacobian_penalty(rows))
    assert torch.autograd.grad(value, layer.qk_proj.weight)[0].any()


def test_softmax_penalty_takes_what_it_can() -> None:
    assert softmax_jacobian_penalty(torch.ones(3, 1)) == 0
    assert softmax_jacobian_penalty(torch.zeros(2, 4)) == 0
    for bad in ([], torch.ones(2, 0), torch.ones(2, 2, dtype=torch.long)):
        with pytest.raises(InvalidInput, match="weights"):
            softmax_jacobian_penalty(bad)


# --- they steer

Term = Callable[[], Tensor]


def nothing(model: nn.Module) -> tuple[Term, Callable[[], None]]:
    return lambda: torch.zeros(()), lambda: None


def train(held: Callable[[nn.Module], tuple[Term, Callable[[], None]]] = nothing) -> tuple[nn.Module, float]:
    """A small encoder learns to shift its tokens; ``held`` gives a term of the loss and what follows every step."""
    torch.manual_seed(0)
    model = replace_attention(nn.TransformerEncoderLayer(D, HEADS, 32, dropout=0.0, batch_first=True), "dot-product")
    term, afterwards = held(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        x = torch.randn(8, N, D)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        (loss + term()).backward()
        optimiser.step()
        afterwards()
        optimiser.zero_grad()
    return model, loss.item()


def mean_norm(model: nn.Module) -> float:
    x = torch.randn(8, N, D, generator=torch.Generator().manual_seed(5))
    return float(norm_and_gradients(model.self_attn, x, 1)[0])


def penalised(kind: type, strength: float) -> Callable[[nn.Module], tuple[Term, Callable[[], None]]]:
    def held(model: nn.Module) -> tuple[Term, Callable[[], None]]:
        penalty = kind(model)
        return lambda: strength * penalty(), lambda: None

    return held


@pytest.mark.slow
def test_jacobian_penalty_steers_the_norm_down() -> None:
    (free, _), (held, loss) = train(), train(penalised(JacobianPenalty, 0.1))
    assert mean_norm(held) < 0.5 * mean_norm(free)
    assert loss < 2  # what a constant answer would cost is about 2


@pytest.mark.slow
def test_softmax_penalty_steers_the_softmax_down() -> None:
    found = []
    for model, loss in (train(), train(penalised(SoftmaxJacobianPenalty, 5.0))):
        x = torch.randn(8, N, D, generator=torch.Generator().manual_seed(5))
        weights = model.self_attn(x, need_weights=True, average_attn_weights=False)[1]
        found.append(float(softmax_jacobian_penalty(weights).detach()))
        assert loss < 2
    assert found[1] < 0.7 * found[0]


def test_penalties_do_not_hear_each_other() -> None:
    """The second forgets nothing of the batch because the first has called the layer again."""
    layer = layers.L2Attention(D, HEADS).double()
    first, second, alone = JacobianPenalty(layer), SoftmaxJacobianPenalty(layer), SoftmaxJacobianPenalty(layer)
    for _ in range(2):
        x = torch.randn(1, N, D, dtype=torch.float64)
        layer(x)
        expected = alone()
        first()
        torch.testing.assert_close(second(), expected)
    with pytest.raises(InvalidInput, match="run the model"):
        alone()


# --- caps


def test_caps_are_the_projection_on_the_ball_of_the_spectral_norm() -> None:
    layer = nn.Linear(12, 9, bias=False).double()
    nn.init.normal_(layer.weight)
    before = layer.weight.detach().clone()
    left, sizes, right = torch.linalg.svd(before, full_matrices=False)
    caps = SpectralCaps(layer, cap=2.5)
    assert float(sizes[-1]) < 2.5 < float(sizes[0])
    caps.step()
    torch.testing.assert_close(layer.weight.detach(), (left * sizes.clamp(max=2.5)) @ right)
    assert caps.norms()["weight"] <= 2.5 * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("above", "most"), [(6, 30), (30, 150)])
def test_caps_follow_training_within_a_permille(above: int, most: int) -> None:
    """With few values above the cap the subspace deals with most steps; the exact norm is looked at after each."""
    layer = nn.Linear(48, 64, bias=False)
    nn.init.normal_(layer.weight, std=0.01)
    caps, optimiser = SpectralCaps(layer, cap=1.0, exact_every=50), torch.optim.SGD(layer.parameters(), lr=0.05)
    left, _, right = torch.linalg.svd(torch.randn(64, 48), full_matrices=False)
    sizes = torch.cat([torch.linspace(5, 2, above), torch.linspace(0.9, 0.1, 48 - above)])
    wanted, worst = (left * sizes) @ right, 0.0
    for _ in range(150):
        loss = (layer.weight - wanted).square().sum() / 2
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        free = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
        caps.step()
        worst = max(worst, caps.norms()["weight"])
    assert free > 1.1  # the optimiser keeps pushing beyond the cap
    assert worst <= 1.001
    assert caps.exact_count <= most
    caps.exact()
    assert caps.norms()["weight"] <= 1 + 1e-6


def test_caps_name_queries_keys_and_values_one_by_one_and_leave_embeddings_alone() -> None:
    model = TINY["gpt2"].build()
    words = model.wte.weight.detach().clone()
    caps = SpectralCaps(model, cap=0.5)
    names = [name for name, _ in caps.matrices()]
    assert {f"h.0.attn.c_attn.weight[{part}]" for part in "qkv"} <= set(names)
    caps.exact()
    assert torch.equal(model.wte.weight, words)
    assert max(caps.norms().values()) <= 0.5 * (1 + 1e-12)
    for layer in (layers.DotProductAttention(D, HEADS), nn.MultiheadAttention(D, HEADS)):
        assert len(list(SpectralCaps(layer).matrices())) == 4


@pytest.mark.slow
def test_caps_steer_the_norm_of_the_layer_down() -> None:
    free, _ = train()
    held, loss = train(lambda model: (lambda: torch.zeros(()), SpectralCaps(model.self_attn, cap=0.5).step))
    assert mean_norm(held) < 0.7 * mean_norm(free)
    assert loss < 2


def test_small_matrices_are_left_as_they_are() -> None:
    layer = nn.Linear(6, 6)
    before = layer.weight.detach().clone()
    caps = SpectralCaps(layer, cap=100.0)
    caps.step()
    assert torch.equal(layer.weight, before)
    assert caps.exact_count == 0


def test_caps_refuse_what_makes_no_sense() -> None:
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="cap"):
            SpectralCaps(nn.Linear(2, 2), cap=cap)
    with pytest.raises(InvalidInput, match="exact_every"):
        SpectralCaps(nn.Linear(2, 2), exact_every=0)
    with pytest.raises(InvalidInput, match="no weight matrices"):
        SpectralCaps(nn.Embedding(3, 2))
    layer = nn.Linear(40, 40)
    caps = SpectralCaps(layer, cap=0.1)
    caps.step()
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match="weight"):
        caps.step()


def test_half_precision_is_computed_in_single_and_gradients_come_back_in_half() -> None:
    layer, x = layers.L2Attention(D, HEADS).half(), torch.randn(1, N, D).half()
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        penalty = JacobianPenalty(layer, steps=100)
        layer(x)
        value = penalty()
        value.backward()
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert value.dtype == torch.float32
    gradient = layer.v_proj.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float16
    exact, _ = norm_and_gradients(layer.float(), x.float(), 2)
    torch.testing.assert_close(value.detach(), exact, rtol=1e-4, atol=0)
