r"""Norms of Jacobians from their entries: the 2-norm of small matrices, the 1-, ∞- and Frobenius norms of all.

‖J‖_∞ = ‖Jᵀ‖₁, so everything is written for the 1-norm. The Frobenius norm is exact from the entries, or sampled with an
interval that holds for every spectrum.

**Sampling.** For z ~ N(0, I), E‖Jz‖² = ‖J‖_F² =: φ. With s probes the mean Y of ‖Jz‖² is (φ/s) Σ_i w_i χ²_{s,i}, where
w_i = σ_i²/φ sum to 1 and the χ² variables, with s degrees of freedom, are independent.

**Theorem.** If every w_i ≤ r, then for x < 1 and for x > 1 respectively P(Y ≤ xφ) and P(Y ≥ xφ) are at most
exp(−(s/2r)(x − 1 − ln x)).
*Proof.* (Chernoff.) E exp(−t s Y/φ) = Π(1 + 2t w_i)^{−s/2}. As ln(1 + 2tw)/w decreases in w,
Σ ln(1 + 2t w_i) ≥ ln(1 + 2tr)/r. So P(Y ≤ xφ) ≤ exp(tsx − (s/2r) ln(1 + 2tr)), least at 1 + 2tr = 1/x, which is the
claim. For the upper tail replace t by −t, 0 < 2tr < 1: −ln(1 − 2tw)/w increases in w, so
−Σ ln(1 − 2t w_i) ≤ −ln(1 − 2tr)/r; same optimum. ∎

**Interval.** r = 1 always holds. r = S²/φ holds for any S ≥ σ₁, which makes the interval the narrower the more
singular values share the norm. Solving (s/2r)(x − 1 − ln x) = ln(2/δ'), x = Y/φ, with Lambert's W, branches 0 and −1:

    r = 1:      φ = Y/x,  x = −W(−e^{−1−c}),           c = 2 ln(2/δ')/s;
    r = S²/φ:   φ = Y exp(1 + W((c S²/Y − 1)/e)).

S is the upper bound of `golub_kahan` and holds except with probability δ/2; δ' = δ/2 goes to the two tails; so the
interval holds with probability at least 1 − δ. Two ends need no further chance: σ₁ ≤ ‖J‖_F ≤ √min(in_size, out_size)·S.
The ``lower`` of a `Measurement` leaves nothing to chance: it is σ₁'s own, and that of the interval goes into the notes.

Reference: F. Roosta-Khorasani, U. Ascher, "Improved bounds on sample size for implicit matrix trace estimators",
Found. Comput. Math. 15 (2015) 1187–1212, for the case r = 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, onenormest
from scipy.special import lambertw
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth._util.validation import check_one_of, validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.counted_products import (
    FlatProducts,
    entry_blocks,
    entry_ends,
    not_finite,
    power_of_two,
    product_error,
    quick_lengths,
)
from howsmooth.norms.lanczos import below_spectral_norm, spectral_norm_and_products
from howsmooth.norms.measurement import Measurement, NormKind, measurement_between, uncrossed


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
        if not torch.isfinite(matrix).all():
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
    with torch.no_grad():
        if cost > exact_limit:
            return below_spectral_norm(
                op, lambda flat, _: _estimate(flat, seed), op.out_size, rtol, confidence, seed, 1, "higham-tisseur"
            )
        value = _largest_column_sum(op)
    ends, seconds = entry_ends(op, 1, value), time.perf_counter() - started
    return measurement_between(op, value, ends, rtol, norm=1, products=cost, method="entries", seconds=seconds)


def _largest_column_sum(op: JacobianOperator) -> Tensor:
    largest = torch.zeros(op.batch_size, dtype=torch.float64)
    sums = torch.zeros(op.batch_size, op.in_size, dtype=torch.float64, device=op.device)
    for by_columns, block in entry_blocks(op):
        if by_columns:
            largest = torch.maximum(largest, block.abs().sum(-1).amax(0).cpu())
        else:
            sums = sums + block.abs().sum(0)
    return torch.maximum(largest, sums.amax(-1).cpu())


def _estimate(flat: FlatProducts, seed: int) -> Tensor:
    """scipy's estimate for one map after the other, J padded with zeros to a square matrix."""
    op, estimates = flat.op, []
    size = max(op.out_size, op.in_size)

    def padded(product: Callable[[Tensor], Tensor], length: int, x: np.ndarray) -> np.ndarray:
        v = torch.as_tensor(np.ascontiguousarray(x).reshape(-1)[:length], dtype=op.dtype, device=op.device)[None]
        y = product(v)[0].double().cpu().numpy()
        if not np.isfinite(y).all():
            raise not_finite(op)
        return np.pad(y, (0, size - len(y)))

    for i in range(op.batch_size):
        single = FlatProducts(op, flat.scale)
        if op.batch_size > 1:
            single.keep(torch.arange(op.batch_size) == i)
        forward, backward = partial(padded, single.matvec, op.in_size), partial(padded, single.rmatvec, op.out_size)
        with _numpy_seed(seed):
            square = LinearOperator((size, size), matvec=forward, rmatvec=backward, dtype=np.float64)
            estimates.append(float(onenormest(square, t=min(4, size))))
        flat.count += single.count
    return torch.tensor(estimates, dtype=torch.float64) * flat.scale


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """`onenormest` draws from numpy's global generator: seed it, and leave it as it was."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


@validated
def frobenius_norm(
    op: JacobianOperator,
    rtol: float = 1e-3,
    confidence: float = 0.99,
    seed: int = 0,
    exact_limit: int = 4096,
    probes: int = 64,
) -> Measurement:
    """‖J‖_F of every map: exact when all entries cost at most ``exact_limit`` products, else sampled.

    Sampled, ``value`` is √Y for Gaussian ``probes`` (within its bounds), ``residuals`` its standard error, ``upper``
    the end of the interval of this module, ``lower`` that of σ₁; a note gives the other end of the interval, which
    holds with probability ``confidence`` for each map by itself. The number of probes is fixed in advance: stopping
    when the interval looks narrow would make it false.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> op = MatrixOperator(torch.eye(100))
    >>> float(frobenius_norm(op))
    10.0
    >>> m = frobenius_norm(op, exact_limit=0)
    >>> bool(m.lower <= 10 <= m.upper)
    True
    """
    started = time.perf_counter()
    FlatProducts(op)  # refuses what has no norm
    cost = math.ceil(min(op.line_costs()))
    with torch.no_grad():
        if cost > exact_limit:
            return _sampled(op, rtol, confidence, seed, probes)
        value = torch.zeros(op.batch_size, dtype=torch.float64)
        for _, block in entry_blocks(op):
            scale = power_of_two(block.abs().amax((0, -1)))
            norm = (block / scale[:, None]).square().sum((0, -1)).sqrt() * scale
            value = torch.hypot(value, norm.cpu())
    ends, seconds = entry_ends(op, "fro", value), time.perf_counter() - started
    return measurement_between(op, value, ends, rtol, norm="fro", products=cost, method="entries", seconds=seconds)


def _sampled(op: JacobianOperator, rtol: float, confidence: float, seed: int, probes: int) -> Measurement:
    if probes < 2:
        raise InvalidInput(f"probes={probes} gives no standard error: use at least 2.")
    started, delta = time.perf_counter(), 1 - confidence
    spectral, flat = spectral_norm_and_products(op, rtol, 1 - delta / 2, seed)
    samples, stretch = _samples(flat, probes, seed)
    root = samples.mean(0).sqrt()
    # The products of one probe z are off by η|z|; as lengths in R^probes, so is √Y by the root mean square of that.
    top = spectral.upper.flatten() / flat.scale
    error = stretch * (8 * torch.finfo(op.dtype).eps * top + product_error(op) / flat.scale)
    low, _ = interval((root - error).clamp_min(0) ** 2, top, probes, delta / 2)
    _, high = interval((root + error) ** 2, top, probes, delta / 2)
    widening = 1 + 2 * op.accuracy.point
    largest = math.sqrt(min(op.in_size, op.out_size)) * top
    upper = torch.minimum(high.sqrt() * widening, largest) * flat.scale
    lower, upper, notes = uncrossed(spectral.lower.flatten(), upper)
    value = torch.minimum(torch.maximum(root * flat.scale, lower), upper)
    likely = torch.maximum(low.sqrt() / widening * flat.scale, lower) / torch.where(value > 0, value, 1.0)
    spread = samples.std(0) / math.sqrt(probes) / (2 * torch.where(root > 0, root, 1.0)) * flat.scale
    note = (
        "residuals holds the standard error of the value; the norm is at least "
        f"{float(likely.min()):.4g} times the value with probability {100 * confidence:g} %"
    )
    return measurement_between(
        op,
        value,
        (lower, upper),
        rtol,
        confidence,
        (note, *notes),
        norm="fro",
        products=flat.count + spectral.products,
        method="gaussian-probes",
        seconds=time.perf_counter() - started,
        residuals=spread.reshape(*op.batch_shape, 1),
    )


def interval(mean: Tensor, top: Tensor, probes: int, delta: float) -> tuple[Tensor, Tensor]:
    """The ends of the interval for ‖J‖_F² from the mean of ‖Jz‖² over the probes and an upper bound on σ₁.

    >>> low, high = interval(torch.tensor([1.0]).double(), torch.tensor([1.0]).double(), probes=100, delta=0.01)
    >>> round(float(low), 3), round(float(high), 3)
    (0.652, 1.494)
    """
    c = 2 * math.log(2 / delta) / probes
    y, s2 = mean.numpy(), top.numpy() ** 2
    low = y / -lambertw(-math.exp(-1 - c), -1).real
    high = y / -lambertw(-math.exp(-1 - c), 0).real
    share = np.maximum(c * s2 / np.where(y > 0, y, 1), 1e-12)  # W has its branch point at 0; more is on the safe side
    argument = (share - 1) / math.e
    high = np.minimum(high, y * np.exp(1 + lambertw(argument, 0).real))
    with_tail = np.where(share < 1, argument, -1 / math.e)  # beyond that the lower tail says nothing
    low = np.maximum(low, np.where(share < 1, y * np.exp(1 + lambertw(with_tail, -1).real), 0))
    return torch.from_numpy(np.asarray(low)), torch.from_numpy(np.asarray(high))


def _samples(flat: FlatProducts, probes: int, seed: int) -> tuple[Tensor, Tensor]:
    """‖Jz‖² for independent Gaussian z, ``(probes, maps)``, and the root mean square of |z|, ``(maps,)``.

    The stream is another than that of the start of `golub_kahan`.
    """
    op = flat.op
    generator = random_stream(seed, "frobenius probes")
    squares, inputs = [], torch.zeros(op.batch_size, dtype=torch.float64)
    for _ in range(probes):
        z = torch.randn(op.batch_size, op.in_size, generator=generator, dtype=op.dtype).to(op.device)
        squares.append(quick_lengths(flat.matvec(z)) ** 2)
        inputs += quick_lengths(z) ** 2
    samples = torch.stack(squares)
    if not torch.isfinite(samples).all():
        raise not_finite(op)
    return samples, (inputs / probes).sqrt()
