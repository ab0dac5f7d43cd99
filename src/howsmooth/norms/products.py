"""Products of a Jacobian with flat vectors, counted and able to lose maps that are finished."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator

CHUNK_BYTES = 2**26


def rounding_allowance(dtype: torch.dtype, products: int, blur: float = 0.0) -> float:
    """Relative allowance for rounding in a norm found through this many products: 8 √products · eps(dtype) + 2 blur.

    A run of m products is exact for a nearby operator J + E. Every product brings a relative error of a few eps, and
    m such errors in orthogonal directions add up to ‖E‖ ≤ ‖E‖_F ≈ few · √m · eps · ‖J‖. By Weyl's inequality no
    singular value moves by more than ‖E‖, so a bound for J + E widened by this much is a bound for J. The operator
    itself may be that of a point nearby (`JacobianOperator.blur`).

    >>> rounding_allowance(torch.float64, 4) == 16 * torch.finfo(torch.float64).eps
    True
    """
    return 8 * math.sqrt(products) * torch.finfo(dtype).eps + 2 * blur


def random_stream(seed: int, purpose: str) -> torch.Generator:
    """Random numbers for one purpose, unrelated to what ``torch.manual_seed(seed)`` or another purpose would draw.

    The certificate needs a start that has nothing to do with the operator. With the seed itself, the start would be the
    very input of someone who wrote ``torch.manual_seed(0); x = torch.randn(n, d)`` and left ``seed=0``.

    >>> plain = torch.randn(4, generator=torch.Generator().manual_seed(0))
    >>> torch.equal(plain, torch.randn(4, generator=random_stream(0, "start")))
    False
    """
    digest = hashlib.sha256(f"howsmooth {purpose} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


class FlatProducts:
    """J and Jᵀ on tensors ``(maps, in_size)`` and ``(maps, out_size)``, for the maps of the batch still wanted.

    Attributes:
        maps: positions, in the flattened batch, of the maps still wanted.
        count: products made so far; one J v or one Jᵀ u over all maps still wanted counts as one.
    """

    def __init__(self, op: JacobianOperator):
        if op.batch_size == 0 or op.in_size == 0 or op.out_size == 0:
            raise InvalidInput(f"{op!r} has no entries: give at least one map with at least one coordinate.")
        if op.dtype not in (torch.float32, torch.float64):
            raise InvalidInput(f"Norms need float32 or float64 products, not {op.dtype}: convert the input first.")
        self.op = op
        self.maps = torch.arange(op.batch_size)
        self.count = 0
        self._subset: JacobianOperator | None = None

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true; they are cut out of the operator when it can do that."""
        self.maps = self.maps[mask]
        self._subset = self.op.subset(self.maps.to(self.op.device))

    def matvec(self, v: Tensor) -> Tensor:
        """J v for the maps still wanted: ``(maps, in_size)`` → ``(maps, out_size)``."""
        return self._apply(v, forward=True)

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀ u for the maps still wanted: ``(maps, out_size)`` → ``(maps, in_size)``."""
        return self._apply(u, forward=False)

    def _apply(self, x: Tensor, forward: bool) -> Tensor:
        self.count += 1
        op = self.op if self._subset is None else self._subset
        shape = op.in_shape if forward else op.out_shape
        whole = len(self.maps) == op.batch_size
        if not whole:  # the operator cannot be cut: the finished maps get zero vectors
            x = x.new_zeros(op.batch_size, x.shape[-1]).index_copy_(0, self.maps.to(x.device), x)
        x = x.reshape(*op.batch_shape, *shape)
        y = (op.matvec(x) if forward else op.rmatvec(x)).reshape(op.batch_size, -1)
        return y if whole else y[self.maps.to(y.device)]


def entry_blocks(op: JacobianOperator) -> Iterator[tuple[bool, Tensor]]:
    """All entries of J block by block, in float64: pairs (by_columns, block).

    A block has shape ``(lines, maps, length)``, its lines being columns of J when ``by_columns`` and rows otherwise:
    whichever costs less (`JacobianOperator.line_costs`).
    """
    rows_cost, columns_cost = op.line_costs()
    by_columns = columns_cost <= rows_cost
    lines, length = (op.in_size, op.out_size) if by_columns else (op.out_size, op.in_size)
    chunk = max(1, CHUNK_BYTES // (8 * op.batch_size * length))
    for index in torch.arange(lines, device=op.device).split(chunk):
        block = op.columns(index) if by_columns else op.rows(index)
        block = block.reshape(len(index), op.batch_size, length).double()
        if not bool(torch.isfinite(block).all()):
            raise not_finite(op)
        yield by_columns, block


def not_finite(op: JacobianOperator) -> InvalidInput:
    """The error for an operator whose products are NaN or infinite."""
    return InvalidInput(
        f"{op!r} returned NaN or infinite values: check the input and the weights, or use a wider dtype."
    )
