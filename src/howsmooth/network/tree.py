"""From values to nodes: the network as a tree, residuals and branches where values meet again.

A value with several parents is a sum, product or attention of branches that start at the last value through which all
paths to it lead (its immediate dominator). Then neighbours are joined: stages on single tokens become one node, a
linear map behind attention its output projection, a gate and what it opens one activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.attention.stages import TokenStage
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation
from howsmooth.network.activations import activation
from howsmooth.network.nodes import (
    Attend,
    Beside,
    MixTokens,
    Multiply,
    Node,
    Parallel,
    Rearrange,
    Series,
    Skip,
    Tokenwise,
    Unread,
)
from howsmooth.network.values import (
    Attended,
    AttendedApart,
    Combined,
    Given,
    Mixed,
    Multiplied,
    Staged,
    Unknown,
    Value,
    Values,
    common_row,
    common_value,
)

MOST_NODES = 20_000
"""More nodes than any transformer has: values that many branches share are written out for each."""


def tree_of(values: Values, given: Value, output: Value) -> Node:
    """The network from the input to a value."""
    return _Tree(values, given).between(output, given)


class _Tree:
    def __init__(self, values: Values, given: Value):
        self.given, self.nodes = given, 0
        self.dominator: dict[Value, Value] = {given: given}
        self.depth: dict[Value, int] = {given: 0}
        for value in values.every:
            parents = [parent for parent in value.parents if parent in self.dominator]
            if value is given or not parents:
                continue
            nearest = parents[0]
            for parent in parents[1:]:
                nearest = self._meeting(nearest, parent)
            self.dominator[value], self.depth[value] = nearest, self.depth[nearest] + 1

    def _meeting(self, one: Value, other: Value) -> Value:
        while one is not other:
            if self.depth[one] >= self.depth[other]:
                one = self.dominator[one]
            else:
                other = self.dominator[other]
        return one

    def between(self, target: Value, source: Value) -> Node:
        """The map from one value to another that depends on the input through it alone."""
        steps: list[Node] = []
        while target is not source:
            self.nodes += 1
            if self.nodes > MOST_NODES:
                raise UnsupportedModel(f"this network has more than {MOST_NODES} parts.")
            before = self.dominator[target]
            branches = [self.between(parent, before) for parent in target.parents]
            steps.append(_step(target, branches, before))
            target = before
        return joined(steps[::-1])


def _step(value: Value, branches: Sequence[Node], before: Value) -> Node:
    """The node that makes a value of the value before it."""
    place = value.place
    match value.made:
        case Staged(stage):
            return Tokenwise(stage, place=place)
        case Attended(attention):
            return Attend(attention, place)
        case AttendedApart(attention):
            return joined([Beside(*branches, place=place), Attend(attention, place)])
        case Mixed(matrix):
            return MixTokens(matrix, place)
        case Multiplied():
            one, other = branches
            return _gate(one, other, place) or Multiply(one, other, place=place)
        case Unknown(operation, function):
            return Unread(operation, _of_branches(function, branches), place)
        case Combined():
            return _sum(value, value.made, branches)
        case Given():
            raise AssertionError("the input is where the tree begins")


def _of_branches(function: Callable[..., Tensor], branches: Sequence[Node]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(*(branch(x) for branch in branches))


def _sum(value: Value, made: Combined, branches: Sequence[Node]) -> Node:
    terms = [
        joined([branch, _rearranged(parent, index, factor, value)])
        for parent, branch, index, factor in zip(value.parents, branches, made.indices, made.factors, strict=True)
    ]
    shift = made.constant
    if len(terms) > 1:
        node: Node = Parallel(*terms, place=value.place)
    else:
        (node,) = terms
    if shift is None:
        return node
    if len(terms) == 1 and isinstance(node, Rearrange) and node.constant is None:
        return Rearrange(node.index, node.factor, shift, value.place)
    row = common_row(shift)
    if row is not None:
        return joined([node, Tokenwise(Diagonal(1.0, row), place=value.place)])
    return joined([node, Rearrange(torch.arange(shift.numel()).reshape(shift.shape), None, shift, value.place)])


def _rearranged(parent: Value, index: Tensor, factor: Tensor | None, value: Value) -> Node:
    same = (parent.rows, parent.width) == (value.rows, value.width)
    if same and torch.equal(index.reshape(-1), torch.arange(index.numel())):
        if factor is None:
            return Skip()
        alike, row = common_value(factor), common_row(factor)
        if alike is not None or row is not None:
            return Tokenwise(Diagonal(row if alike is None else alike), place=value.place)  # type: ignore[arg-type]
    return Rearrange(index, factor, None, value.place)


def joined(nodes: Sequence[Node]) -> Node:
    """Nodes one after the other, with neighbours joined."""
    flat: list[Node] = []
    for node in nodes:
        for one in node.nodes if isinstance(node, Series) else (node,):
            if isinstance(one, Skip):
                continue
            together = _together(flat[-1], one) if flat else None
            if together is None:
                flat.append(one)
            else:
                flat[-1] = together
    if not flat:
        return Skip()
    named = [_with_names(one) if isinstance(one, Tokenwise) else one for one in flat]
    return named[0] if len(named) == 1 else Series(*named)


def _together(one: Node, other: Node) -> Node | None:
    """Two neighbours as one node, where they are one."""
    if isinstance(one, Tokenwise) and isinstance(other, Tokenwise):
        place = _common(one.place, other.place)
        return Tokenwise(*one.stages, *other.stages, place=place, places=(*one.places, *other.places))
    first = other.stages[0] if isinstance(other, Tokenwise) else None
    if isinstance(one, Attend) and isinstance(first, Affine) and isinstance(other, Tokenwise):
        attention = _with_output(one.attention, first)
        rest = other.stages[1:]
        if attention is not None:
            attend = Attend(attention, one.place)
            return Series(attend, Tokenwise(*rest, place=other.place, places=other.places[1:])) if rest else attend
    return None


def _common(one: str, other: str) -> str:
    """The module that holds two places."""
    both = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        both.append(a)
    return ".".join(both)


def _with_output(
    attention: AttentionMap | ComposedAttention, output: Affine
) -> AttentionMap | ComposedAttention | None:
    """Attention whose heads stand side by side, with an output projection."""
    inner = attention.attention if isinstance(attention, ComposedAttention) else attention
    heads, width, wide = inner.output_weight.shape
    eye = torch.eye(heads * width, dtype=inner.output_weight.dtype).reshape(heads, width, -1)
    if wide != heads * width or inner.output_bias is not None or not torch.equal(inner.output_weight, eye):
        return None
    weight = output.weight.T.reshape(heads, width, -1).to(inner.output_weight.dtype)
    changed = inner.replace(output_weight=weight, output_bias=output.bias)
    return attention.replace(attention=changed) if isinstance(attention, ComposedAttention) else changed


def _with_names(node: Tokenwise) -> Tokenwise:
    """The same stages with activations by their names, several in a row as one."""
    made: list[tuple[TokenStage, str]] = []
    for stage, place in zip(node.stages, node.places, strict=True):
        if isinstance(stage, Activation) and not stage.name:
            if made and isinstance(made[-1][0], Activation):
                inner, outer = made.pop()[0].function, stage.function
                stage = Activation(lambda t, inner=inner, outer=outer: outer(inner(t)))  # type: ignore[misc]
            stage = named_activation(stage)
        made.append((stage, place))
    return Tokenwise(*(stage for stage, _ in made), place=node.place, places=[place for _, place in made])


_SAMPLES = torch.cat(
    [torch.linspace(-30, 30, 961), torch.tensor([-1e30, -1e9, -1e5, -1e3, -77.7, 55.5, 1e3, 1e5, 1e9, 1e30])]
).double()


def named_activation(stage: Activation) -> Activation:
    """The activation with its name, where it is one of `howsmooth.network.activations`."""
    with torch.no_grad(), suppress(InvalidInput):
        known = activation(stage.function)
        mine, its = stage.function(_SAMPLES.clone()), known.function(_SAMPLES)
        if torch.allclose(mine, its, rtol=1e-12, atol=1e-13):
            return Activation(known.function, known.name)
    return stage


def _gate(one: Node, other: Node, place: str) -> Node | None:
    """A gated MLP: an activation of one linear map of the tokens times another linear map of them."""
    for opened, plain in ((one, other), (other, one)):
        if not isinstance(opened, Tokenwise) or not isinstance(plain, Tokenwise):
            continue
        *linear, last = opened.stages
        if not isinstance(last, Activation) or len(linear) != 1 or len(plain.stages) != 1:
            continue
        gate, up = linear[0], plain.stages[0]
        if not isinstance(gate, Affine) or not isinstance(up, Affine) or (gate.bias is None) != (up.bias is None):
            continue
        bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
        inner = Affine(_stacked(gate.weight, up.weight), bias)
        return Tokenwise(inner, GatedActivation(last.function, last.name), place=place)
    return None


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    """Two matrices one above the other; two halves of one matrix are that matrix."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    follows = second.storage_offset() == first.storage_offset() + math.prod(first.shape)
    if same and follows and first.is_contiguous() and second.is_contiguous() and not first.requires_grad:
        shape = (len(first) + len(second), first.shape[1])
        return torch.as_strided(first, shape, first.stride(), first.storage_offset())
    return torch.cat([first, second])
