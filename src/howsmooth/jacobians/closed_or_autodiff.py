"""`jacobian`: the closed form where a map has one, automatic differentiation for every other function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from howsmooth._util.validation import Size, validated
from howsmooth.attention import as_attention_map
from howsmooth.attention.attention_map import AttentionMap, MapModule
from howsmooth.attention.composite_map import Composite
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian, attention_jacobian
from howsmooth.jacobians.cache_operator import Part, cached_jacobian
from howsmooth.jacobians.composite_operator import CompositeJacobian, composite_jacobian
from howsmooth.jacobians.function_operator import function_jacobian
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.truncated_operator import truncated_jacobian


@runtime_checkable
class OffersJacobian(Protocol):
    """A function that knows its own Jacobian."""

    def __call__(self, x: Tensor) -> Tensor:
        """The value at x."""

    def jacobian_at(self, x: Tensor, memory: int) -> JacobianOperator:
        """The Jacobian at x; ``memory``: bytes of attention weights to store."""


@validated
def jacobian(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    wrt: Part | None = None,
    memory: Size = DEFAULT_MEMORY,
    skip: float = 0.0,
) -> JacobianOperator:
    r"""The Jacobian :math:`J(x) = \partial f/\partial x` of ``f`` at ``x`` as an operator.

    Args:
        f: an attention map, an attention layer of `howsmooth.nn`, a `torch.nn.MultiheadAttention`, a network of
            nodes (`howsmooth.network`) or a part of a model (closed form), or any differentiable function or module
            (torch.func).
        x: ``(n, d)`` for one map; ``(batch, n, d)`` for one map per item of the batch.
        wrt: "queries", "keys" or "values" for the derivative in those of an attention map, as a cache holds them (see
            `howsmooth.jacobians.cache_operator`); None for that in x.
        memory: bytes of attention weights to store between products; more are recomputed tile by tile.
        skip: of an attention map, drop the tiles of smallest weight that together are at most about this share of the
            norm; the result is a `Truncated` operator with a bound on the error. 0 drops nothing.

    Returns:
        An operator with ``matvec``, ``rmatvec``, ``dense()`` and ``to_scipy()``.

    >>> import torch, howsmooth as hs
    >>> J = hs.jacobian(torch.sin, torch.zeros(2, 3))
    >>> J.matvec(torch.ones(2, 3)).sum()
    tensor(6.)
    """
    attention = as_attention_map(f, *x.shape[-2:-1], kind=MapModule)
    if skip:
        if wrt is not None or not isinstance(attention, AttentionMap):
            raise InvalidInput("only the Jacobian of an attention map in x has tiles to skip: leave skip out.")
        return truncated_jacobian(attention, x, skip, memory=memory)
    if wrt is not None:
        if not isinstance(attention, AttentionMap):
            raise InvalidInput(f"only an attention map has {wrt}, got {type(f).__name__}: leave wrt out.")
        return cached_jacobian(attention, x, wrt, memory=memory)
    if attention is not None:
        return closed_jacobian(attention, x, memory=memory)
    if isinstance(f, OffersJacobian):
        return f.jacobian_at(x, memory)
    return function_jacobian(f, x)


def closed_jacobian(
    attention: MapModule,
    x: Tensor,
    *,
    per_head: bool = False,
    reduced: bool = False,
    memory: int,
) -> AttentionJacobian | CompositeJacobian:
    """`attention_jacobian` or `composite_jacobian`, whichever the map needs."""
    if isinstance(attention, Composite):
        return composite_jacobian(attention, x, per_head=per_head, memory=memory)
    assert isinstance(attention, AttentionMap)
    return attention_jacobian(attention, x, per_head=per_head, reduced=reduced, memory=memory)
