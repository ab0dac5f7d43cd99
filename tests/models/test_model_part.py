"""Parts of models in closed form against dense autograd, for every architecture, and where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.jacobians.function_operator import DerivativeWarning, FunctionJacobian
from howsmooth.models import MODEL_TYPES, OpenModel, Targets, Window, model_part, open_model
from howsmooth.models.attention_reader import random_inputs
from howsmooth.network.attention_forms import HeadLogits
from howsmooth.network.composed_jacobian import ComposedJacobian
from howsmooth.network.nodes import Attend
from howsmooth.testing import dense_jacobian
from tests.models.test_captured_sites import other_model
from tests.models.tiny import TINY


def tiny_targets(name: str, dtype: torch.dtype = torch.float64, n: int = 4) -> Targets:
    tiny = TINY[name]
    model: Any = tiny.build().requires_grad_(False).to(dtype)
    model.set_attn_implementation("eager")
    given = tiny.inputs(n)[model.main_input_name]
    given = given.to(dtype) if given.is_floating_point() else given
    return Targets(OpenModel(name, model, None, "text", "", "float32", 99, ""), Window(given, [], 0))


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


BY_AUTOGRAD = {"deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_moe", "qwen3_next"}
"""Mixtures of experts: which tokens an expert sees depends on the data, and with it the shapes of what it computes."""


def test_every_listed_architecture_is_compared_here() -> None:
    assert set(MODEL_TYPES) == set(TINY)
    assert set(TINY) > BY_AUTOGRAD


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_AUTOGRAD))
def test_a_model_without_closed_form_is_differentiated_by_autograd_and_says_so(name: str) -> None:
    J = hs.jacobian(*tiny_targets(name).get("model"))
    assert isinstance(J, FunctionJacobian)
    assert any("without closed forms" in note for note in J.notes)


@pytest.mark.parametrize("name", sorted(set(TINY) - BY_AUTOGRAD))
def test_the_jacobian_of_a_model_equals_dense_autograd(name: str) -> None:
    """In float64; models that compute a part in float32 agree to that."""
    f, x = tiny_targets(name).get("model")
    J = hs.jacobian(f, x)
    assert isinstance(J, ComposedJacobian)
    assert not J.notes
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, *J.in_shape, generator=generator, dtype=torch.float64)
    expected = dense_jacobian(f.function, x)  # type: ignore[union-attr]
    pushed = torch.stack([J.matvec(one) for one in v]).flatten(1)
    pulled = torch.stack([J.rmatvec(one) for one in v]).flatten(1)
    torch.testing.assert_close(pushed, v.flatten(1) @ expected.mT, rtol=1e-4, atol=1e-5 * norm(expected))
    torch.testing.assert_close(pulled, v.flatten(1) @ expected, rtol=1e-4, atol=1e-5 * norm(expected))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["residual", "mlp", "layer", "prefix"])
@pytest.mark.parametrize("name", ["bert", "gpt_neox", "gemma2", "granite"])
def test_every_part_of_a_layer_equals_dense_autograd(name: str, what: str) -> None:
    f, x = tiny_targets(name).get(what, 1)
    J = hs.jacobian(f, x)
    assert isinstance(J, ComposedJacobian)
    expected = dense_jacobian(f.function, x)  # type: ignore[union-attr]
    torch.testing.assert_close(J.dense(), expected, rtol=1e-4, atol=1e-5 * norm(expected))


EXPERTS = {"deepseek_v2": False, "deepseek_v3": False, "gpt_oss": True, "llama4_text": True, "qwen3_moe": False}
"""Mixtures of experts, and whether their MLP returns the scores of its router beside the tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", EXPERTS)
def test_the_residual_beside_experts_is_tokens_plus_attention_by_autograd(name: str, layer: int) -> None:
    targets = tiny_targets(name)
    f, x = targets.get("residual", layer)
    module, mlp = targets.modules[layer], targets._mlps[layer]
    assert mlp is not None
    assert isinstance(mlp[-1](x[None]), tuple) == EXPERTS[name]
    attention = TINY[name].function(targets.model, layer, targets.inputs)
    expected = dense_jacobian(lambda h: h + attention(module.input_layernorm(h[None])[0]), x)
    assert float(hs.measure(f, x)) == pytest.approx(norm(expected), rel=1e-6)  # norms compute in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "gemma"])
def test_ends_in_single_precision_contain_the_truth(name: str) -> None:
    targets = tiny_targets(name, torch.float32)
    for what in ("layer", "model"):
        f, x = targets.get(what, 1)
        J, exact = hs.jacobian(f, x), hs.jacobian(f.network().root, x.double()).dense()  # type: ignore[union-attr]
        assert norm(J.dense().double() - exact) <= J.accuracy.point * norm(exact)
        m = hs.measure(f, x, dense_limit=1)
        assert float(m.lower) <= norm(exact) <= float(m.upper)
        assert bool(m.converged)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov2", "gemma2", "gpt2", "gpt_neox", "smollm3", "t5"])
def test_blur_covers_the_whole_error_of_other_architectures(name: str) -> None:
    targets = tiny_targets(name, torch.float32)
    for what in ("layer", "model"):
        f, x = targets.get(what, 1)
        J, exact = hs.jacobian(f, x), hs.jacobian(f.network().root, x.double()).dense()  # type: ignore[union-attr]
        assert norm(J.dense().double() - exact) <= J.accuracy.point * norm(exact)
        m = hs.measure(f, x, dense_limit=1)
        assert float(m.lower) <= norm(exact) <= float(m.upper)


@pytest.mark.parametrize("spec", ["random:gpt2[width=32]", "random:llama[width=32]", "random:wav2vec2[width=32]"])
def test_logits_are_a_linear_map_of_the_last_state(spec: str) -> None:
    opened = open_model(spec, head=True)
    given = random_inputs(opened.model, 5)[opened.model.main_input_name]
    f, x = Targets(opened, Window(given, [], 0)).get("logits")
    J = hs.jacobian(f, x)
    assert isinstance(J, ComposedJacobian)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    expected = torch.func.jvp(f.function, (x,), (v,))[1]  # type: ignore[union-attr]
    torch.testing.assert_close(J.matvec(v), expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))


@pytest.mark.slow
def test_an_unlisted_architecture_has_closed_forms_as_well() -> None:
    model = other_model("bart").requires_grad_(False)
    model.set_attn_implementation("eager")
    opened = OpenModel("bart", model, None, "text", "", "float32", 99, "")
    f, x = Targets(opened, Window(torch.tensor([[5, 6, 7, 8]]), [], 0)).get("layer", 0)
    J = hs.jacobian(f, x)
    assert isinstance(J, ComposedJacobian)
    torch.testing.assert_close(J.dense(), dense_jacobian(f.function, x), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Targets:
    """A model whose first layer has a forward of its own."""
    targets = tiny_targets("llama")
    module = targets.modules[0]
    monkeypatch.setattr(module, "forward", change(module.forward))
    return targets


@pytest.mark.slow
def test_a_layer_with_a_forward_of_its_own_is_read_as_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = changed(monkeypatch, lambda own: lambda *args, **kwargs: 1.5 * own(*args, **kwargs)).get("layer", 0)
    J = hs.jacobian(f, x)
    assert isinstance(J, ComposedJacobian)
    torch.testing.assert_close(J.dense(), dense_jacobian(f.function, x), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.slow
def test_parts_with_an_operation_that_is_not_known_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = changed(monkeypatch, lambda own: lambda *args, **kwargs: own(*args, **kwargs).cumsum(1)).get("layer", 0)
    J = hs.jacobian(f, x)
    assert isinstance(J, FunctionJacobian)
    assert J.notes[0].startswith("the Jacobian is that of torch.func, without closed forms: a closed form needs every")
    assert "cumsum" in J.notes[0]
    assert J.notes[0] in hs.measure(f, x).notes
    torch.testing.assert_close(J.dense(), dense_jacobian(f, x), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_parts_that_do_not_reproduce_the_output_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the reading forgot the scale of the logits."""
    monkeypatch.setattr(HeadLogits, "scaled", lambda self, factor: self)
    f, x = tiny_targets("llama").get("layer", 1)
    J = hs.jacobian(f, x)
    assert isinstance(J, FunctionJacobian)
    assert "what was read differs from its own output by a relative" in J.notes[0]
    torch.testing.assert_close(J.dense(), dense_jacobian(f, x), rtol=1e-4, atol=1e-6)


class HalfGradient(torch.autograd.Function):
    """x, with half of its derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return 0.5 * grad[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 0.5 * tangents[0]


@pytest.mark.slow
def test_parts_with_another_derivative_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same value at the tokens, and a derivative that is half as large: only autograd can tell."""
    f, x = changed(monkeypatch, lambda own: lambda x, *args, **kwargs: own(HalfGradient.apply(x), *args, **kwargs)).get(
        "layer", 0
    )
    with pytest.warns(DerivativeWarning, match="moves otherwise"):
        J = hs.jacobian(f, x)
    assert isinstance(J, FunctionJacobian)
    assert "differs from autograd's by a relative" in J.notes[0]


@pytest.mark.slow
def test_parts_that_are_partly_detached_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args, **kwargs: own((x + x.detach()) / 2, *args, **kwargs)

    f, x = changed(monkeypatch, halved).get("layer", 0)
    with pytest.warns(DerivativeWarning, match="moves otherwise"):
        J = hs.jacobian(f, x)
    assert isinstance(J, FunctionJacobian)
    assert "detach" in J.notes[0]


def test_other_tokens_than_those_of_the_window_go_through_torch_func() -> None:
    f, x = tiny_targets("bert").get("mlp", 0)
    assert isinstance(hs.jacobian(f, torch.cat([x, x])), FunctionJacobian)


def test_long_inputs_are_compared_by_their_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_part, "MAX_COMPARED", 1)
    monkeypatch.setattr(model_part, "compare_derivative", lambda *given: pytest.fail("autograd was asked"))
    f, x = tiny_targets("llama").get("layer", 0)
    assert isinstance(hs.jacobian(f, x), ComposedJacobian)


def test_a_model_is_evaluated_once_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass that compares a layer with the model is the one that its Jacobian is made of."""
    seen: list[torch.dtype] = []
    own = Attend.linearize

    def counted(self: Attend, x: Tensor, memory: int, bounded: bool = True) -> Any:
        seen.append(x.dtype)
        return own(self, x, memory, bounded)

    monkeypatch.setattr(Attend, "linearize", counted)
    targets = tiny_targets("bert", torch.float32)
    assert isinstance(hs.jacobian(*targets.get("model")), ComposedJacobian)
    assert seen == [torch.float64] * targets.layers  # and rounded from there


def test_autograd_is_asked_once_for_a_model_and_again_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    own = model_part.compare_derivative
    monkeypatch.setattr(model_part, "compare_derivative", lambda *given: (asked.append(None), own(*given)))
    model = TINY["llama"].build().requires_grad_(False).double()
    model.set_attn_implementation("eager")
    opened = OpenModel("llama", model, None, "text", "", "float32", 99, "")

    def times(*tokens: int, what: str = "model") -> int:
        asked.clear()
        targets = Targets(opened, Window(torch.tensor([tokens]), [], 0))
        assert isinstance(hs.jacobian(*targets.get(what, 0)), ComposedJacobian)
        return len(asked)

    assert times(5, 6, 7) == 1
    assert times(8, 9, 10, 11) == 0
    model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert times(5, 6, 7) == 1
    assert times(5, 6, 7) == 0
    model.layers[0].mlp.up_proj = torch.nn.Linear(
        *reversed(model.layers[0].mlp.up_proj.weight.shape), bias=False
    ).double()
    assert times(5, 6, 7) == 1
    assert times(5, 6, 7, what="layer") == 1
    assert times(8, 9, 10, what="layer") == 0
    assert times(5, 6, 7, what="residual") == 1
