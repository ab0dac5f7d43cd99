r"""Maps put together from parts whose derivatives are known, and the Jacobian of the whole.

A `ClosedMap` runs once and hands out its value and its Jacobian at the point: `Tokenwise` (normalisations, MLPs),
`ClosedAttention`, `Series` (one after the other) and `Parallel` (side by side, added up; with `Skip` among them a
residual). So a layer, or a whole model, is one operator, made by one forward pass. It stores a few arrays per token;
weights of attention are stored while they fit the budget and recomputed tile by tile beyond it.

**Rounding.** In float64 the bound that `howsmooth.jacobians.operator` derives for every part is carried along: part l
adds the relative error :math:`\nu_l|v_l|/|J_lv_l|` that it may make on a random vector v on its way through the map. In
float32 that would be far above what happens (sizes of layers multiply, and attention's bound exceeds its errors a
hundredfold), so there the error is measured: the map runs in float64, what its Jacobian keeps is rounded part by part
(:math:`\hat J_{32}`), and both go on with the same v,

.. math:: \text{point error} = 4\,\frac{|\hat J_{32}v - \hat J_{64}v|}{|\hat J_{64}v|} + 32\,\mathrm{eps},

which contains everything: rounded weights, slopes and products (activations are not rounded on the way). A random v is
the hard case: its image is shorter than that of the vectors the solver ends with, by about
:math:`\|J\|_F/(\sqrt N\|J\|_2)`, while errors on the way are as large. Where it exceeds `LARGEST_POINT_ERROR`, the
whole is computed in float64. This is measured, not proved (``accuracy.guarantee``), and so is the bound that float64
carries along, on one random vector; tests compare it with the norm of the whole error on every listed architecture.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import validated
from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.memory_layout import to_preferred_layout
from howsmooth.attention.stages import Chain, TokenStage
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.algebra import IdentityJacobian, Product, Sum
from howsmooth.jacobians.attention_operator import (
    DEFAULT_MEMORY,
    LARGEST_POINT_ERROR,
    attention_jacobian,
    unbounded_jacobian,
)
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, random_start, start_stream
from howsmooth.jacobians.tokenwise import TokenwiseJacobian

_SAFETY = 4.0
_SMALLEST = 32.0
"""Error in float32: this many times the difference that was measured, and this many eps."""


@runtime_checkable
class OffersJacobian(Protocol):
    """A function that knows its own Jacobian."""

    def __call__(self, x: Tensor) -> Tensor:
        """The value at x."""

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at x; ``memory``: bytes of attention weights to store."""


class ClosedMap(ABC):
    """A map of tokens ``(n, d)`` or ``(batch, n, d)`` whose Jacobian has a closed form.

    Attributes:
        attentions: how many attention maps are inside, which share the memory for weights.
    """

    attentions: int = 0

    @abstractmethod
    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        """The value at x and the Jacobian there, both in the dtype of x.

        Args:
            memory: bytes of attention weights to store.
            bounded: whether attention states a bound on its rounding, which costs about four products.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """The value alone."""
        return self.linearize(x, 0, bounded=False)[0]

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """`composed_jacobian` at x."""
        return composed_jacobian(self, x, memory)


class Tokenwise(ClosedMap):
    """Stages that see one token at a time."""

    def __init__(self, *stages: TokenStage):
        self.stages = stages

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        with torch.no_grad():
            y, chain = Chain.through(self.stages, x)
        return y, TokenwiseJacobian.at(x, chain, y.shape[-1])


class Skip(ClosedMap):
    """x ↦ x."""

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        return x, IdentityJacobian.like(x)


class ClosedAttention(ClosedMap):
    """An attention map, its value taken from what the Jacobian has computed."""

    attentions = 1

    def __init__(self, attention: AttentionMap):
        self.attention = attention

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        if bounded:
            operator = attention_jacobian(self.attention, x, memory=memory)
        else:
            operator = unbounded_jacobian(self.attention, x, memory)
        value = operator.value_at(self.attention, x)
        assert value is not None
        return value, operator


class Series(ClosedMap):
    """One map after the other; the first is the first to act."""

    def __init__(self, *maps: ClosedMap):
        flat = [each.maps if isinstance(each, Series) else (each,) for each in maps]
        self.maps: tuple[ClosedMap, ...] = tuple(each for several in flat for each in several)
        self.attentions = sum(each.attentions for each in self.maps)

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        operators = []
        for each in self.maps:
            x, operator = each.linearize(x, _share(memory, each, self.maps), bounded)
            operators.append(operator)
        return x, operators[0] if len(operators) == 1 else Product(operators[::-1])


class Parallel(ClosedMap):
    """Maps of the same tokens, added up."""

    def __init__(self, *maps: ClosedMap):
        self.maps = maps
        self.attentions = sum(each.attentions for each in maps)

    def linearize(self, x: Tensor, memory: int, bounded: bool = True) -> tuple[Tensor, JacobianOperator]:
        pairs = [each.linearize(x, _share(memory, each, self.maps), bounded) for each in self.maps]
        total = pairs[0][0]
        for value, _ in pairs[1:]:
            total = total + value
        return total, Sum([operator for _, operator in pairs])


class ComposedJacobian(Product):
    """The Jacobian of a `ClosedMap`, with what rounding does to it as a whole; build it with `composed_jacobian`.

    Attributes:
        output: the value of the map.
    """

    def __init__(
        self,
        parts: Sequence[JacobianOperator],
        error: float,
        output: Tensor,
        cached_product: tuple[Tensor, Tensor] | None = None,
    ):
        super().__init__(parts)
        self.accuracy = Accuracy(error, guarantee=Guarantee.MEASURED)
        self.output, self.cached_product = output.contiguous(), cached_product

    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
        return self.output

    def matvec(self, v: Tensor) -> Tensor:
        return super().matvec(to_preferred_layout(v))

    def rmatvec(self, u: Tensor) -> Tensor:
        return super().rmatvec(to_preferred_layout(u))

    def subset(self, index: Tensor) -> JacobianOperator | None:
        parts = [part.subset(index) for part in self.parts]
        known = [part for part in parts if part is not None]
        return ComposedJacobian(known, self.accuracy.point, self.output[index]) if len(known) == len(parts) else None


@validated
@full_precision
def composed_jacobian(f: ClosedMap, x: Tensor, memory: int = DEFAULT_MEMORY) -> ComposedJacobian:
    """The Jacobian of a composition at x, in the dtype of x (half precision in float32).

    >>> import howsmooth as hs
    >>> attention = hs.SelfAttention.random(8, heads=2)
    >>> residual = Parallel(Skip(), ClosedAttention(attention))
    >>> J = composed_jacobian(residual, torch.randn(5, 8))
    >>> J
    ComposedJacobian((5, 8) → (5, 8), closed form, float32)
    """
    check_tokens(x)
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    maps = f.maps if isinstance(f, Series) else (f,)
    operator = _in_double(maps, x, memory) if x.dtype == torch.float64 else _beside_double(maps, x, memory)
    if operator.accuracy.point > LARGEST_POINT_ERROR and operator.dtype == torch.float32:
        operator = _in_double(maps, x.double(), memory)
    if operator.accuracy.point > LARGEST_POINT_ERROR:
        raise InvalidInput(
            f"rounding in {str(operator.dtype).removeprefix('torch.')} moves this Jacobian by a relative "
            f"{operator.accuracy.point:.1g}: scale the input or the weights down."
        )
    return operator


def _in_double(maps: Sequence[ClosedMap], x: Tensor, memory: int) -> ComposedJacobian:
    """The Jacobian in float64, with the error that every part may make on a random vector."""
    operators, relative = [], 0.0
    start = v = _start(x)
    for each in maps:
        x, operator = each.linearize(x, _share(memory, each, maps))
        before, v = v, operator.matvec(v)
        ratio = _length(before) / _length(v).clamp_min(torch.finfo(v.dtype).tiny)
        relative += float((torch.as_tensor(operator.accuracy.product) * ratio.cpu()).max()) + operator.accuracy.point
        operators.append(operator)
    return ComposedJacobian(operators[::-1], relative + _SMALLEST * torch.finfo(x.dtype).eps, x, (start, v))


def _beside_double(maps: Sequence[ClosedMap], x: Tensor, memory: int) -> ComposedJacobian:
    """The operator in float64 rounded to float32, compared with it on a random vector and released part by part."""
    dtype, operators = x.dtype, []
    start = v = _start(x)
    x, v, exact_v = x.double(), to_preferred_layout(v), v.double()
    for each in maps:
        x, exact = each.linearize(x, 2 * _share(memory, each, maps), bounded=False)  # half of it when rounded
        operator = exact.rounded(dtype)
        v, exact_v = operator.matvec(v), exact.matvec(exact_v)
        operators.append(operator)
        del exact
    lengths = _length(exact_v).clamp_min(torch.finfo(torch.float64).tiny)
    relative = _SAFETY * float((_length(v.double() - exact_v) / lengths).max())
    return ComposedJacobian(operators[::-1], relative + _SMALLEST * torch.finfo(dtype).eps, x.to(dtype), (start, v))


def _start(x: Tensor) -> Tensor:
    """The vector that a measurement at x starts from."""
    return random_start(math.prod(x.shape[:-2]), math.prod(x.shape[-2:]), x, start_stream()).reshape(x.shape)


def _share(memory: int, one: ClosedMap, maps: Sequence[ClosedMap]) -> int:
    """The share of the memory for one of the maps."""
    return memory * one.attentions // max(1, sum(each.attentions for each in maps))


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v.double(), dim=(-2, -1))
