"""Parts of a model as functions with their own Jacobian.

A `ModelPart` runs the model's own modules. Its Jacobian is composed of closed forms
(`howsmooth.jacobians.closed_maps`) that reproduce, layer by layer, the model's own output and, at a random vector, its
derivative by autograd: the output at every window, the derivative once for every layer and its weights. Where that
fails the Jacobian is that of torch.func, and a note gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_line, relative_error
from howsmooth._util.torch_globals import exact_autograd
from howsmooth.attention import AttentionMap
from howsmooth.errors import HowsmoothError, UnsupportedModel
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY
from howsmooth.jacobians.closed_maps import ClosedMap, Tokenwise, composed_jacobian
from howsmooth.jacobians.function_operator import function_jacobian
from howsmooth.jacobians.operator import JacobianOperator, random_like
from howsmooth.models.captured_sites import TOLERANCE
from howsmooth.models.layer_wiring import ClosedLayer, closed_layers, norm_stage, read_affine

Function = Callable[[Tensor], Tensor]
LayerRun = tuple[Function, Tensor, Tensor]
"""A layer's own definition, its input in the model and its output."""
_SAME_DERIVATIVE = 1e-4
"""Largest relative difference between Jᵀu in closed form and by autograd, in single precision."""
MAX_COMPARED = 2**28
"""Maximum number of attention weights, over all heads, for a comparison with autograd, which stores several arrays of
that size. Longer inputs are compared by their output alone."""


class ModelPart:
    """A part of a model: a function of tokens ``(n, d)``, with its Jacobian in closed form where there is one.

    Attributes:
        function: the model's own modules, called as the model calls them.
        closed: builds the map in closed form, or raises a `HowsmoothError` with the reason why there is none.
    """

    def __init__(self, function: Function, x: Tensor, closed: Callable[[], ClosedMap]):
        self.function, self.shape, self.closed = function, x.shape, closed

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at x: closed forms at tokens like those of the window, torch.func otherwise."""
        if x.shape != self.shape:
            return function_jacobian(self.function, x)
        try:
            return composed_jacobian(self.closed(), x, memory=memory)
        except HowsmoothError as error:
            why = first_line(error)
        note = f"the Jacobian is that of torch.func, without closed forms: {why}"
        return function_jacobian(self.function, x, notes=(note,))


class ClosedLayers:
    """The layers of a model at one window in closed form, each compared with the model at its first use."""

    def __init__(self, kind: str, modules: Sequence[nn.Module], attention: Callable[[int], AttentionMap]):
        self.kind, self.modules, self.attention = kind, modules, attention
        self._known: dict[int, ClosedLayer | str] = {}

    def get(self, index: int, function: Function, x: Tensor, output: Tensor) -> ClosedLayer:
        """Layer ``index``, with the output ``output`` at x; ``function`` is its own definition."""
        if index not in self._known:
            try:
                self._known[index] = self._compared(index, function, x, output, x, DEFAULT_MEMORY, bounded=False)[0]
            except HowsmoothError as error:
                self._known[index] = first_line(error)
        known = self._known[index]
        if isinstance(known, str):
            raise UnsupportedModel(known)
        return known

    def linearize(
        self, index: int, run: LayerRun, x: Tensor, memory: int, bounded: bool
    ) -> tuple[Tensor, JacobianOperator]:
        """Layer ``index`` and its Jacobian at x; near the recorded tokens this pass also compares it with the model."""
        near = x.shape == run[1].shape and relative_error(x, run[1]) <= TOLERANCE
        if index not in self._known and near:
            try:
                self._known[index], value, operator = self._compared(index, *run, x, memory, bounded)
            except HowsmoothError:
                pass  # the comparison at the recorded tokens below decides, and gives the reason
            else:
                return value, operator
        return self.get(index, *run).layer.linearize(x, memory, bounded)

    def _compared(
        self, index: int, function: Function, tokens: Tensor, output: Tensor, x: Tensor, memory: int, bounded: bool
    ) -> tuple[ClosedLayer, Tensor, JacobianOperator]:
        """Layer ``index`` with its value and Jacobian at x, compared with its output in the model."""
        attention = self.attention(index)
        worst = float("inf")
        for candidate in closed_layers(self.kind, self.modules[index], attention):
            value, operator = candidate.layer.linearize(x, memory, bounded)
            error = relative_error(value, output.reshape(value.shape))
            if error <= TOLERANCE:
                if attention.heads * len(x) ** 2 <= MAX_COMPARED:
                    self._compare_once(index, operator, function, tokens)
                return candidate, value, operator
            worst = min(worst, error)
        raise UnsupportedModel(
            f"the parts of layer {index} put together differ from its own output by a relative {worst:.1e}."
        )

    def _compare_once(self, index: int, operator: JacobianOperator, function: Function, x: Tensor) -> None:
        module = self.modules[index]
        state = _state(module)
        if _SAME_AS_AUTOGRAD.get(module) != state:
            compare_derivative(f"layer {index}", operator, function, x)
            _SAME_AS_AUTOGRAD[module] = state


_SAME_AS_AUTOGRAD: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Layers whose derivative has been compared with autograd, each with its state at that time."""


def _state(module: nn.Module) -> list[Any]:
    """A value that changes when a layer gets other weights, other modules or another definition."""
    inside = list(module.modules())
    calls = [(id(each), type(each).forward, each.__dict__.get("forward")) for each in inside]
    return [*calls, *((id(weight), weight._version) for weight in module.parameters())]


class ComparedLayer(ClosedMap):
    """A layer in closed form, compared with the model by the same forward pass that makes its Jacobian."""

    attentions = 1

    def __init__(self, layers: ClosedLayers, index: int, *run: *LayerRun):
        self.layers, self.index, self.run = layers, index, run

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        return self.layers.linearize(self.index, self.run, x, memory, bounded)


def compare_derivative(name: str, operator: JacobianOperator, function: Function, x: Tensor) -> None:
    """Refuse an operator whose Jᵀu, at a random u, differs from autograd of the function."""
    u = random_like(x.new_empty(operator.out_shape), seed=4)
    with exact_autograd(x.device):
        leaf = x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(leaf), leaf, u)
    error = relative_error(operator.rmatvec(u), expected)
    if not error <= _SAME_DERIVATIVE:
        raise UnsupportedModel(
            f"the derivative of {name} in closed form differs from autograd's by a relative {error:.1e}."
        )


def closed_tail(modules: Sequence[nn.Module]) -> list[ClosedMap]:
    """The norms and linear maps of single tokens behind the last layer, as one map or none."""
    active = [module for module in modules if not isinstance(module, nn.Dropout | nn.Identity)]
    stages = [norm_stage(m) if "norm" in type(m).__name__.lower() else read_affine(m) for m in active]
    return [Tokenwise(*stages)] if stages else []
