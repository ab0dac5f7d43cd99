"""Recordings of one run: which operations, in which module, on which tensors, and what happens in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import UnsupportedModel
from howsmooth.network.nodes import Attend
from howsmooth.network.reader import read_function
from howsmooth.network.trace import ChangedInPlace, first_traced, trace
from howsmooth.testing import dense_jacobian

X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def names(function: Callable[[Tensor], Any], x: Tensor = X) -> list[str]:
    with torch.no_grad():
        return [operation.name for operation in trace(function, x).recording.operations]


def test_operations_on_constants_alone_are_not_recorded() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.ones(5, 5).tril().log().exp()
        return mask.double() @ torch.sin(x[0])

    assert names(function) == ["select", "sin", "mm"]


def test_fused_kernels_of_encoder_layers_show_their_operations() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    assert "native_layer_norm" in names(layer)
    assert "_transformer_encoder_layer_fwd" not in names(layer)


def test_operations_know_the_module_in_which_they_ran() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    module = nn.ModuleDict({"first": inner, "again": nn.Identity()}).double()

    def function(x: Tensor) -> Tensor:
        return module["again"](module["first"](x).sin()).cos()

    with torch.no_grad():
        traced = trace(function, X[0], module)
    places = {operation.name: operation.place for operation in traced.recording.operations}
    assert places == {"addmm": "first.0", "relu": "first.1", "sin": "", "cos": ""}
    assert [str(operation) for operation in traced.recording.operations][:2] == ["addmm in first.0", "relu in first.1"]


def test_places_are_right_after_a_module_has_failed_inside() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.linear = Failing(), nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.failing(x)
            except ValueError:
                return self.linear(x).sin()

    outer = Outer()
    recorded = trace(outer, X[0], outer).recording.operations
    assert [operation.place for operation in recorded] == ["linear", ""]


def test_the_coarsest_dtype_of_a_run_is_noted() -> None:
    assert trace(torch.sin, X).recording.narrowest == torch.float64
    assert trace(lambda x: x.float().sin().double(), X).recording.narrowest == torch.float32


@pytest.mark.parametrize(
    "output",
    [
        lambda x: (None, x),
        lambda x: [x, None],
        lambda x: {"loss": None, "logits": x},
        lambda x: ((x,), 3),
    ],
)
def test_the_first_tensor_of_an_output_counts(output: Callable[[Tensor], Any]) -> None:
    assert torch.equal(first_traced(output(X)), X)
    assert names(lambda x: output(x.sin())) == ["sin"]


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: (x * 1).add_(1.0),
    "the input": lambda x: x.mul_(2.0),
    "a part": lambda x: _after(x * 1, lambda y: y[:, 0].add_(1.0)),
    "a part, read before through a view": lambda x: _viewed(x * 1),
    "an item": lambda x: _after(x * 1, lambda y: y.__setitem__((slice(None), 2), x[:, 0] * 3)),
    "a mask": lambda x: _after(x * 1, lambda y: y.masked_fill_(torch.eye(5, 8, dtype=torch.bool), -2.0)),
    "a column of an empty tensor": lambda x: _columns(torch.empty(5, 8, dtype=x.dtype), x),
    "a column of zeros like x": lambda x: _columns(torch.zeros_like(x[0]), x),
    "a transposed view": lambda x: _after(x * 1, lambda y: y.mT[:, 1].mul_(x[:, 0, :8].sum())),
    "a list that is filled": lambda x: _filled(x),
    "an exchange": lambda x: _after(x * 1, lambda y: y[:, [0, 1]].copy_(y[:, [1, 0]])),
    "a swap of channels": lambda x: _after(x * 1, lambda y: y.copy_(y.flip(-1).sin())),
}


def _after(y: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(y)
    return y.tanh()


def _viewed(y: Tensor) -> Tensor:
    view = y[:, :2]
    y.add_(1.0)
    return torch.cat([view, y], 1)


def _columns(out: Tensor, x: Tensor) -> Tensor:
    for column in range(8):
        out[:, column] = (x[0] ** 2).sum(-1) * column
    return out


def _filled(x: Tensor) -> Tensor:
    out = torch.zeros(4, 8, dtype=x.dtype)
    for row in range(4):
        out[row] += torch.tanh(x[0, row] + x[0, row + 1])
    return out


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_read_as_it_happens_or_refused(name: str) -> None:
    function, given = IN_PLACE[name], X.clone()
    with torch.no_grad():
        try:
            network = read_function(function, given)
        except ChangedInPlace as error:
            pytest.fail(f"{name} could be read: {error}")
    assert torch.equal(given, X)
    for seed in (5, 6):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def own(tokens: Tensor) -> Tensor:
            return function(tokens[None] * 1)

        expected = own(x).reshape(network(x).shape)
        torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)
        exact = dense_jacobian(own, x)
        torch.testing.assert_close(network.jacobian_at(x, 2**20).dense(), exact, rtol=1e-9, atol=1e-9)


def test_a_stale_view_is_noticed_by_the_recording() -> None:
    """Negative control: without this the view would be read as it was before the write."""

    def function(x: Tensor) -> Tensor:
        y = x * 1
        view = y[:, 0]
        y.add_(1.0)
        return view

    with pytest.raises(ChangedInPlace, match="changed in place through another view"):
        trace(function, X)
    operations = trace(lambda x: function(x).sin(), X).recording.operations
    assert [operation.stale is not None for operation in operations] == [False, False, False, True]
    with torch.no_grad():
        network = read_function(function, X)
    torch.testing.assert_close(network(X[0]), function(X))


def test_writes_into_constants_are_noticed() -> None:
    with pytest.raises(ChangedInPlace, match="writes into a tensor that was made empty or as a constant"):
        trace(lambda x: torch.zeros(1, 5, 8, dtype=torch.float64).add_(x), X)


def test_a_module_that_offers_its_map_is_taken_at_its_word_only_where_it_is_true() -> None:
    attention = hs.SelfAttention.random(8, heads=2, dtype=torch.float64)

    class Offering(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.attention, self.factor = attention, factor

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * self.attention(x)

        def attention_map(self, n: int | None = None) -> hs.SelfAttention:
            return self.attention

    honest, false = (nn.Sequential(nn.LayerNorm(8).double(), Offering(factor)).eval() for factor in (1.0, 2.0))
    network = hs.read_network(honest, X[0])
    [node] = [node for node in network.root.walk() if isinstance(node, Attend)]
    assert node.attention is attention
    assert node.place == "1"
    with pytest.raises(UnsupportedModel, match="differs from its own output"):
        hs.read_network(false, X[0])
