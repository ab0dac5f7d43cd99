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
The ``lower`` of a `Measurement` is always true, so it is σ₁'s own; the lower end of the interval goes into the notes.

Reference: F. Roosta-Khorasani, U. Ascher, "Improved bounds on sample size for implicit matrix trace estimators",
Found. Comput. Math. 15 (2015) 1187–1212, for the case r = 1.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from scipy.special import lambertw
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.golub_kahan import golub_kahan
from howsmooth.norms.measurement import Measurement
from howsmooth.norms.products import FlatProducts, entry_blocks, not_finite, random_stream, rounding_allowance


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
    flat = FlatProducts(op)
    lines, cost = min(op.in_size, op.out_size), math.ceil(min(op.line_costs()))
    exact = cost <= exact_limit
    residuals, notes = None, tuple[str, ...]()
    with torch.no_grad():
        if exact:
            squares = torch.zeros(op.batch_size, dtype=torch.float64)
            for _, block in entry_blocks(op):
                squares = squares + (block * block).sum((0, -1)).cpu()
            value, products = squares.sqrt(), cost
            allowance = rounding_allowance(op.dtype, lines, op.blur)
            lower, upper = value * (1 - allowance), value * (1 + allowance)
        else:
            if probes < 2:
                raise InvalidInput(f"probes={probes} gives no standard error: use at least 2.")
            delta = 1 - confidence
            spectral = golub_kahan(op, rtol=min(10 * rtol, 0.1), confidence=1 - delta / 2, seed=seed)
            samples = _samples(flat, probes, seed)
            mean = samples.mean(0)
            value = mean.sqrt()
            residuals = (samples.std(0) / math.sqrt(probes) / (2 * value.clamp_min(1e-300)))[:, None]
            top = spectral.upper.reshape(-1)
            low, high = interval(mean, top, probes, delta / 2)
            allowance = rounding_allowance(op.dtype, 1, op.blur)
            lower = spectral.lower.reshape(-1)
            upper = torch.minimum(high.sqrt() * (1 + allowance), math.sqrt(lines) * top)
            value = torch.minimum(torch.maximum(value, lower), upper)
            likely = torch.maximum(low.sqrt() * (1 - allowance), lower) / value.clamp_min(1e-300)
            notes = (
                "residuals holds the standard error of the value; the norm is at least "
                f"{float(likely.min()):.4g} times the value with probability {100 * confidence:g} %",
            )
            products = flat.count + spectral.products
    batch = op.batch_shape
    return Measurement(
        value=value.reshape(batch),
        lower=lower.reshape(batch),
        upper=upper.reshape(batch),
        confidence=1.0 if exact else confidence,
        norm="fro",
        converged=((upper <= (1 + rtol) * lower) | exact).reshape(batch),
        products=products,
        method="entries" if exact else "gaussian-probes",
        dtype=op.dtype,
        seconds=time.perf_counter() - started,
        residuals=None if residuals is None else residuals.reshape(*batch, 1),
        notes=notes,
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


def _samples(flat: FlatProducts, probes: int, seed: int) -> Tensor:
    """‖Jz‖² for independent Gaussian z, ``(probes, maps)``; another stream than the start of `golub_kahan`."""
    op = flat.op
    generator = random_stream(seed, "frobenius probes")
    found = []
    for _ in range(probes):
        z = torch.randn(op.batch_size, op.in_size, generator=generator, dtype=op.dtype).to(op.device)
        found.append(torch.linalg.vector_norm(flat.matvec(z), dim=-1, dtype=torch.float64).cpu() ** 2)
    samples = torch.stack(found)
    if not bool(torch.isfinite(samples).all()):
        raise not_finite(op)
    return samples
