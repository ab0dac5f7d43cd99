"""Each check refuses what it names, with its sentence, and lets the rest through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.jacobians import function_checks
from howsmooth.jacobians.function_operator import DerivativeWarning, function_jacobian
from howsmooth.jacobians.operator import random_like

NAN, INF = float("nan"), float("inf")
N, D = 5, 4


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2), (1, 1)])
def test_finite_tokens_pass(shape: tuple[int, ...]) -> None:
    function_checks.check_tokens(torch.randn(shape))


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ([[1.0]], "x must be a torch.Tensor, not list"),
        (torch.zeros(3, 2, dtype=torch.int64), r"x has dtype int64.*convert with x\.float\(\)"),
        (torch.zeros(3, 2, dtype=torch.complex64), "x has dtype complex64"),
        (torch.zeros(3, 2).to(torch.float8_e4m3fn), r"x has dtype float8_e4m3fn.*convert it with \.float\(\)"),
        (torch.zeros(3, 2, device="meta"), "x is on the meta device"),
        (torch.eye(2).to_sparse(), r"x is a sparse tensor.*\.to_dense\(\)"),
        (torch.zeros(3), r"x has shape \(3,\).*add the missing axes"),
        (torch.zeros(1, 1, 3, 2), r"x has shape \(1, 1, 3, 2\).*merge or index axes"),
        (torch.zeros(0, 2), r"x has shape \(0, 2\), which holds no numbers"),
        (torch.zeros(3, 0), r"x has shape \(3, 0\), which holds no numbers"),
        (torch.tensor([[0.0, NAN], [INF, 0.0]]), r"x holds 2 NaN or infinite values, the first at index \(0, 1\)"),
        (torch.tensor([[0.0, 0.0], [-INF, 0.0]]), r"x holds 1 NaN or infinite value, at index \(1, 0\)"),
    ],
)
def test_bad_tokens_are_refused_in_one_sentence(x: Tensor, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        function_checks.check_tokens(x)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    with pytest.raises(InvalidInput, match="x is a nested tensor"):
        function_checks.check_tokens(nested)


def test_the_error_uses_the_name_given() -> None:
    with pytest.raises(InvalidInput, match="keys holds 1 NaN"):
        function_checks.check_finite(torch.tensor([NAN]), "keys")


def test_infinities_that_cancel_are_found_and_sums_that_overflow_are_no_infinities() -> None:
    with pytest.raises(InvalidInput, match="2 NaN or infinite values, the first at index"):
        function_checks.check_finite(torch.tensor([1.0, float("inf"), float("-inf")]), "keys")
    function_checks.check_finite(torch.full((3,), torch.finfo(torch.float32).max), "keys")


def test_a_point_may_have_fewer_axes_than_tokens() -> None:
    function_checks.check_point(torch.zeros(3))
    function_checks.check_point(torch.tensor(1.0))


def test_the_tensor_meant_is_found_in_every_kind_of_output() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    assert function_checks.first_tensor(first) is first
    assert function_checks.first_tensor((None, first, second)) is first
    assert function_checks.first_tensor([first]) is first
    assert function_checks.first_tensor({"a": "text", "b": first}) is first
    assert function_checks.first_tensor(BaseModelOutput(last_hidden_state=second, hidden_states=(first,))) is second
    assert function_checks.first_tensor(CausalLMOutput(logits=first)) is first


@pytest.mark.parametrize("output", [None, 3.0, (), "text", {"a": 1}])
def test_an_output_without_tensor_is_refused(output: object) -> None:
    with pytest.raises(InvalidInput, match=f"f returned no tensor but {type(output).__name__}"):
        function_checks.first_tensor(output)


def test_an_exception_of_f_keeps_its_type_and_gains_a_note() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        function_checks.evaluate(lambda x: x @ torch.zeros(5, 5), torch.zeros(3, 2))
    assert caught.value.__notes__ == ["howsmooth called f with a tensor of shape (3, 2) and dtype float32."]


@pytest.mark.parametrize(
    ("y", "error", "sentence"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), NotDifferentiable, "f returns int64 values, which have no derivative"),
        (torch.zeros(2, 3, dtype=torch.bool), NotDifferentiable, "f returns bool values"),
        (torch.zeros(2, 3, dtype=torch.complex64), InvalidInput, "f returns complex numbers"),
        (torch.zeros(2, 0), InvalidInput, r"f\(x\) has shape \(2, 0\), which holds no numbers"),
        (torch.full((2, 3), NAN), InvalidInput, r"f\(x\) holds 6 NaN or infinite values"),
        (torch.zeros(3, 2), InvalidInput, r"must start with the same batch size"),
        (torch.tensor(0.0), InvalidInput, r"must start with the same batch size"),
    ],
)
def test_values_without_jacobian_are_refused(y: Tensor, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        function_checks.check_output(y, torch.zeros(2, 3, 4))


def test_rounding_is_not_taken_for_randomness_but_noise_is() -> None:
    y = torch.randn(100)
    function_checks.check_repeatable(lambda: y * (1 + 1e-5), y)
    with pytest.raises(InvalidInput, match=r"call \.eval\(\)"):
        function_checks.check_repeatable(lambda: y * (1 + 1e-3), y)


def test_dropout_that_happens_to_drop_nothing_is_still_random() -> None:
    y = torch.ones(1)
    with pytest.raises(InvalidInput, match="f is random"):
        function_checks.check_repeatable(lambda: (torch.rand(1) >= 0).float() * y, y)


def test_a_function_that_seeds_itself_is_not_random() -> None:
    def seeded() -> Tensor:
        torch.manual_seed(7)
        return torch.randn(3)

    function_checks.check_repeatable(seeded, seeded())


def test_random_probes_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = random_like(torch.zeros(5)), random_like(torch.zeros(5))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_relative_error_of_zero_is_zero_or_infinite() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert function_checks.relative_error(zero, zero) == 0
    assert function_checks.relative_error(one, zero) == INF
    assert function_checks.relative_error(3 * one, 2 * one) == pytest.approx(0.5)


# The same function_checks, met by `function_jacobian`


@pytest.mark.parametrize(
    ("f", "error", "sentence"),
    [
        (lambda x: x.argmax(-1), NotDifferentiable, "f returns int64 values"),
        (lambda x: x.detach() ** 2, NotDifferentiable, r"f\(x\) is not connected to x"),
        (lambda x: torch.from_numpy(x.detach().numpy() ** 2), NotDifferentiable, r"f\(x\) is not connected to x"),
        (lambda x: nn.Parameter(torch.ones(2)) * 2, NotDifferentiable, r"f\(x\) is not connected to x"),
        (lambda x: x.mul_(x), NotDifferentiable, "autograd cannot go back through f.*inplace"),
        (lambda x: (x - x).abs().sqrt(), NotDifferentiable, "Jacobian of f has NaN or infinite entries"),
        (lambda x: x / 0, InvalidInput, r"f\(x\) holds 20 NaN or infinite values"),
        (lambda x: None, InvalidInput, "f returned no tensor but NoneType"),
        (lambda x: x + torch.randn(N, D), InvalidInput, r"f is random.*call \.eval\(\)"),
    ],
)
def test_functions_without_jacobian_are_refused(
    f: Callable[[Tensor], Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        function_jacobian(f, random(N, D))


@pytest.mark.slow
@pytest.mark.parametrize("build", [lambda: nn.TransformerEncoderLayer(D, 2, 8), lambda: nn.Dropout(0.01)])
def test_dropout_in_training_mode_is_refused(build: Callable[[], nn.Module]) -> None:
    module = build().double()
    with pytest.raises(InvalidInput, match=r"f is random.*call \.eval\(\)"):
        function_jacobian(module, random(N, D))
    function_jacobian(module.eval(), random(N, D))


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(N, D, dtype=torch.int64), "x has dtype int64"),
        (torch.full((N, D), float("nan")), "x holds 20 NaN or infinite values"),
        (torch.zeros(2, 2, N, D), r"must be \(n, d\) or \(batch, n, d\)"),
        (torch.zeros(0, D), "holds no numbers"),
    ],
)
def test_points_without_jacobian_are_refused(x: Tensor, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        function_jacobian(torch.tanh, x)


def test_an_exception_of_f_passes_with_a_note_on_the_shape() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        function_jacobian(nn.Linear(9, 9), random(N, D))
    assert "shape (5, 4)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x - x.mean(0),
        lambda x: x / len(x),
        lambda x: x.cumsum(0),  # the first item alone shows nothing
        lambda x: x.flip(0).cumsum(0).flip(0),
        lambda x: x * x.detach().sum(0),  # the derivative alone shows nothing
    ],
)
def test_functions_that_mix_the_items_of_a_batch_are_refused(f: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InvalidInput, match="f mixes the items of the batch"):
        function_jacobian(f, random(3, N, D))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_function_that_reads_the_sequence_first_is_refused(batch: int) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 8).double().eval()
    with pytest.raises(InvalidInput, match=r"or reads the axes of x in another order than \(batch, n, d\)"):
        function_jacobian(lambda x: layer(x), random(batch, N, D))


def test_equal_items_do_not_hide_that_they_are_mixed() -> None:
    x = random(1, N, D).repeat(3, 1, 1)
    with pytest.raises(InvalidInput, match="f mixes the items of the batch"):
        function_jacobian(lambda z: z.mean(0, keepdim=True).expand_as(z), x)


def test_a_batch_must_come_back_first() -> None:
    with pytest.raises(InvalidInput, match="must start with the same batch size"):
        function_jacobian(lambda x: x.transpose(0, 1), random(3, N, D))


def test_a_function_that_holds_half_precision_weights_is_refused() -> None:
    module = nn.Linear(D, D).half()
    with pytest.raises(InvalidInput, match=r"f does not accept float32, in which a float16 x is computed"):
        function_jacobian(lambda x: module(x), random(N, D).half())


def test_inference_tensors_hidden_in_a_function_are_refused() -> None:
    with torch.inference_mode():
        weight = random(D, D)
    with pytest.raises(InvalidInput, match=r"created under torch\.inference_mode"):
        function_jacobian(lambda x: x @ weight, random(N, D))


@pytest.mark.parametrize("product", ["matvec", "rmatvec"])
def test_vectors_of_another_shape_are_refused(product: str) -> None:
    operator = function_jacobian(lambda x: x[:3] ** 2, random(N, D))
    with pytest.raises(InvalidInput, match=r"this product takes vectors of shape \((5|3), 4\), not \(20,\)"):
        getattr(operator, product)(random(N * D))


def test_global_switches_are_restored_also_after_an_error() -> None:
    def switches() -> tuple[bool, ...]:
        backends = torch.backends.cuda
        return (
            torch.backends.mha.get_fastpath_enabled(),
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            torch.is_grad_enabled(),
        )

    before = switches()
    function_jacobian(torch.tanh, random(N, D)).dense()
    assert switches() == before
    with pytest.raises(InvalidInput):
        function_jacobian(lambda x: None, random(N, D))
    assert switches() == before


def test_autocast_of_the_caller_does_not_reach_f() -> None:
    module, x = nn.Linear(D, D), torch.randn(N, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = function_jacobian(module, x).dense()
    assert torch.equal(dense, function_jacobian(module, x).dense())


def test_building_does_not_move_the_random_state() -> None:
    x = random(N, D)
    state = torch.get_rng_state()
    function_jacobian(torch.tanh, x).dense()
    assert torch.equal(state, torch.get_rng_state())


def test_a_piecewise_constant_function_warns_that_its_jacobian_is_zero() -> None:
    with pytest.warns(DerivativeWarning, match="exactly zero"):
        operator = function_jacobian(torch.round, random(N, D))
    assert "piecewise constant" in operator.notes[0]
    assert not operator.dense().any()
