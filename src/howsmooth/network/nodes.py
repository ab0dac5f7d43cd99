r"""The nodes of a network: maps of tokens, each of which knows its value, its Jacobian and how to describe itself.

A `Node` maps tokens ``(n, d)``, or a batch of them, to tokens. `Tokenwise` holds stages on single tokens (linear maps,
normalisations, activations, gates), `Attend` an attention map; `Series` puts nodes one after the other and `Parallel`
adds up what several make of the same tokens, `Skip` among them for a residual. `Rearrange` moves numbers about,
`MixTokens` sums tokens, `Beside` and `Multiply` join what several nodes make. `Unread` is an operation of which nothing
but its name and function is known.

`Node.linearize` is one interpretation: a layer, or a whole model, becomes one operator, made by one forward pass that
stores a few arrays per token (`howsmooth.network.composed_jacobian`). Bounds and proofs are interpretations in
their own packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.attention.stages import Chain, TokenStage
from howsmooth.jacobians.algebra import IdentityJacobian, Product, Sum
from howsmooth.jacobians.attention_operator import attention_jacobian, unbounded_jacobian
from howsmooth.jacobians.closed_or_autodiff import closed_jacobian
from howsmooth.jacobians.function_operator import function_jacobian
from howsmooth.jacobians.linear_moves import MixJacobian, MoveJacobian
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.tokenwise import Slopes, TokenwiseJacobian

Map = AttentionMap | ComposedAttention


class Node(ABC):
    """A map of tokens ``(n, d)`` or ``(batch, n, d)`` whose Jacobian is known.

    Attributes:
        place: the dotted path of the module that it was read of, "" where there is none.
        attentions: how many attention maps are inside, which share the memory for weights.
    """

    place: str = ""
    attentions: int = 0

    @abstractmethod
    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        """The value at x and the Jacobian there, both in the dtype of x.

        Args:
            memory: bytes of attention weights to store.
            bounded: whether attention states a bound on its rounding, which costs about four products.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """The value alone, differentiable in x and in the weights."""
        return self.linearize(x, 0, bounded=False)[0]

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes inside."""
        return ()

    def walk(self) -> Iterator[Node]:
        """This node and all inside it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at x, with what rounding does to it as a whole."""
        from howsmooth.network.composed_jacobian import composed_jacobian

        return composed_jacobian(self, x, memory)


class Skip(Node):
    """x ↦ x."""

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        return x, IdentityJacobian.like(x)

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Tokenwise(Node):
    """Stages that see one token at a time.

    Attributes:
        places: of every stage.
    """

    def __init__(self, *stages: TokenStage, place: str = "", places: Sequence[str] | None = None):
        self.stages, self.place = stages, place
        self.places = (place,) * len(stages) if places is None else tuple(places)

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        with torch.no_grad():
            y, chain = Chain.through(self.stages, x)
        return y, TokenwiseJacobian.at(x, chain, y.shape[-1])

    def __call__(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Attend(Node):
    """An attention map, its value taken from what the Jacobian has computed."""

    attentions = 1

    def __init__(self, attention: Map, place: str = ""):
        self.attention, self.place = attention, place

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        if not isinstance(self.attention, AttentionMap):
            operator = closed_jacobian(self.attention, x, memory=memory)
            return self.attention.to(x.dtype)(x), operator
        if bounded:
            operator = attention_jacobian(self.attention, x, memory=memory)
        else:
            operator = unbounded_jacobian(self.attention, x, memory)
        value = operator.value_at(self.attention, x)
        assert value is not None
        return value, operator

    def __call__(self, x: Tensor) -> Tensor:
        return self.attention.in_dtype(x.dtype)(x)


class Series(Node):
    """One node after the other; the first is the first to act."""

    def __init__(self, *nodes: Node, place: str = ""):
        flat = [each.nodes if isinstance(each, Series) else (each,) for each in nodes]
        self.nodes: tuple[Node, ...] = tuple(each for several in flat for each in several)
        self.attentions, self.place = sum(each.attentions for each in self.nodes), place

    @property
    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        operators = []
        for each in self.nodes:
            x, operator = each.linearize(x, share(memory, each, self.nodes), bounded)
            operators.append(operator)
        return x, operators[0] if len(operators) == 1 else Product(operators[::-1])

    def __call__(self, x: Tensor) -> Tensor:
        for each in self.nodes:
            x = each(x)
        return x


class _Several(Node):
    """Nodes on the same tokens."""

    def __init__(self, *nodes: Node, place: str = ""):
        self.nodes, self.place = nodes, place
        self.attentions = sum(each.attentions for each in nodes)

    @property
    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def _pairs(self, x: Tensor, memory: int, bounded: bool) -> list[tuple[Tensor, JacobianOperator]]:
        return [each.linearize(x, share(memory, each, self.nodes), bounded) for each in self.nodes]


class Parallel(_Several):
    """Nodes on the same tokens, added up."""

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        pairs = self._pairs(x, memory, bounded)
        total = pairs[0][0]
        for value, _ in pairs[1:]:
            total = total + value
        return total, Sum([operator for _, operator in pairs])

    def __call__(self, x: Tensor) -> Tensor:
        total = self.nodes[0](x)
        for each in self.nodes[1:]:
            total = total + each(x)
        return total


class Beside(_Several):
    """Nodes on the same tokens, whose numbers stand side by side in each token."""

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        pairs = self._pairs(x, memory, bounded)
        value = torch.cat([one for one, _ in pairs], -1)
        n, width = value.shape[-2:]
        whole, start, parts = torch.full((n, width), -1), 0, list[JacobianOperator]()
        for one, operator in pairs:
            own = one.shape[-1]
            index = whole.clone()
            index[:, start : start + own] = torch.arange(n * own).reshape(n, own)
            start += own
            parts.append(Product([MoveJacobian(one, index), operator]))
        return value, Sum(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.nodes], -1)


class Multiply(_Several):
    """Two nodes on the same tokens, whose numbers are multiplied."""

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        (one, first), (two, second) = self._pairs(x, memory, bounded)
        scale = lambda y, by: TokenwiseJacobian.at(y, Chain((Slopes(by),)), y.shape[-1])  # noqa: E731
        return one * two, Sum([Product([scale(one, two), first]), Product([scale(two, one), second])])

    def __call__(self, x: Tensor) -> Tensor:
        return self.nodes[0](x) * self.nodes[1](x)


class Rearrange(Node):
    """Numbers of the input at other places: y = factor · x.flat[index] (−1: nothing) + constant.

    Class tokens, patches, a first token, transposed or repeated tokens and position embeddings are of this kind.
    """

    def __init__(self, index: Tensor, factor: Tensor | None = None, constant: Tensor | None = None, place: str = ""):
        self.index, self.factor, self.constant, self.place = index, factor, constant, place

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        return self(x), MoveJacobian(x, self.index, self.factor)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        y = flat[..., self.index.clamp_min(0)]
        if bool((self.index < 0).any()):
            y = torch.where(self.index < 0, torch.zeros((), dtype=y.dtype), y)
        y = y if self.factor is None else y * self.factor.to(y)
        return y if self.constant is None else y + self.constant.to(y)


class MixTokens(Node):
    """y = M x: every token of the output is a sum of tokens, such as their mean."""

    def __init__(self, matrix: Tensor, place: str = ""):
        self.matrix, self.place = matrix, place

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        return self(x), MixJacobian(x, self.matrix.detach().to(x))

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix.to(x) @ x


class Unread(Node):
    """An operation, or part of a network, that automatic differentiation has to take care of.

    Attributes:
        operation: its name. function: of the tokens.
    """

    def __init__(self, operation: str, function: Callable[[Tensor], Tensor], place: str = ""):
        self.operation, self.function, self.place = operation, function, place

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        operator = function_jacobian(self._of_items if x.dim() == 3 else self.function, x)
        return operator.output, operator

    def _of_items(self, x: Tensor) -> Tensor:
        return torch.stack([self.function(item) for item in x])

    def __call__(self, x: Tensor) -> Tensor:
        return self._of_items(x) if x.dim() == 3 else self.function(x)

    def __str__(self) -> str:
        return f"{self.operation} in {self.place}" if self.place else self.operation


def share(memory: int, one: Node, nodes: Sequence[Node]) -> int:
    """The share of the memory for one of the nodes."""
    return memory * one.attentions // max(1, sum(each.attentions for each in nodes))
