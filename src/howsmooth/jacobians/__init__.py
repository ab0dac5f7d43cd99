"""Jacobian operators: closed forms for attention, torch.func for everything else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from howsmooth.attention import as_attention
from howsmooth.checks import Size, door
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.algebra import IdentityJacobian, Product, Sum
from howsmooth.jacobians.attention import DEFAULT_MEMORY, AttentionJacobian, attention_jacobian
from howsmooth.jacobians.cached import CachedJacobian, Part, cached_jacobian
from howsmooth.jacobians.composed import ClosedMap, ComposedJacobian, OffersJacobian, composed_jacobian
from howsmooth.jacobians.function import FunctionJacobian, function_jacobian
from howsmooth.jacobians.operator import JacobianOperator, MatrixOperator

__all__ = [
    "DEFAULT_MEMORY",
    "AttentionJacobian",
    "CachedJacobian",
    "ClosedMap",
    "ComposedJacobian",
    "FunctionJacobian",
    "IdentityJacobian",
    "JacobianOperator",
    "MatrixOperator",
    "Product",
    "Sum",
    "as_attention",
    "attention_jacobian",
    "cached_jacobian",
    "composed_jacobian",
    "function_jacobian",
    "jacobian",
]


@door
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
        f: an attention map, an attention layer of `howsmooth.nn`, a `torch.nn.MultiheadAttention`, a composition of
            such (`ClosedMap`) or a part of a listed model (closed form), or any differentiable function or module
            (torch.func).
        x: ``(n, d)`` for one map; ``(batch, n, d)`` for one map per item of the batch.
        wrt: "queries", "keys" or "values" for the derivative in those of an attention map, as a cache holds them (see
            `howsmooth.jacobians.cached`); None for that in x.
        memory: bytes of attention weights to keep between products; more are recomputed tile by tile.
        skip: of an attention map, leave tiles out whose weights are all below this, and say by how much that can move
            the map (`JacobianOperator.left_out`); 0 leaves nothing out.

    Returns:
        An operator with ``matvec``, ``rmatvec``, ``dense()`` and ``to_scipy()``.

    >>> import torch, howsmooth as hs
    >>> J = hs.jacobian(torch.sin, torch.zeros(2, 3))
    >>> J.matvec(torch.ones(2, 3)).sum()
    tensor(6.)
    """
    attention = as_attention(f, *x.shape[-2:-1])
    if skip and (attention is None or wrt is not None):
        raise InvalidInput("only the Jacobian of an attention map in x has tiles to skip: leave skip out.")
    if wrt is not None:
        if attention is None:
            raise InvalidInput(f"only an attention map has {wrt}, got {type(f).__name__}: leave wrt out.")
        return cached_jacobian(attention, x, wrt, memory=memory)
    if attention is not None:
        return attention_jacobian(attention, x, memory=memory, skip=skip)
    if isinstance(f, OffersJacobian):
        return f.jacobian_at(x, memory)
    return function_jacobian(f, x)
