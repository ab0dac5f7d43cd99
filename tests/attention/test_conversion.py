"""Every module that offers an attention map is read as it, and no other; a changed module is recognised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import howsmooth as hs
from howsmooth.attention.conversion import as_attention_map, change_of, known_base
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.jacobians.function_operator import FunctionJacobian
from howsmooth.nn.hosting.adapter import AttentionAdapter
from howsmooth.nn.invertible.branches import AttentionBranch
from howsmooth.nn.layers.l2_layers import UntiedL2Attention
from howsmooth.search import worst_case_search

N, D, HEADS = 6, 8, 2
CLOSED: dict[str, Callable[[], nn.Module]] = {
    "dot-product": lambda: hs.nn.DotProductAttention(D, HEADS, bias=True),
    "sigmoid": lambda: hs.nn.SigmoidAttention(D, HEADS),
    "cosine": lambda: hs.nn.CosineAttention(D, HEADS, temperature=2.0),
    "norm-controlled": lambda: hs.nn.NormControlledAttention(D, HEADS),
    "l2": lambda: hs.nn.L2Attention(D, HEADS, bias=True),
    "untied l2": lambda: UntiedL2Attention(D, HEADS),
    "contractive": lambda: hs.nn.ContractiveL2Attention(D, HEADS),
    "contractive, inf": lambda: hs.nn.ContractiveL2Attention(D, HEADS, norm="inf", bound="kim2021"),
    "sequence first": lambda: hs.nn.DotProductAttention(D, HEADS, batch_first=False),
    "torch": lambda: SelfAttending(nn.MultiheadAttention(D, HEADS, batch_first=True)).module,
    "hosted": lambda: AttentionAdapter(hs.nn.L2Attention(D, HEADS), causal=True, layer_idx=0),
    "branch": lambda: AttentionBranch(hs.nn.ContractiveL2Attention(D, HEADS), mask="causal"),
}
FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "gradient-step": lambda: hs.nn.GradientStepAttention(D, HEADS, step=1.0),
    "gradient-step, one head": lambda: hs.nn.GradientStepAttention(D, 1),
    "lipschitz-norm": lambda: hs.nn.LipschitzNormAttention(D, HEADS, bias=True),
}
CALLS: dict[str, Callable[[Any, Tensor], object]] = {
    "measure": lambda f, x: hs.measure(f, x),
    "measure_heads": lambda f, x: hs.measure_heads(f, x),
    "explain": lambda f, x: hs.explain(f, x),
    "token_influence": lambda f, x: hs.token_influence(f, x),
    "jacobian": lambda f, x: hs.jacobian(f, x),
    "table": lambda f, x: hs.bounds.table(f, over=x),
    "worst_case": lambda f, x: hs.worst_case(f, N, over=hs.sets.Ball(1.0), starts=1, steps=2),
}


class SelfAttending(nn.Module):
    """x ↦ module(x, x, x): an oracle for torch's own layer."""

    def __init__(self, module: nn.MultiheadAttention):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, x, x)[0]


class Residual(nn.Module):
    """x + layer(x), which is no attention map."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer itself answers to one sequence."""
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x)[0]
    if isinstance(layer, AttentionAdapter | AttentionBranch):
        found = layer(x[None])
        return (found[0] if isinstance(found, tuple) else found)[0]
    return layer(x)[0]


def dense(layer: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian of the layer itself by autograd, ``(n·d, n·d)``."""
    found = torch.autograd.functional.jacobian(lambda z: output(layer, z), x)
    return found.reshape(x.numel(), x.numel())


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = (CLOSED | FUNCTIONS)[name]().double().eval()
    return layer, torch.randn(N, D, dtype=torch.float64)


@pytest.mark.parametrize("name", CLOSED)
def test_the_closed_form_of_a_layer_is_its_own_jacobian(name: str) -> None:
    layer, x = made(name)
    exact = dense(layer, x)
    found = hs.jacobian(layer, x)
    assert isinstance(found, AttentionJacobian)
    assert found.method == "closed form"
    torch.testing.assert_close(found.dense(), exact, rtol=1e-9, atol=1e-12)
    assert float(hs.measure(layer, x, rtol=1e-8)) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7)
    both = hs.measure(layer, torch.stack([x, 2 * x]), rtol=1e-8).value
    assert float(both[1]) == pytest.approx(float(torch.linalg.matrix_norm(dense(layer, 2 * x), 2)), rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED)
def test_every_door_gives_the_numbers_of_the_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(name)
    blocks = dense(layer, x).reshape(N, D, N, D).transpose(1, 2)
    exact = float(torch.linalg.matrix_norm(dense(layer, x), 2))
    story = hs.explain(layer, x, rtol=1e-8)
    assert float(story.total) == pytest.approx(exact, rel=1e-7)
    assert story.influence is not None
    torch.testing.assert_close(story.influence, torch.linalg.matrix_norm(blocks, 2), rtol=2e-2, atol=1e-9)
    table = hs.bounds.table(layer, over=x, norm=2, rtol=1e-8)
    assert table.measured is not None
    assert float(table.measured) == pytest.approx(exact, rel=1e-7)
    assert all(row.value >= exact for row in table.rows if row.kind == "upper")
    monkeypatch.setattr(
        worst_case_search, "FunctionRoughness", None
    )  # the search of functions, which must not be needed
    witness = hs.worst_case(layer, N, over=hs.sets.Ball(2.0), starts=2, steps=5)
    assert witness.value == pytest.approx(float(torch.linalg.matrix_norm(dense(layer, witness.x), 2)), rel=2e-3)


@pytest.mark.parametrize("name", ["dot-product", "sigmoid", "cosine", "l2", "torch"])
def test_heads_are_those_of_the_layer(name: str) -> None:
    layer, x = made(name)
    found = hs.measure_heads(layer, x, rtol=1e-8).value
    weight = layer.out_proj.weight
    assert isinstance(weight, Tensor)
    whole = weight.detach().clone()
    for head in range(HEADS):
        with torch.no_grad():
            weight.zero_()
            columns = slice(head * D // HEADS, (head + 1) * D // HEADS)
            weight[:, columns] = whole[:, columns]
        exact = float(torch.linalg.matrix_norm(dense(layer, x), 2))
        assert float(found[head]) == pytest.approx(exact, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_maps_without_a_closed_form_are_measured_and_bounded(name: str) -> None:
    layer, x = made(name)
    exact = float(torch.linalg.matrix_norm(dense(layer, x), 2))
    assert float(hs.measure(layer, x, rtol=1e-8)) == pytest.approx(exact, rel=1e-7)
    table = hs.bounds.table(layer, n=N, norm=2)
    upper = [row.value for row in table.rows if row.kind == "upper"]
    assert upper
    assert min(upper) >= exact
    assert min(upper) == pytest.approx(float(layer.lipschitz_bound(n=N)))  # type: ignore[operator]
    witness = hs.worst_case(layer, 2, over=hs.sets.Ball(1.0), starts=1, steps=1, constructions=False)
    assert witness.value == pytest.approx(float(torch.linalg.matrix_norm(dense(layer, witness.x), 2)), rel=2e-3)
    with pytest.raises(InvalidInput, match="measure_heads needs an attention map with heads"):
        hs.measure_heads(layer, x)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: hs.nn.L2Attention(D, HEADS, dropout=0.1),
        lambda: nn.MultiheadAttention(D, HEADS, dropout=0.1),
        lambda: AttentionAdapter(hs.nn.L2Attention(D, HEADS), causal=True, layer_idx=0, dropout=0.1),
        lambda: AttentionAdapter(hs.nn.L2Attention(D, HEADS, dropout=0.1), causal=True, layer_idx=0),
    ],
)
def test_dropout_at_work_is_refused_by_every_function(call: str, layer: Callable[[], nn.Module]) -> None:
    x = torch.randn(N, D)
    with pytest.raises(InvalidInput, match=r"in training mode with dropout: call \.eval\(\) first"):
        CALLS[call](layer().train(), x)
    CALLS[call](layer().eval(), x)


def test_measuring_a_layer_in_training_leaves_it_as_it_is() -> None:
    layer = hs.nn.ContractiveL2Attention(D, HEADS).double().train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(N, D, dtype=torch.float64)
    value = float(hs.measure(layer, x))
    assert layer.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert value == pytest.approx(float(torch.linalg.matrix_norm(dense(layer, x), 2)), rel=2e-3)


def test_a_layer_that_divides_by_a_bound_for_n_asks_for_n() -> None:
    layer = hs.nn.ContractiveL2Attention(D, HEADS).eval()
    for call in (
        lambda: hs.bounds.table(layer, over=hs.sets.Ball(1.0)),
        lambda: hs.bounds.table(layer, n=math.inf, over=hs.sets.Ball(1.0)),
    ):
        with pytest.raises(InvalidInput, match="divides by a bound that depends on n"):
            call()
    bounded = hs.bounds.table(layer, n=9, norm=2).tightest("upper")
    assert bounded == hs.bounds.table(layer.map(n=9), n=9, norm=2).tightest("upper")
    assert bounded is not None


@pytest.mark.slow
def test_a_residual_around_a_layer_is_another_function() -> None:
    layer, x = made("l2")
    wrapped = Residual(layer)
    assert isinstance(hs.jacobian(wrapped, x), FunctionJacobian)
    exact = dense(layer, x) + torch.eye(N * D, dtype=torch.float64)
    assert float(hs.measure(wrapped, x, rtol=1e-8)) == pytest.approx(
        float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7
    )
    for name in ("measure_heads", "explain", "table"):
        with pytest.raises(InvalidInput, match="attention map"):
            CALLS[name](wrapped, x)


@pytest.mark.slow
def test_a_subclass_of_torchs_layer_with_a_call_of_its_own_is_a_function() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(x, x, x)[0]

    layer = Doubled(D, HEADS, batch_first=True).double().eval()
    x = torch.randn(N, D, dtype=torch.float64)
    exact = torch.autograd.functional.jacobian(layer, x).reshape(N * D, N * D)
    assert float(hs.measure(layer, x, rtol=1e-8)) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7)


def test_padding_belongs_to_a_call_and_not_to_the_map() -> None:
    """A map has no padding: the tokens that stay are measured, which is the padded call bordered by zeros."""
    layer, x = made("l2")
    padding = torch.tensor([[False] * 4 + [True] * 2])

    def padded(z: Tensor) -> Tensor:
        return layer(z[None], key_padding_mask=padding)[0][0]

    exact = torch.autograd.functional.jacobian(padded, x).reshape(N * D, N * D)
    assert float(hs.measure(layer, x[:4], rtol=1e-8)) == pytest.approx(
        float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7
    )


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output)
    return module


def replaced(module: nn.Module) -> nn.Module:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("change", [hooked, replaced])
@pytest.mark.parametrize("name", ["torch", "l2", "map"])
@pytest.mark.parametrize("call", CALLS)
def test_what_may_be_changed_from_outside_is_refused(call: str, name: str, change: Callable[..., nn.Module]) -> None:
    """A hook may do anything to the output, which the closed form does not know."""
    plain = hs.SelfAttention.random(D, HEADS, dtype=torch.float64) if name == "map" else CLOSED[name]().double().eval()
    x = torch.randn(N, D, dtype=torch.float64)
    CALLS[call](plain, x)
    with pytest.raises(InvalidInput, match="has forward hooks or a forward replaced from outside"):
        CALLS[call](change(plain), x)


def test_a_hook_inside_a_layer_is_seen() -> None:
    layer = hs.SelfAttention.random(D, HEADS, qk_norm="rms")
    hooked(layer.query_stages[0])
    with pytest.raises(InvalidInput, match="forward hooks"):
        hs.measure(layer, torch.randn(N, D))


def test_a_subclass_of_a_layer_with_a_forward_of_its_own_is_a_function() -> None:
    class Doubled(hs.nn.L2Attention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(x)[0]

    layer, x = Doubled(D, HEADS).double().eval(), torch.randn(N, D, dtype=torch.float64)
    exact = torch.autograd.functional.jacobian(layer, x).reshape(N * D, N * D)
    assert float(hs.measure(layer, x, rtol=1e-8)) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7)


@pytest.mark.slow
def test_a_compiled_layer_is_the_layer() -> None:
    layer, x = nn.MultiheadAttention(D, HEADS, batch_first=True).eval(), torch.randn(N, D)
    assert float(hs.measure(torch.compile(layer, backend="eager"), x)) == float(hs.measure(layer, x))


class Same(nn.Linear):
    """A linear map by another name, with a number of its own."""

    def __init__(self, width: int):
        super().__init__(width, width)
        self.note = 1


class Called(nn.Linear):
    """Another way to be called."""

    def __call__(self, x: Tensor) -> Tensor:
        return -super().__call__(x)


class Looked(nn.Linear):
    """Another way to find attributes."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Scaled(hs.nn.L2Attention):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * super().forward(x)[0]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(2, 2), None),
        (Same(2), None),
        (parametrizations.orthogonal(nn.Linear(2, 2)), None),
        (parametrizations.orthogonal(Called(2, 2)), "that overrides __call__ of Linear"),
        (Called(2, 2), "that overrides __call__ of Linear"),
        (Looked(2, 2), "that overrides __getattr__ of Linear"),
        (torch.ao.nn.qat.Linear(2, 2, qconfig=torch.ao.quantization.default_qconfig), "forward of Linear"),
    ],
)
def test_a_change_is_said(module: nn.Module, said: str | None) -> None:
    found = change_of(module, nn.Linear)
    assert found is None if said is None else found is not None and said in found


def test_the_known_base_lies_below_every_class_of_others() -> None:
    assert known_base(parametrizations.orthogonal(Called(2, 2))) is nn.Linear
    assert known_base(Scaled(4, 2)) is hs.nn.L2Attention


def test_a_layer_with_a_forward_of_its_own_is_measured_as_a_function() -> None:
    torch.manual_seed(0)
    layer, x = Scaled(4, 2).double().eval(), torch.randn(3, 4, dtype=torch.float64)
    assert as_attention_map(layer, kind=nn.Module) is None
    exact = torch.autograd.functional.jacobian(layer, x).reshape(12, 12)
    assert float(hs.measure(layer, x, rtol=1e-8)) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-7)
