"""Functions that move otherwise than autograd says are doubted; smooth ones, sharp ones and jumps are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import NotDifferentiable
from howsmooth.jacobians import function_jacobian
from howsmooth.jacobians.function_operator import DerivativeWarning

N, D = 5, 8
WEIGHT = torch.randn(D, D, generator=torch.Generator().manual_seed(1)) / D**0.5
HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor that is detached": lambda x: x * x.detach(),
    "a residual through numpy": lambda x: x + torch.from_numpy(np.tanh(x.detach().numpy() @ WEIGHT.numpy())),
    "a residual without gradients": lambda x: x + (x.detach() @ WEIGHT).relu(),
}
HONEST: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: (x @ x.mT).softmax(-1) @ x,
    "hard attention": lambda x: (1e4 * x @ x.mT).softmax(-1) @ x,
    "a fast wave": lambda x: x + torch.sin(1e4 * x),
    "a large offset": lambda x: 1e6 + x.tanh(),
    "kinks": lambda x: (x @ WEIGHT).relu(),
    "jumps": lambda x: x * x.argmax(-1, keepdim=True),
    "another shape nearby": lambda x: x[x > 0] ** 2,
    "numbers rounded to half precision": lambda x: x.bfloat16().float() @ WEIGHT,
}


def tokens(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(N, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", HIDDEN)
def test_parts_that_autograd_does_not_see_are_doubted(name: str) -> None:
    with pytest.warns(DerivativeWarning, match="moves otherwise than its derivative says"):
        found = hs.measure(HIDDEN[name], tokens())
    assert any("moves otherwise" in note for note in found.notes)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_honest_functions_are_not_doubted(name: str, scale: float) -> None:
    assert not any("moves otherwise" in note for note in function_jacobian(HONEST[name], tokens(scale)).notes)


def test_a_function_that_is_not_defined_nearby_is_not_doubted() -> None:
    x = tokens()

    def only_here(y: Tensor) -> Tensor:
        if bool((y.detach() != x).any()):
            raise ValueError("not defined here")
        return y * 2

    assert not any("moves otherwise" in note for note in function_jacobian(only_here, x).notes)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_quantised_kernels_are_refused_also_beside_a_residual(dtype: torch.dtype) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(Residual(), {nn.Linear}, dtype)
    with pytest.raises(NotDifferentiable, match=r"quantised layers \(torch.ao.nn.quantized"):
        hs.measure(quantised, tokens())


def test_whole_numbers_times_a_scale_are_measured_as_what_they_stand_for() -> None:
    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", WEIGHT.abs().amax(1, keepdim=True) / 127)
            self.register_buffer("weight", (WEIGHT / self.scale).round().to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)

    layer = Stored()
    whole = torch.eye(D, dtype=torch.float64) + layer.weight.double() * layer.scale.double()
    found = hs.measure(layer, tokens())
    expected = float(torch.linalg.matrix_norm(whole, 2))
    assert float(found.lower) <= expected <= float(found.upper)
