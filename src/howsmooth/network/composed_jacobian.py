r"""The Jacobian of a network of nodes as one operator, with what rounding does to it as a whole.

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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import validated
from howsmooth.attention.memory_layout import to_preferred_layout
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.algebra import Product
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, LARGEST_POINT_ERROR
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, random_start, start_stream
from howsmooth.network.nodes import Node, Series, share

_SAFETY = 4.0
_SMALLEST = 32.0
"""Error in float32: this many times the difference that was measured, and this many eps."""


class ComposedJacobian(Product):
    """The Jacobian of a `Node`, with what rounding does to it as a whole; build it with `composed_jacobian`.

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
def composed_jacobian(f: Node, x: Tensor, memory: int = DEFAULT_MEMORY) -> ComposedJacobian:
    """The Jacobian of a composition at x, in the dtype of x (half precision in float32).

    >>> import howsmooth as hs
    >>> from howsmooth.network.nodes import Attend, Parallel, Skip
    >>> attention = hs.SelfAttention.random(8, heads=2)
    >>> residual = Parallel(Skip(), Attend(attention))
    >>> J = composed_jacobian(residual, torch.randn(5, 8))
    >>> J
    ComposedJacobian((5, 8) → (5, 8), closed form, float32)
    """
    check_tokens(x)
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    maps = f.nodes if isinstance(f, Series) else (f,)
    operator = _in_double(maps, x, memory) if x.dtype == torch.float64 else _beside_double(maps, x, memory)
    if operator.accuracy.point > LARGEST_POINT_ERROR and operator.dtype == torch.float32:
        operator = _in_double(maps, x.double(), memory)
    if operator.accuracy.point > LARGEST_POINT_ERROR:
        raise InvalidInput(
            f"rounding in {str(operator.dtype).removeprefix('torch.')} moves this Jacobian by a relative "
            f"{operator.accuracy.point:.1g}: scale the input or the weights down."
        )
    return operator


def _in_double(maps: Sequence[Node], x: Tensor, memory: int) -> ComposedJacobian:
    """The Jacobian in float64, with the error that every part may make on a random vector."""
    operators, relative = [], 0.0
    start = v = _start(x)
    for each in maps:
        x, operator = each.linearize(x, share(memory, each, maps))
        before, v = v, operator.matvec(v)
        ratio = _length(before) / _length(v).clamp_min(torch.finfo(v.dtype).tiny)
        relative += float((torch.as_tensor(operator.accuracy.product) * ratio.cpu()).max()) + operator.accuracy.point
        operators.append(operator)
    return ComposedJacobian(operators[::-1], relative + _SMALLEST * torch.finfo(x.dtype).eps, x, (start, v))


def _beside_double(maps: Sequence[Node], x: Tensor, memory: int) -> ComposedJacobian:
    """The operator in float64 rounded to float32, compared with it on a random vector and released part by part."""
    dtype, operators = x.dtype, []
    start = v = _start(x)
    x, v, exact_v = x.double(), to_preferred_layout(v), v.double()
    for each in maps:
        x, exact = each.linearize(x, 2 * share(memory, each, maps), bounded=False)  # half of it when rounded
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


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v.double(), dim=(-2, -1))
