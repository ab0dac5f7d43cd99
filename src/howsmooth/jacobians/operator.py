"""The interface of all Jacobians in howsmooth: products with J and Jᵀ, and everything derived from them.

A `JacobianOperator` stands for a *batch* of linear maps J_b: R^{in_shape} → R^{out_shape}. For attention the batch
runs over inputs, or over inputs and heads; each J_b is the derivative of one map at one input. Vectors keep the shape
of the thing they perturb, so ``matvec`` takes tensors of shape ``batch_shape + in_shape`` (tokens stay rows).

Every norm in `howsmooth.norms` needs nothing but this interface.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@dataclass(frozen=True, eq=False)
class Accuracy:
    """The rounding errors of an operator.

    Attributes:
        point: the relative error of the map itself, made before any product was taken.
        product: an absolute bound, one number per map or one for all (float64), on ‖(computed J) v − J v‖ and on
            ‖(computed Jᵀ) u − Jᵀu‖ for unit vectors, beyond a few eps·‖J‖: the result of cancellation inside the map.
            No singular value of the computed operator is further than this from the true one.
        alignment: the share of ``product`` that can lie along a direction fixed beforehand: 1 when nothing is known of
            it, N^{-½} for sums of many roundings, which have no preferred direction.
        guarantee: whether ``point`` and ``product`` are bounds under a model of rounding (MODELLED:
            `howsmooth.jacobians.product_error`) or were measured on a vector (MEASURED). The few eps·‖J‖ of every
            product besides are a model too, also of a matrix: sums of n terms are off by √n·eps, not by n·eps, when
            roundings are independent of mean zero. So there is nothing stronger here.
    """

    point: float = 0.0
    product: Tensor | float = 0.0
    alignment: float = 1.0
    guarantee: Guarantee = Guarantee.MODELLED


class JacobianOperator(ABC):
    """A batch of Jacobians known through their products.

    Attributes:
        batch_shape: shape of the batch; ``()`` for a single map.
        in_shape: shape of one input, usually ``(n, d)``.
        out_shape: shape of one output.
        dtype, device: of the vectors it takes and returns.
        method: a few words for reports: how the products are computed.
        notes: sentences the reader of a result should know.
        accuracy: the errors of its products.
        cached_product: a vector that measurements start from (`howsmooth.jacobians.start_vector`) and its product,
            where the construction of the operator has made it.
    """

    batch_shape: torch.Size
    in_shape: torch.Size
    out_shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    method: str
    notes: tuple[str, ...] = ()
    accuracy: Accuracy = Accuracy()
    cached_product: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """J v for every map of the batch: ``batch_shape + in_shape`` → ``batch_shape + out_shape``."""

    @abstractmethod
    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀ u for every map of the batch: ``batch_shape + out_shape`` → ``batch_shape + in_shape``."""

    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor | None:
        """f(x) of every map, ``batch_shape + out_shape``; None where the operator does not know it."""
        return None

    def size(self) -> Tensor:
        """An upper bound on ‖J‖ of every map, float64 on the CPU, for the rounding of compositions.

        From a few products, and true with probability 1 − 10⁻⁶, unless the operator knows better.
        """
        from howsmooth.jacobians.algebra import power_bound

        return power_bound(self)

    def __matmul__(self, other: JacobianOperator) -> JacobianOperator:
        """The Jacobian of this map after the other."""
        from howsmooth.jacobians.algebra import Product

        return Product([self, other]) if isinstance(other, JacobianOperator) else NotImplemented

    def __add__(self, other: JacobianOperator) -> JacobianOperator:
        """The Jacobian of the sum of two maps."""
        from howsmooth.jacobians.algebra import Sum

        return Sum([self, other]) if isinstance(other, JacobianOperator) else NotImplemented

    @property
    def in_size(self) -> int:
        """Number of input coordinates of one map."""
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        """Number of output coordinates of one map."""
        return math.prod(self.out_shape)

    @property
    def batch_size(self) -> int:
        """Number of maps in the batch."""
        return math.prod(self.batch_shape)

    @property
    def adjoint(self) -> JacobianOperator:
        """The operator of Jᵀ: ``matvec`` and ``rmatvec`` trade places."""
        return _Adjoint(self)

    def subset(self, index: Tensor) -> JacobianOperator | None:
        """The maps at ``index`` (positions in the flattened batch) as an operator with batch shape ``(len(index),)``.

        None when that would save nothing; solvers then continue with the whole batch.
        """
        return None

    def rounded(self, dtype: torch.dtype) -> JacobianOperator:
        """The same operator rounded to another dtype, without a bound on that error; itself where it has no other."""
        return self

    def lift_in(self, v: Tensor) -> Tensor:
        """Input vectors in the coordinates of the tokens (the identity unless the operator is reduced)."""
        return v

    def lift_out(self, u: Tensor) -> Tensor:
        """Output vectors in the coordinates of the map's output (the identity unless the operator is reduced)."""
        return u

    def columns(self, index: Tensor) -> Tensor:
        """Columns of J at the flat input coordinates ``index``: ``(len(index),) + batch_shape + out_shape``."""
        return torch.stack([self.matvec(self._units(i, self.in_shape)[0]) for i in index.split(1)])

    def rows(self, index: Tensor) -> Tensor:
        """Rows of J at the flat output coordinates ``index``: ``(len(index),) + batch_shape + in_shape``."""
        return torch.stack([self.rmatvec(self._units(i, self.out_shape)[0]) for i in index.split(1)])

    def line_costs(self) -> tuple[float, float]:
        """The cost of all rows, and of all columns, of J in products: out_size and in_size without a short cut."""
        return self.out_size, self.in_size

    def dense(self) -> Tensor:
        """The matrices themselves, ``batch_shape + (out_size, in_size)``, by rows or columns, whichever costs less."""
        by_rows, by_columns = self.line_costs()
        if by_columns <= by_rows:
            cols = self.columns(torch.arange(self.in_size, device=self.device))
            return cols.reshape(self.in_size, *self.batch_shape, self.out_size).movedim(0, -1)
        rows = self.rows(torch.arange(self.out_size, device=self.device))
        return rows.reshape(self.out_size, *self.batch_shape, self.in_size).movedim(0, -2)

    def to_scipy(self) -> LinearOperator:
        """This operator for scipy: a `scipy.sparse.linalg.LinearOperator` on flat vectors.

        Needs a batch of one; index a larger batch with ``subset`` first.

        >>> import howsmooth as hs, torch, scipy.sparse.linalg as sla
        >>> J = hs.jacobian(torch.tanh, torch.zeros(3, 2, dtype=torch.float64))
        >>> round(float(sla.svds(J.to_scipy(), k=1, return_singular_vectors=False)[0]), 12)
        1.0
        """
        from scipy.sparse.linalg import LinearOperator

        if self.batch_size != 1:
            raise InvalidInput(
                f"to_scipy needs one map, but this operator holds a batch of shape {tuple(self.batch_shape)}: "
                "build it from a single input or head."
            )

        def product(apply: Callable[[Tensor], Tensor], shape: torch.Size) -> Callable[[np.ndarray], np.ndarray]:
            def call(v: np.ndarray) -> np.ndarray:
                tensor = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=self.dtype, device=self.device)
                out = apply(tensor.reshape(*self.batch_shape, *shape))
                return out.detach().reshape(-1).cpu().numpy()

            return call

        return LinearOperator(
            shape=(self.out_size, self.in_size),
            matvec=product(self.matvec, self.in_shape),
            rmatvec=product(self.rmatvec, self.out_shape),
            dtype=np.dtype(str(self.dtype).removeprefix("torch.")),
        )

    def _units(self, index: Tensor, shape: torch.Size) -> Tensor:
        """Unit vectors at flat coordinates, the same for every map: ``(len(index),) + batch_shape + shape``."""
        units = torch.zeros(len(index), math.prod(shape), dtype=self.dtype, device=self.device)
        units[torch.arange(len(index)), index] = 1
        return units.reshape(-1, *[1] * len(self.batch_shape), *shape).expand(-1, *self.batch_shape, *shape)

    def __repr__(self) -> str:
        batch = f", batch={tuple(self.batch_shape)}" if self.batch_shape else ""
        return (
            f"{type(self).__name__}({tuple(self.in_shape)} → {tuple(self.out_shape)}{batch}, "
            f"{self.method}, {str(self.dtype).removeprefix('torch.')})"
        )


class MatrixOperator(JacobianOperator):
    """Explicit matrices ``(*batch, m, n)`` behind the operator interface: for tests, and for small dense maps.

    >>> MatrixOperator(torch.eye(2)).matvec(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    method = "matrix"

    @validated
    def __init__(self, matrix: Tensor, accuracy: Accuracy | None = None):
        if matrix.dim() < 2:
            raise InvalidInput(f"matrix has shape {tuple(matrix.shape)}, but must be (…, m, n).")
        self.matrix = matrix
        self.batch_shape = matrix.shape[:-2]
        self.out_shape = matrix.shape[-2:-1]
        self.in_shape = matrix.shape[-1:]
        self.dtype, self.device = matrix.dtype, matrix.device
        self.accuracy = Accuracy() if accuracy is None else accuracy

    def matvec(self, v: Tensor) -> Tensor:
        return (self.matrix @ v.unsqueeze(-1)).squeeze(-1)

    def rmatvec(self, u: Tensor) -> Tensor:
        return (self.matrix.mT @ u.unsqueeze(-1)).squeeze(-1)

    def rounded(self, dtype: torch.dtype) -> MatrixOperator:
        return MatrixOperator(self.matrix.to(dtype))

    def subset(self, index: Tensor) -> MatrixOperator:
        return MatrixOperator(self.matrix.reshape(-1, *self.matrix.shape[-2:])[index])

    def dense(self) -> Tensor:
        return self.matrix


class _Adjoint(JacobianOperator):
    def __init__(self, parent: JacobianOperator):
        self.parent = parent
        self.batch_shape = parent.batch_shape
        self.in_shape, self.out_shape = parent.out_shape, parent.in_shape
        self.dtype, self.device, self.method = parent.dtype, parent.device, parent.method
        self.accuracy = parent.accuracy

    def matvec(self, v: Tensor) -> Tensor:
        return self.parent.rmatvec(v)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.parent.matvec(u)

    def columns(self, index: Tensor) -> Tensor:
        return self.parent.rows(index)

    def rows(self, index: Tensor) -> Tensor:
        return self.parent.columns(index)

    def line_costs(self) -> tuple[float, float]:
        by_rows, by_columns = self.parent.line_costs()
        return by_columns, by_rows

    def dense(self) -> Tensor:
        return self.parent.dense().mT

    def subset(self, index: Tensor) -> JacobianOperator | None:
        child = self.parent.subset(index)
        return None if child is None else child.adjoint

    @property
    def adjoint(self) -> JacobianOperator:
        return self.parent
