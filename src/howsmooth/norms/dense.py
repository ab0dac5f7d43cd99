"""Norms of small Jacobians from their matrices."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from howsmooth._util.validation import check_one_of, validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.counted_products import FlatProducts, entry_ends, not_finite, power_of_two
from howsmooth.norms.measurement import Measurement, NormKind, measurement_between


@validated
def dense_norm(op: JacobianOperator, norm: NormKind = 2, k: int = 1, rtol: float = 1e-3) -> Measurement:
    """A norm from the matrix itself: exact up to rounding, at min(in_size, out_size) products.

    ``norm`` is 2 (largest singular value; with the k largest triplets), 1 (largest column sum of |J|), ``math.inf``
    (largest row sum) or ``"fro"``. All work after the products is done in float64. Rounding moves both ends by
    `rounding_allowance` relatively and by `entries_error` absolutely; ``converged`` says that they are ``rtol`` apart.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> op = MatrixOperator(torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64))
    >>> [round(float(dense_norm(op, norm)), 6) for norm in (2, 1, float("inf"), "fro")]
    [6.708204, 7.0, 9.0, 7.071068]
    """
    check_one_of(norm, (2, 1, math.inf, "fro"), "norm")
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
    scale = power_of_two(matrix.abs().amax((-2, -1)))
    matrix = matrix / scale[..., None, None]  # squares of its entries neither overflow nor vanish
    facts: dict[str, Any] = {"norm": norm, "products": products, "method": "dense"}
    if norm == 2:
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        values, leading = sigma[..., :k] * scale[..., None], (*op.batch_shape, *(() if k == 1 else (k,)))
        value = values[..., 0]
        facts |= {"values": values, "residuals": torch.zeros_like(values)}
        facts["left"] = u[..., :k].mT.to(op.dtype).to(op.device).reshape((*leading, *op.out_shape))
        facts["right"] = vt[..., :k, :].to(op.dtype).to(op.device).reshape((*leading, *op.in_shape))
    else:
        value = torch.linalg.matrix_norm(matrix, ord=norm) * scale
    seconds = time.perf_counter() - started
    return measurement_between(op, value, entry_ends(op, norm, value), rtol, seconds=seconds, **facts)
