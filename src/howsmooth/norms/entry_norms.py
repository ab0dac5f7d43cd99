"""The 1-norm and the ∞-norm of Jacobians: largest column sum and largest row sum of |J|.

‖J‖_∞ = ‖Jᵀ‖₁, so everything is written for the 1-norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, onenormest
from torch import Tensor

from howsmooth._util.validation import validated
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.counted_products import (
    FlatProducts,
    entry_blocks,
    entry_ends,
    harmless_scale,
    not_finite,
    product_error,
    rounding_allowance,
    widened,
)
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.measurement import Measurement, measurement_between, uncrossed


@validated
def inf_norm(
    op: JacobianOperator, rtol: float = 1e-3, confidence: float = 0.99, seed: int = 0, exact_limit: int = 4096
) -> Measurement:
    """‖J‖_∞ = max_i Σ_j |J_ij|, as the 1-norm of Jᵀ; see `one_norm`. Hence ‖J‖_∞ ≤ √in_size · ‖J‖₂.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> float(inf_norm(MatrixOperator(torch.tensor([[3.0, 0.0], [4.0, -5.0]]))))
    9.0
    """
    return replace(one_norm(op.adjoint, rtol, confidence, seed, exact_limit), norm=math.inf)


@validated
def one_norm(
    op: JacobianOperator, rtol: float = 1e-3, confidence: float = 0.99, seed: int = 0, exact_limit: int = 4096
) -> Measurement:
    """‖J‖₁ = max_j Σ_i |J_ij|.

    Exact (up to rounding) when all entries cost at most ``exact_limit`` products (min(in_size, out_size) in general,
    less for attention): with columns each sum is read off, with rows all sums grow together. Beyond that, ``value`` is
    the block estimate of Higham & Tisseur [1] as found in scipy. It is the sum of a column of J, so a lower
    bound. The upper bound is

        ‖J‖₁ = max_j ‖J e_j‖₁ ≤ √out_size · max_j ‖J e_j‖₂ ≤ √out_size · ‖J‖₂,

    with ‖J‖₂ bounded by `golub_kahan` at this ``confidence``. They are usually far apart, and ``converged`` is False.
    An error of length ε in a column (`Accuracy.product`) moves its sum by √out_size·ε at most.

    References:
        [1] N. J. Higham, F. Tisseur, "A block algorithm for matrix 1-norm estimation, with an application to 1-norm
            pseudospectra", SIAM J. Matrix Anal. Appl. 21 (2000) 1185–1201.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> float(one_norm(MatrixOperator(torch.tensor([[3.0, 0.0], [4.0, -5.0]]))))
    7.0
    """
    started = time.perf_counter()
    FlatProducts(op)  # refuses what has no norm
    cost = math.ceil(min(op.line_costs()))
    notes: tuple[str, ...] = ()
    with torch.no_grad():
        if cost <= exact_limit:
            value, products, method, confidence = _largest_column_sum(op), cost, "entries", 1.0
            lower, upper = entry_ends(op, 1, value)
        else:
            spectral = golub_kahan(op, rtol=min(10 * rtol, 0.1), confidence=confidence, seed=seed)
            flat = FlatProducts(op, harmless_scale(spectral.value.reshape(-1), op.dtype))
            value, method = _estimate(flat, seed), "higham-tisseur"
            products = flat.count + spectral.products
            error = math.sqrt(op.out_size) * product_error(op)
            lower, _ = widened(value, rounding_allowance(op.dtype, 1, op.accuracy.point), error)
            lower, upper, notes = uncrossed(lower, math.sqrt(op.out_size) * spectral.upper.reshape(-1))
            notes = ("the value is the largest column found, hence a lower bound", *notes)
    facts = {"norm": 1, "products": products, "method": method, "seconds": time.perf_counter() - started}
    return measurement_between(op, value, (lower, upper), rtol, confidence, notes, **facts)


def _largest_column_sum(op: JacobianOperator) -> Tensor:
    best = torch.zeros(op.batch_size, dtype=torch.float64)
    sums: Tensor | None = None
    for by_columns, block in entry_blocks(op):
        if by_columns:
            best = torch.maximum(best, block.abs().sum(-1).amax(0).cpu())
        else:
            more = block.abs().sum(0)
            sums = more if sums is None else sums + more
    return best if sums is None else sums.amax(-1).cpu()


def _estimate(flat: FlatProducts, seed: int) -> Tensor:
    """scipy's estimate for one map after the other, J padded with zeros to a square matrix."""
    maps, rows, columns = flat.op.batch_size, flat.op.out_size, flat.op.in_size
    size = max(rows, columns)
    estimates = []
    for i in range(maps):
        single = FlatProducts(flat.op, flat.scale)
        if maps > 1:
            single.keep(torch.arange(maps) == i)
        forward = partial(_padded, single.matvec, flat.op, columns, size)
        backward = partial(_padded, single.rmatvec, flat.op, rows, size)
        with _numpy_seed(seed):
            square = LinearOperator((size, size), matvec=forward, rmatvec=backward, dtype=np.float64)
            estimates.append(float(onenormest(square, t=min(4, size))))
        flat.count += single.count
    return torch.tensor(estimates, dtype=torch.float64) * flat.scale


def _padded(
    product: Callable[[Tensor], Tensor], op: JacobianOperator, length: int, size: int, x: np.ndarray
) -> np.ndarray:
    v = torch.as_tensor(np.ascontiguousarray(x).reshape(-1)[:length], dtype=op.dtype, device=op.device)[None]
    y = product(v)[0].double().cpu().numpy()
    if not np.isfinite(y).all():
        raise not_finite(op)
    return np.pad(y, (0, size - len(y)))


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """`onenormest` draws from numpy's global generator: seed it, and leave it as it was."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
