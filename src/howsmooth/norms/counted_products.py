"""Products of a Jacobian with flat vectors: counted, scaled, and restricted to the maps that still run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator

CHUNK_BYTES = 2**26
_SHORT_SUM = 2**14

# Largest shift of a vector, and the lengths of a product that need none, as powers of two: squares of what lies between
# them, of what remains of it under cancellation, and of its inverse are far from overflow and underflow.
_REACH = {torch.float32: 60, torch.float64: 500}
_PLAIN = {torch.float32: 50, torch.float64: 300}


def product_error(op: JacobianOperator) -> Tensor:
    """The absolute error of a product with a unit vector (`Accuracy.product`), float64, ``(batch_size,)``.

    >>> from howsmooth.jacobians.operator import Accuracy, MatrixOperator
    >>> op = MatrixOperator(torch.eye(2).expand(3, 2, 2), Accuracy(product=torch.tensor([0.0, 0.5, 1.0])))
    >>> [round(x, 6) for x in product_error(op).tolist()]
    [0.0, 0.5, 1.0]
    """
    stated = torch.as_tensor(op.accuracy.product, dtype=torch.float64).detach().cpu()
    bound = stated.expand(op.batch_shape).flatten()
    if not (bound >= 0).all():
        raise InvalidInput(f"{op!r} states a rounding error that is negative or NaN: it must be a bound, 0 or more.")
    return bound


def entries_error(op: JacobianOperator, norm: float | str, value: Tensor) -> Tensor:
    """The absolute error of a norm taken from the entries, by cancellation and underflow, per map.

    The entries come as lines of J (columns, or rows, whichever cost less), each with an error of length ε. All lines
    together are off by ‖E‖₂ ≤ ‖E‖_F ≤ √lines·ε, and by ‖E‖₂ ≤ (1 + √lines·s)·ε when only a share s of every error can
    lie along a given direction (`Accuracy.alignment`). A sum Σ|·| over one line is off by √length·ε; with ε in every
    line, across lines by lines·ε. A map that vanishes altogether (``value`` 0) is zero, unless the operator states an
    error.

    >>> from howsmooth.jacobians.operator import Accuracy, MatrixOperator
    >>> op = MatrixOperator(torch.ones(9, 4), Accuracy(product=0.5))
    >>> [round(float(entries_error(op, norm, torch.ones(1))), 6) for norm in (2, "fro", 1, math.inf)]
    [1.0, 1.0, 1.5, 2.0]
    """
    info = torch.finfo(op.dtype)
    by_columns, lines, length = _lines(op)
    end_of_dtype = 4 * info.tiny * info.eps * math.sqrt(length)
    one = product_error(op) + torch.where(value.flatten() > 0, end_of_dtype, 0.0)
    if norm == 2:
        return min(math.sqrt(lines), 1 + math.sqrt(lines) * op.accuracy.alignment) * one
    if norm == "fro":
        return math.sqrt(lines) * one
    along = (norm == 1) == by_columns
    return (math.sqrt(length) if along else lines) * one


def power_of_two(size: Tensor) -> Tensor:
    """The power of two next to each size, by which it can be divided without rounding; 1 for 0.

    >>> power_of_two(torch.tensor([1e-300, 0.0, 3.0], dtype=torch.float64)).log2().tolist()
    [-996.0, 0.0, 2.0]
    """
    _, exponent = torch.frexp(size.double())
    return torch.exp2(exponent.double().clamp(-1000, 1000))


def harmless_scale(size: Tensor, dtype: torch.dtype) -> Tensor:
    """A ``scale`` of `FlatProducts` for maps of about this size: 1, unless that is near the ends of the dtype."""
    plain = 2.0 ** _PLAIN[dtype]
    return torch.where((size > plain) | (size < 1 / plain), power_of_two(size), 1.0)


def rounding_allowance(dtype: torch.dtype, products: int, point_error: float = 0.0) -> float:
    """Relative allowance for rounding in a norm found through this many products: 8 √products · eps + 2 point error.

    A run of m products is exact for a nearby operator J + E. Every product brings a relative error of a few eps, and
    m such errors in orthogonal directions add up to ‖E‖ ≤ ‖E‖_F ≈ few · √m · eps · ‖J‖. By Weyl's inequality no
    singular value moves by more than ‖E‖, so a bound for J + E widened by this much is a bound for J. The operator
    itself may be that of a point nearby (`Accuracy.point`).

    This is a model of rounding, errors independent of mean zero, and no worst case: n roundings that all go one way
    add up to n·eps where the model allows √n·eps. Every norm of this package is widened by it, those from the entries
    and by LAPACK's decompositions too, so that no end of a measurement is `Guarantee.PROVED`.

    >>> rounding_allowance(torch.float64, 4) == 16 * torch.finfo(torch.float64).eps
    True
    """
    return 8 * math.sqrt(products) * torch.finfo(dtype).eps + 2 * point_error


def widened(value: Tensor, allowance: float, error: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of a value known up to a relative and an absolute error.

    >>> one = torch.ones(2, dtype=torch.float64)
    >>> [end.tolist() for end in widened(one, 0.25, torch.tensor([0.25, 2.0]))]
    [[0.5, 0.0], [1.5, 3.25]]
    """
    return (value * (1 - allowance) - error).clamp_min(0), value * (1 + allowance) + error


def entry_ends(op: JacobianOperator, norm: float | str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of a norm taken from the entries, one value per map: `widened` by all that rounding may have done."""
    allowance = rounding_allowance(op.dtype, min(op.in_size, op.out_size), op.accuracy.point)
    return widened(value, allowance, entries_error(op, norm, value).reshape(value.shape))


def lengths(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension, in float64, to the last digit or two.

    torch sums in a cascade; `torch.linalg.vector_norm` does not, and is off by √size·eps.

    >>> lengths(torch.tensor([3.0, 4.0])).item()
    5.0
    """
    x = x.double()
    return (x * x).sum(-1).sqrt()


def quick_lengths(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension, in float64 on the CPU, to √size·eps."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).cpu()


def overlaps(left: Tensor, right: Tensor) -> Tensor:
    """⟨l_i, r_j⟩ of all vectors ``(maps, i, size)`` and ``(maps, j, size)``, in float64, to the last digits of |l||r|.

    A BLAS adds up one long sum, whose parts may be far larger than the whole: at 800,000 coordinates in float32 it was
    off by 800 eps. So it gets short sums, and those are added up in float64.

    >>> overlaps(torch.ones(1, 1, 3), torch.tensor([[[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]]])).tolist()
    [[[6.0, 1.0]]]
    """
    parts = zip(left.split(_SHORT_SUM, dim=-1), right.split(_SHORT_SUM, dim=-1), strict=True)
    return torch.stack([torch.bmm(a, b.mT) for a, b in parts]).double().sum(0)


class FlatProducts:
    """J and Jᵀ on tensors ``(maps, in_size)`` and ``(maps, out_size)``, for the maps of the batch still wanted.

    A map whose products would overflow, or vanish, when squared is replaced by 2^(−e) J, exactly; `calibrated` finds e.

    Attributes:
        maps: positions, in the flattened batch, of the maps still wanted.
        scale: 2^e of every map still wanted, float64: by how much results have to be multiplied.
        count: products made so far; one J v or one Jᵀ u over all maps still wanted counts as one.
    """

    def __init__(self, op: JacobianOperator, scale: Tensor | None = None):
        if op.batch_size == 0 or op.in_size == 0 or op.out_size == 0:
            raise InvalidInput(f"{op!r} has no entries: give at least one map with at least one coordinate.")
        if op.dtype not in (torch.float32, torch.float64):
            raise InvalidInput(f"Norms need float32 or float64 products, not {op.dtype}: convert the input first.")
        self.op = op
        self.maps = torch.arange(op.batch_size)
        self.scale = torch.ones(op.batch_size, dtype=torch.float64) if scale is None else scale
        self.count = 0
        self._subset: JacobianOperator | None = None

    def calibrated(self, v: Tensor) -> Tensor:
        """J v for unit vectors v, once ``scale`` (unless it was given) makes its length near 1 or harmless anyway."""
        cached, plain_scale = self.op.cached_product, len(v) == self.op.batch_size and (self.scale == 1).all()
        if cached is not None and plain_scale and torch.equal(cached[0].reshape(v.shape), v):
            y = cached[1].reshape(len(v), -1)  # made when the operator was built
        else:
            y = self.matvec(v)
        plain, reach = _PLAIN[self.op.dtype], _REACH[self.op.dtype]
        length = quick_lengths(y)
        large = ~(length <= 2.0**plain)
        odd = large | (length < 2.0**-plain)
        if not odd.any() or (self.scale != 1).any():
            return y
        self.scale = torch.exp2(reach * (large.double() - (odd & ~large).double()))
        length = quick_lengths(self.matvec(v))
        wanted = (self.scale * power_of_two(length)).clamp(2.0**-1000, 2.0**1000)
        self.scale = torch.where(odd & (length > 0) & torch.isfinite(length), wanted, 1.0)
        return self.matvec(v)

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true; they are cut out of the operator when it can do that."""
        self.maps, self.scale = self.maps[mask], self.scale[mask]
        self._subset = self.op.subset(self.maps.to(self.op.device))

    def matvec(self, v: Tensor) -> Tensor:
        """J v for the maps still wanted: ``(maps, in_size)`` → ``(maps, out_size)``."""
        return self._scaled(v, forward=True)

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀ u for the maps still wanted: ``(maps, out_size)`` → ``(maps, in_size)``."""
        return self._scaled(u, forward=False)

    def _scaled(self, x: Tensor, forward: bool) -> Tensor:
        if (self.scale == 1).all():
            return self._apply(x, forward)
        reach = _REACH[self.op.dtype]
        before = (1 / self.scale).clamp(2.0**-reach, 2.0**reach)  # all powers of two: nothing is rounded
        y = self._apply(x * before.to(x)[:, None], forward)
        return y * (1 / self.scale / before).to(y)[:, None]

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
    by_columns, lines, length = _lines(op)
    chunk = max(1, CHUNK_BYTES // (8 * op.batch_size * length))
    for index in torch.arange(lines, device=op.device).split(chunk):
        block = op.columns(index) if by_columns else op.rows(index)
        block = block.reshape(len(index), op.batch_size, length).double()
        if not torch.isfinite(block).all():
            raise not_finite(op)
        yield by_columns, block


def _lines(op: JacobianOperator) -> tuple[bool, int, int]:
    """Whether columns cost no more than rows, how many lines that makes, and their length."""
    rows_cost, columns_cost = op.line_costs()
    return (True, op.in_size, op.out_size) if columns_cost <= rows_cost else (False, op.out_size, op.in_size)


def not_finite(op: JacobianOperator) -> InvalidInput:
    """The error for an operator whose products are NaN or infinite."""
    return InvalidInput(
        f"{op!r} returned NaN or infinite values: check the input and the weights, or use a wider dtype."
    )
