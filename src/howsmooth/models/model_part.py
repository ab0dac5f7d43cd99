"""Parts of a model as functions with their own Jacobian.

A `ModelPart` runs the model's own modules. Its Jacobian is composed of closed forms that are read of these modules
(`howsmooth.network`) and reproduce the part's own output and, at a random vector, its derivative by autograd: the
output at every input, the derivative once for a part and its weights. Where that fails the Jacobian is that of
torch.func, and a note gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_line, relative_error
from howsmooth._util.torch_globals import exact_autograd
from howsmooth.errors import HowsmoothError, UnsupportedModel
from howsmooth.jacobians.function_operator import function_jacobian
from howsmooth.jacobians.operator import JacobianOperator, random_like
from howsmooth.models.captured_sites import TOLERANCE
from howsmooth.network.composed_jacobian import ComposedJacobian, composed_jacobian
from howsmooth.network.nodes import Attend
from howsmooth.network.reader import Network, read_function

Function = Callable[[Tensor], Tensor]
_SAME_DERIVATIVE = 1e-4
"""Largest relative difference between Jᵀu in closed form and by autograd, in single precision."""
MAX_COMPARED = 2**28
"""Maximum number of attention weights, over all heads, for a comparison with autograd, which stores several arrays of
that size. Longer inputs are compared by their output alone."""


class ModelPart:
    """A part of a model: a function of tokens ``(n, d)``, with its Jacobian in closed form where there is one.

    Attributes:
        function: the model's own modules, called as the model calls them.
        modules: those modules. x: their input in the model.
    """

    def __init__(self, function: Function, x: Tensor, modules: Sequence[nn.Module]):
        self.function, self.x, self.modules = function, x, tuple(modules)

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)

    def network(self) -> Network:
        """The part as nodes; `UnsupportedModel` where it has operations that are not known."""
        root = self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)
        with torch.no_grad():  # so that weights are read without their derivative
            network = read_function(self.function, self.x, root=root, name="part", check=False)
        network.check_complete("a closed form")
        return network

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at x: closed forms at tokens like those of the window, torch.func otherwise."""
        if x.shape != self.x.shape:
            return function_jacobian(self.function, x)
        try:
            return self._composed(x, memory)
        except HowsmoothError as error:
            why = first_line(error)
        note = f"the Jacobian is that of torch.func, without closed forms: {why}"
        return function_jacobian(self.function, x, notes=(note,))

    def _composed(self, x: Tensor, memory: int) -> ComposedJacobian:
        network = self.network()
        operator = composed_jacobian(network.root, x, memory=memory)
        with torch.no_grad():
            expected = self.function(x)
        error = relative_error(operator.output, expected.reshape(operator.output.shape))
        if not error <= TOLERANCE:
            raise UnsupportedModel(f"what was read differs from its own output by a relative {error:.1e}.")
        heads = max((node.attention.heads for node in network.root.walk() if isinstance(node, Attend)), default=0)
        if heads * len(x) ** 2 <= MAX_COMPARED:
            self._compare_once(operator, x)
        return operator

    def _compare_once(self, operator: JacobianOperator, x: Tensor) -> None:
        part = (self.function.__qualname__, *map(id, self.modules))  # a layer has a residual part of its own
        state = [_state(module) for module in self.modules]
        known = _SAME_AS_AUTOGRAD.setdefault(self.modules[0], {})
        if known.get(part) != state:
            compare_derivative(operator, self.function, x)
            known[part] = state


_SAME_AS_AUTOGRAD: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], list[Any]]] = WeakKeyDictionary()
"""First modules of parts whose derivative has been compared with autograd → the states of all their modules then."""


def _state(module: nn.Module) -> list[Any]:
    """A value that changes when a layer gets other weights, other modules or another definition."""
    inside = list(module.modules())
    calls = [(id(each), type(each).forward, each.__dict__.get("forward")) for each in inside]
    return [*calls, *((id(weight), weight._version) for weight in module.parameters())]


def compare_derivative(operator: JacobianOperator, function: Function, x: Tensor) -> None:
    """Refuse an operator whose Jᵀu, at a random u, differs from autograd of the function."""
    u = random_like(x.new_empty(operator.out_shape), seed=4)
    with exact_autograd(x.device):
        leaf = x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(leaf), leaf, u)
    error = relative_error(operator.rmatvec(u), expected)
    if not error <= _SAME_DERIVATIVE:
        raise UnsupportedModel(f"the derivative in closed form differs from autograd's by a relative {error:.1e}.")
