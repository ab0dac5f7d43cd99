"""Norms of small Jacobians from their matrices."""

from __future__ import annotations

import time

import torch

from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.measurement import Measurement, NormKind
from howsmooth.norms.products import FlatProducts, not_finite, rounding_allowance


def dense_norm(op: JacobianOperator, norm: NormKind = 2, k: int = 1) -> Measurement:
    """A norm from the matrix itself: exact up to rounding, at min(in_size, out_size) products.

    ``norm`` is 2 (largest singular value; with the k largest triplets), 1 (largest column sum of |J|), ``math.inf``
    (largest row sum) or ``"fro"``. All work after the products is done in float64.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> op = MatrixOperator(torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64))
    >>> [round(float(dense_norm(op, norm)), 6) for norm in (2, 1, float("inf"), "fro")]
    [6.708204, 7.0, 9.0, 7.071068]
    """
    started = time.perf_counter()
    FlatProducts(op)  # refuses what has no norm
    products = min(op.in_size, op.out_size)
    if not 1 <= k <= products:
        raise InvalidInput(f"k={k} singular values do not exist for {op!r}: choose 1 to {products}.")
    with torch.no_grad():
        matrix = op.dense().detach()
        if not bool(torch.isfinite(matrix).all()):
            raise not_finite(op)
        matrix = matrix.cpu().double()
    left = right = values = residuals = None
    if norm == 2:
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        values, residuals = sigma[..., :k], torch.zeros_like(sigma[..., :k])
        value = sigma[..., 0]
        triplets = () if k == 1 else (k,)
        left = u[..., :k].mT.to(op.dtype).to(op.device).reshape(*op.batch_shape, *triplets, *op.out_shape)
        right = vt[..., :k, :].to(op.dtype).to(op.device).reshape(*op.batch_shape, *triplets, *op.in_shape)
    else:
        value = torch.linalg.matrix_norm(matrix, ord=norm)
    allowance = rounding_allowance(op.dtype, products, op.blur)
    return Measurement(
        value=value,
        lower=value * (1 - allowance),
        upper=value * (1 + allowance),
        confidence=1.0,
        norm=norm,
        converged=torch.ones_like(value, dtype=torch.bool),
        products=products,
        method="dense",
        dtype=op.dtype,
        seconds=time.perf_counter() - started,
        left=left,
        right=right,
        values=values,
        residuals=residuals,
    )
