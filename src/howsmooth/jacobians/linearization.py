"""The graph of v ↦ Jv, traced once in forward mode, with everything that does not depend on v computed beforehand.

``torch.func.linearize`` [1]_ does the same, and is wrong where f writes into a tensor. It traces f at a dual number
x + εv and folds the graph: every operation whose inputs do not depend on v runs once, and a clone of its result stays.
A write (``copy_``, ``add_``, ``out[...] = …``) has an effect, so it is not folded and runs with every product. So an
operation that reads the written tensor runs before the write, and reads what the memory held: ::

    out = h.new_empty(h.shape)      # folded: memory as it was found
    out[:, :k].copy_(h[:, :k])      # with every product, into the clone of a slice, which nothing reads
    out[:, k:].copy_(h[:, k:])
    return out.sin()                # folded: cos(out), of memory that nothing has written

Memory that an earlier run of f has given back often holds the right numbers, so that the derivative is right, NaN or
another finite number by chance. Here a tensor that is written into is not folded, nor is anything made from it: these
operations run with every product, in the order of f.

.. [1] torch 2.13: ``make_fx``, then ``torch.fx.experimental.const_fold.split_const_subgraphs``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.fx.experimental.const_fold import split_const_subgraphs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from howsmooth._util.torch_globals import without_sources
from howsmooth.errors import NotDifferentiable

Map = Callable[[Tensor], Tensor]


def linearized(f: Map, x: Tensor) -> Map:
    """v ↦ Jv as one graph: no product runs f again.

    >>> double = linearized(lambda x: torch.empty_like(x).copy_(x).square(), torch.ones(2))
    >>> double(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """

    def tangent(v: Tensor) -> Tensor:
        with forward_ad.dual_level():
            value, pushed = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v)))
            return torch.zeros_like(value) if pushed is None else pushed

    with without_sources(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folding warns of the attributes that it makes itself
        graph = make_fx(tangent)(torch.zeros_like(x))
        kept_in_order = written_tensors(graph, torch.zeros_like(x))
        if any(node.op == "get_attr" for node in kept_in_order):
            raise NotDifferentiable("f writes into a tensor that it did not create: copy it inside f.")
        folded = split_const_subgraphs(graph, skip_folding_node_fn=lambda node: node in kept_in_order)

    def push(v: Tensor) -> Tensor:
        result = folded(v)
        return result if isinstance(result, Tensor) else result[0]

    return push


def written_tensors(graph: fx.GraphModule, *inputs: Tensor) -> set[fx.Node]:
    """The nodes of a graph whose result shares memory with a tensor that some operation writes into.

    >>> def f(v):
    ...     out = torch.zeros(3)
    ...     out[1:].copy_(v)
    ...     return out * out
    >>> sorted(node.name for node in written_tensors(make_fx(f)(torch.ones(2)), torch.ones(2)))
    ['copy_', 'slice_1', 'zeros']
    """
    writes = {node: _written(node) for node in graph.graph.nodes}
    if not any(writes.values()):
        return set()
    memory = _Memory(graph)
    memory.run(*inputs)
    written = set().union(*(memory.of[node] for nodes in writes.values() for node in nodes))
    return {node for node, places in memory.of.items() if not written.isdisjoint(places)}


class _Memory(fx.Interpreter):
    """Runs a graph and notes the memory of every result; all results are held, so that no memory is used twice."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph, garbage_collect_values=False)
        self.of: dict[fx.Node, set[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
        self.of[n] = {tensor.untyped_storage()._cdata for tensor in tensors} if n.op != "output" else set()
        return result


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes into, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written: list[Any] = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, fx.Node)]
