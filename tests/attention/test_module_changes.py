"""Whether a module still computes what its class does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import howsmooth as hs
from howsmooth.attention.conversion import as_attention_map
from howsmooth.attention.module_changes import change_of, known_base


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
