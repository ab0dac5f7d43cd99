r"""The Frobenius norm of Jacobians: exact from the entries, or sampled with an interval that holds for every spectrum.

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
from dataclasses import replace

import numpy as np
import torch
from scipy.special import lambertw
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.counted_products import (
    FlatProducts,
    entry_blocks,
    entry_ends,
    harmless_scale,
    not_finite,
    power_of_two,
    product_error,
    quick_lengths,
)
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.measurement import Measurement, measurement_between, uncrossed


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
        exact = cost <= exact_limit
        m = _from_entries(op, rtol, cost) if exact else _sampled(op, rtol, confidence, seed, probes)
    return replace(m, seconds=time.perf_counter() - started)


def _from_entries(op: JacobianOperator, rtol: float, cost: int) -> Measurement:
    value = torch.zeros(op.batch_size, dtype=torch.float64)
    for _, block in entry_blocks(op):
        scale = power_of_two(block.abs().amax((0, -1)))
        norm = (block / scale[:, None]).square().sum((0, -1)).sqrt() * scale
        value = torch.hypot(value, norm.cpu())
    ends = entry_ends(op, "fro", value)
    return measurement_between(op, value, ends, rtol, norm="fro", products=cost, method="entries", seconds=0.0)


def _sampled(op: JacobianOperator, rtol: float, confidence: float, seed: int, probes: int) -> Measurement:
    if probes < 2:
        raise InvalidInput(f"probes={probes} gives no standard error: use at least 2.")
    delta = 1 - confidence
    spectral = golub_kahan(op, rtol=min(10 * rtol, 0.1), confidence=1 - delta / 2, seed=seed)
    flat = FlatProducts(op, harmless_scale(spectral.value.reshape(-1), op.dtype))
    samples, stretch = _samples(flat, probes, seed)
    root = samples.mean(0).sqrt()
    # The products of one probe z are off by η|z|; as lengths in R^probes, so is √Y by the root mean square of that.
    top = spectral.upper.reshape(-1) / flat.scale
    error = stretch * (8 * torch.finfo(op.dtype).eps * top + product_error(op) / flat.scale)
    low, _ = interval((root - error).clamp_min(0) ** 2, top, probes, delta / 2)
    _, high = interval((root + error) ** 2, top, probes, delta / 2)
    widening = 1 + 2 * op.accuracy.point
    largest = math.sqrt(min(op.in_size, op.out_size)) * top
    upper = torch.minimum(high.sqrt() * widening, largest) * flat.scale
    lower, upper, notes = uncrossed(spectral.lower.reshape(-1), upper)
    value = torch.minimum(torch.maximum(root * flat.scale, lower), upper)
    likely = torch.maximum(low.sqrt() / widening * flat.scale, lower) / torch.where(value > 0, value, 1.0)
    spread = samples.std(0) / math.sqrt(probes) / (2 * torch.where(root > 0, root, 1.0)) * flat.scale
    note = (
        "residuals holds the standard error of the value; the norm is at least "
        f"{float(likely.min()):.4g} times the value with probability {100 * confidence:g} %"
    )
    facts = {"norm": "fro", "products": flat.count + spectral.products, "method": "gaussian-probes", "seconds": 0.0}
    residuals = spread.reshape(*op.batch_shape, 1)
    return measurement_between(
        op, value, (lower, upper), rtol, confidence, (note, *notes), residuals=residuals, **facts
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
    if not bool(torch.isfinite(samples).all()):
        raise not_finite(op)
    return samples, (inputs / probes).sqrt()
