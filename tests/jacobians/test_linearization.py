"""The traced derivative where f writes into tensors: whatever the memory holds, it is that of reverse mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evidence.uninitialised_memory import (
    KINDS,
    PLAIN,
    count,
    deepseek_layer,
    every_new_tensor_is_nan,
    halves,
    norm,
    right,
    right_by_torch,
    tokens,
)
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.jacobians.function_operator import function_jacobian, linearized


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLAIN)
def test_a_tensor_that_f_fills_is_measured_right_whatever_memory_holds(name: str, kind: str) -> None:
    f, x = PLAIN[name], tokens()
    truth = norm(f, x)
    assert count(f, x, kind, 2, lambda: right(f, x, truth)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "unwritten is NaN"])
def test_a_layer_of_deepseek_is_measured_right_whatever_memory_holds(kind: str) -> None:
    f, x = deepseek_layer()
    truth = norm(f, x)
    assert count(f, x, kind, 2, lambda: right(f, x, truth)) == 2


def test_torch_itself_reads_memory_that_nothing_has_written() -> None:
    x = tokens()
    assert count(halves, x, "unwritten is NaN", 2, lambda: right_by_torch(halves, x)) == 0, "no care is needed any more"


@pytest.mark.parametrize("name", PLAIN)
def test_functions_that_write_in_place_are_traced(name: str) -> None:
    with every_new_tensor_is_nan():
        operator = function_jacobian(PLAIN[name], tokens())
    assert (operator.method, operator.notes) == ("torch.func linearize", ())


def test_the_same_product_twice_is_the_same_although_its_writes_run_twice() -> None:
    def f(x: Tensor) -> Tensor:
        scores = torch.nn.functional.linear(x[None], weight)
        scores.mul_(2.0).add_(1.0)
        return scores.sin()[0]

    weight, (x, v) = torch.randn(4, 4).double(), torch.randn(2, 3, 4).double()
    push = linearized(f, x)
    expected = torch.func.jvp(f, (x,), (v,))[1]
    for _ in range(3):
        torch.testing.assert_close(push(v), expected)


def test_a_write_into_a_tensor_from_outside_is_not_traced() -> None:
    def f(x: Tensor) -> Tensor:
        calls.add_(1)
        return x.sin()

    calls, x = torch.zeros(()), torch.randn(3, 4)
    with pytest.raises(NotDifferentiable, match="did not create"):
        linearized(f, x)
    operator = function_jacobian(f, x)
    assert operator.method == "double backward"
    torch.testing.assert_close(operator.matvec(torch.ones(3, 4)), x.cos())


def test_a_trace_of_nan_is_not_taken_for_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.jacobians.function_operator.linearized", lambda f, x: lambda v: v * torch.nan)
    operator = function_jacobian(torch.sin, torch.zeros(3))
    assert operator.method == "torch.func jvp"
    assert torch.equal(operator.matvec(torch.ones(3)), torch.ones(3))


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")
def test_a_function_that_needs_its_whole_batch_is_refused_though_one_item_alone_is_nan() -> None:
    def f(x: Tensor) -> Tensor:
        return x / x.detach().std(0, keepdim=True)  # of one item: NaN

    with pytest.raises(InvalidInput, match="mixes the items"):
        function_jacobian(f, torch.randn(3, 2, 2))
