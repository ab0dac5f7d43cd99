"""A network as nodes: a function of torch is run once, its operations are read, and what was read is compared with it.

`read_function` reads any function of one tensor; `howsmooth.models.network_source` opens models, files and modules for
it. What was read is compared with the function itself at its input and at a random point near it: outputs must agree,
and so must derivatives in a random direction. So a network is never read wrongly in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_line, random_stream, relative_error
from howsmooth._util.torch_globals import exact_autograd
from howsmooth.attention.attention_map import MapModule
from howsmooth.attention.conversion import as_attention_map
from howsmooth.errors import HowsmoothError, UnsupportedModel
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.network.description import describe
from howsmooth.network.nodes import Node, Unread
from howsmooth.network.read import read_operations
from howsmooth.network.trace import ChangedInPlace, first_traced, trace
from howsmooth.network.tree import tree_of

SAME_VALUE = {torch.float64: 1e-9, torch.float32: 1e-5}
SAME_DERIVATIVE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative differences between what was read and the function, by dtype."""
_NEAR = 1e-3
"""Distance of the second point, in norms of the input plus one."""


@dataclass(frozen=True)
class Network:
    """A network that was read: a map of tokens ``(n, d)`` to tokens, or of pixels and to classes as one token each.

    Attributes:
        root: the outermost node.
        name: what was read.
        function: the network's own definition, of tokens ``(n, d)`` as well.
        x: the tokens at which it was read.
        in_shape, out_shape: as the network itself takes and gives them.
        difference: the largest relative difference from the network's own outputs and derivatives that was seen, NaN
            where they were not compared.
        coarsest: the coarsest floating dtype in which the network itself computes a part.
    """

    root: Node
    name: str
    function: Callable[[Tensor], Tensor] = field(repr=False)
    x: Tensor = field(repr=False)
    in_shape: torch.Size
    out_shape: torch.Size
    difference: float
    coarsest: torch.dtype = torch.float64

    def __call__(self, x: Tensor) -> Tensor:
        return self.root(x)

    @property
    def unread(self) -> tuple[Unread, ...]:
        """The operations that are left to automatic differentiation."""
        found = (node for node in self.root.walk() if isinstance(node, Unread))
        return tuple({(node.operation, node.place): node for node in found}.values())

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at tokens x: closed forms for all that was read, torch.func for the rest."""
        return self.root.jacobian_at(x, memory)

    def __repr__(self) -> str:
        return describe(self)

    def check_complete(self, task: str) -> None:
        """Refuse a network with operations that only automatic differentiation takes care of."""
        if self.unread:
            raise UnsupportedModel(
                f"{task} needs every operation of a network, but this {self.name} has one that is not known: "
                f"{self.unread[0]}."
            )


def read_function(
    function: Callable[[Tensor], Any],
    x: Tensor,
    *,
    root: nn.Module | None = None,
    name: str = "",
    check: bool = True,
) -> Network:
    """Read a function of torch at an input.

    Args:
        function: takes x and returns a tensor, or an output whose first tensor counts. It must not change between
            calls, and not branch on values.
        x: tokens ``(n, d)``, or any tensor of one item: its last axis holds the numbers of a token where there are two
            axes beside a batch of one; images are one token.
        root: the module whose submodules give the nodes their places.
        check: whether the nodes are compared with the function.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    >>> network = read_function(layer, torch.randn(1, 5, 8), root=layer)
    >>> torch.allclose(network(torch.ones(5, 8)), layer(torch.ones(1, 5, 8))[0], atol=1e-6)
    True
    """
    rows, width = tokens_shape(x)
    check_still(root)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        try:
            traced = trace(partial(run_network, function), x, root, _offers)
            values, given, output = read_operations(traced, rows, width)
        except ChangedInPlace:  # torch itself can rewrite what works in place
            traced = trace(partial(run_network, torch.func.functionalize(function, remove="mutations")), x, root)
            values, given, output = read_operations(traced, rows, width)
        tree = tree_of(values, given, output)
        out_rows, out_width = output.rows, output.width

        def own(tokens: Tensor) -> Tensor:
            return first_traced(function(tokens.reshape(x.shape))).reshape(out_rows, out_width)

        start = x.detach().reshape(rows, width)
        coarsest = traced.recording.narrowest or start.dtype
        narrowest = min(coarsest, start.dtype, key=lambda d: d.itemsize)
        difference = largest_difference(tree, own, start, narrowest) if check else math.nan
    label = name or (type(root).__name__ if root is not None else getattr(function, "__name__", "function"))
    return Network(tree, label, own, start, x.shape, traced.output.shape, difference, narrowest)


def tokens_shape(x: Tensor) -> tuple[int, int]:
    """Rows and width of an input as tokens: ``(n, d)`` with or without a batch of one; anything else is one token."""
    real = x.shape[1:] if x.dim() == 3 and x.shape[0] == 1 else x.shape
    return (real[0], real[1]) if len(real) == 2 else (1, x.numel())


def _offers(module: nn.Module) -> bool:
    """Whether a module knows its own attention map, and is no part of torch."""
    known = hasattr(module, "attention_map") or isinstance(module, MapModule)
    if not known:
        return False
    try:
        return as_attention_map(module, 4, kind=MapModule) is not None
    except HowsmoothError:
        return False


def check_still(root: nn.Module | None) -> None:
    """Refuse a network that is not a fixed function: in training mode with parts that draw or remember."""
    for place, module in () if root is None else root.named_modules():
        if module.training and isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise UnsupportedModel(f"{place}, a {type(module).__name__}, is in training mode: call .eval() first.")
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedModel(f"{place} is dropout in training mode: call .eval() first.")


def largest_difference(root: Node, own: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> float:
    """The largest relative difference between nodes and function; `UnsupportedModel` where it is more than rounding.

    Args:
        dtype: the coarsest in which the function computes; many models round to float32 inside whatever the input.
    """
    near = x + _NEAR * (1 + float(x.norm())) * _direction(x)
    if dtype not in SAME_VALUE:
        raise UnsupportedModel(
            f"this network computes in {str(dtype).removeprefix('torch.')}, too coarsely to compare with: convert it "
            "by .float()."
        )
    worst = 0.0
    for point in (x, near):
        with torch.no_grad():
            mine = _called(own, point)
            again = _called(own, point)
        if not torch.equal(mine, again):
            raise UnsupportedModel("this network gives other outputs at every call, so that it is no fixed function.")
        value, operator = root.linearize(point, 0, bounded=False)
        if not bool(mine.isfinite().all()):
            raise UnsupportedModel("the outputs of this network near this input are not finite: scale the input.")
        error = relative_error(value, mine)
        if not error <= SAME_VALUE[dtype]:
            raise UnsupportedModel(
                f"what was read of this network differs from its own output by a relative {error:.1e}, so that "
                "something in it is not what it looks like."
            )
        worst = max(worst, error)
        u = _direction(mine, "cotangent")
        with exact_autograd(x.device):
            leaf = point.detach().clone().requires_grad_()
            (expected,) = gradients(own, leaf, u, [leaf])
        pulled = operator.rmatvec(u)
        scale = max(float(expected.norm()), float(pulled.norm()))
        error = float((pulled - expected).norm()) / scale if scale > 0 else 0.0
        if not error <= SAME_DERIVATIVE[dtype]:
            raise UnsupportedModel(
                f"the derivative of what was read of this network differs from autograd's by a relative {error:.1e}: "
                "a part of it is detached from its input, or has a derivative of its own."
            )
        worst = max(worst, error)
    return worst


def gradients(
    function: Callable[[Tensor], Tensor], x: Tensor, u: Tensor, sources: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of u·f(x) in several tensors, by autograd; torch rewrites for it what works in place."""
    refusal = ""
    for own in (function, torch.func.functionalize(function, remove="mutations")):
        result = _called(own, x)
        if not result.requires_grad:
            return tuple(torch.zeros_like(one) for one in sources)
        try:
            kept = not x.is_leaf  # its own history is wanted again
            total = (result * u).sum()
            options: dict[str, Any] = {"retain_graph": kept, "allow_unused": True, "materialize_grads": True}
            return torch.autograd.grad(total, tuple(sources), **options)
        except RuntimeError as error:
            refusal = refusal or first_line(error)
    raise UnsupportedModel(f"autograd does not differentiate this network, as a comparison needs it: {refusal}.")


def _direction(like: Tensor, purpose: str = "comparison") -> Tensor:
    drawn = torch.randn(like.shape, generator=random_stream(0, purpose), dtype=torch.float64)
    return (drawn / drawn.norm()).to(like)


def _called(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run_network(function, x.clone() if not x.requires_grad else x * 1)  # some modules work in place


def run_network(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """The output of a network at x; whatever it raises as one sentence."""
    try:
        return function(x)
    except HowsmoothError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"this network does not run on this input: {first_line(error)}.") from error
