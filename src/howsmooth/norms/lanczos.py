"""The spectral norm and the top singular triplets of Jacobians from products, with bounds on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.start_vector import random_start, start_stream
from howsmooth.norms.bidiagonal import Bidiagonalisation
from howsmooth.norms.counted_products import FlatProducts
from howsmooth.norms.lanczos_bound import LanczosBound, smallest_component
from howsmooth.norms.measurement import Measurement
from howsmooth.norms.singular_triplets import Target, Triplets

BASIS_BYTES = 2**30
_SPARE = 0.1  # share of the chance of failing that is reserved for maps which rounding limits,
_REPEATS = 4  # and the number of runs they get from it
_ALWAYS_CHECK = 32  # up to this size the small decomposition is checked after every step, later every 1/16 of the size


@validated
def golub_kahan(
    op: JacobianOperator,
    k: int = 1,
    rtol: float = 1e-3,
    confidence: float = 0.99,
    seed: int = 0,
    max_steps: int = 1000,
    basis_limit: int | None = None,
    start: Tensor | None = None,
    progress: Callable[[int, float], None] | None = None,
    stop_at: Tensor | float | None = None,
    stop_below: Tensor | float | None = None,
    verify: bool = True,
) -> Measurement:
    r"""‖J‖₂ = σ₁ and the k largest singular triplets of every map, by Golub–Kahan–Lanczos from a random start.

    Every map runs until

    (i)  σ₁ is enclosed: upper ≤ (1 + rtol)·lower, with lower the largest Ritz value (never above σ₁) and upper the
         probabilistic bound of `howsmooth.norms.lanczos_bound`;
    (ii) the k wanted triplets satisfy ‖Jᵀu_i − θ_i v_i‖ ≤ rtol·θ₁ (J v_i = θ_i u_i holds by construction).

    Near the end (i) and (ii) are looked at between the two products of a step as well (k = 1).

    ``converged`` is exactly (i) and (ii), with both ends widened by `rounding_allowance` for the steps made and by the
    ``accuracy.product`` of the operator. A map is done when it has converged, or when rounding alone keeps it from
    that. Such maps get four more runs from independent starts, which a tenth of 1 − confidence is reserved for where
    there is rounding to speak of (float32, or errors of products); a note names those that stay open. Maps that are
    done leave the batch.

    The process runs on J or on Jᵀ, whichever has the shorter start. In the end one more product per triplet gives
    ``value`` = ‖J v‖ for the unit vector v found (‖Jᵀ u‖ when it ran on Jᵀ): the lower bound holds by itself, whatever
    rounding did before. Where the error of the operator (`Accuracy.point`) is above that of all
    products, as for whole models, J v = Σ q_j J v_j is put together from those made (k = 1).

    By (ii) each of ``values`` lies within its residual of a singular value. The upper bound shows for the first only
    that none was passed over: copies of a repeated singular value are invisible to a Krylov space. Where k exceeds the
    rank, the vectors of the values that are zero up to rounding are orthonormal like the others, with their true
    residuals.

    Args:
        op: the Jacobians.
        k: how many triplets.
        rtol: relative accuracy.
        confidence: probability with which ``upper`` shall hold, for each map by itself.
        seed: of the random start, drawn from a stream of its own, so that it is independent of an operator made with
            the same seed.
        max_steps: of two products each; a map that is not done by then has ``converged`` False and true bounds.
        basis_limit: vectors stored per side before a restart; by default as many as fit in 1 GiB, within [k + 8, 300].
        start: ``batch_shape + in_shape``, a guess of the right singular vector. A start that is not random gives no
            upper bound: ``upper`` is infinite, ``confidence`` 0, and only (ii) decides.
        progress: called after every step with the number of steps and the largest value so far.
        stop_at: a map whose value has reached this (one number, or one per map) needs to know no more: "is it at least
            L?" is answered long before the norm is known. Its bounds are true, but it does not count as converged.
        stop_below: likewise for a map whose upper end has come down to this: "is it at most L?".
        verify: whether to make those last products; without them there is no lower end and there are no left vectors.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> matrix = torch.diag(torch.linspace(1, 2, 500, dtype=torch.float64))
    >>> m = golub_kahan(MatrixOperator(matrix), rtol=1e-4)
    >>> bool(m.lower <= 2 <= m.upper <= 1.0001 * m.lower), bool(m.converged)
    (True, True)
    """
    if op.out_size < op.in_size and start is None:
        limits = max_steps, basis_limit, None, progress
        turned = golub_kahan(op.adjoint, k, rtol, confidence, seed, *limits, stop_at, stop_below, verify)
        return replace(turned, left=turned.right, right=turned.left)
    started = time.perf_counter()
    products = FlatProducts(op)
    limit = _check(op, k, rtol, max_steps, basis_limit)
    generator = start_stream(seed)
    smallest_component(op.in_size, confidence)  # refuses what is no probability
    with torch.no_grad():
        first = _random_start(op, generator) if start is None else _given_start(op, start)
        process = Bidiagonalisation(products, first, generator)
        del first
        results = Triplets(op, Target.of(op, k, rtol, stop_at, stop_below), start is None, products.scale)
        # Decided before anything is known of the start, so that the two chances of failing add up to 1 − confidence.
        spare = _SPARE if op.dtype == torch.float32 or bool((results.product_error > 0).any()) else 0.0
        failing = 1 - confidence
        bound = _upper_bound(products, results, 1 - (1 - spare) * failing) if start is None else None
        _run(process, bound, results, max_steps, limit, progress)
        del process
        count = products.count + (results.verify(generator) if verify else 0)
        again = results.limited & ~results.converged & (results.values[:, 0] < results.target.stop_at)
        if spare and bool(again.any()) and start is None and rtol >= results.smallest_rtol:
            each = 1 - (spare * failing) ** (1 / _REPEATS)
            count += _repeat(results, again, each, seed, max_steps, limit)
    notes = [] if start is None else ["no upper bound, as the start was given: converged means the residuals alone"]
    if rtol < results.smallest_rtol:
        notes.append(f"rtol={rtol:g} is below what {str(op.dtype).removeprefix('torch.')} products can resolve")
    if k > 1:
        notes.append("repeated singular values may be counted once")
    return results.measurement(count, confidence if start is None else 0.0, started, tuple(notes))


def _upper_bound(products: FlatProducts, results: Triplets, confidence: float) -> LanczosBound:
    op, eps = products.op, torch.finfo(products.op.dtype).eps
    error = results.product_error[products.maps] / products.scale
    return LanczosBound(len(products.maps), op.in_size, confidence, eps, error, op.accuracy.alignment)


def _repeat(results: Triplets, maps: Tensor, confidence: float, seed: int, max_steps: int, limit: int) -> int:
    """Lower the upper end of maps that rounding limits, by runs from independent starts; products made.

    The largest upper end of r independent runs is false only when all are: runs of confidence 1 − p^{1/r} give one of
    1 − p. Each needs a far larger component on x than one run of confidence 1 − p would, and rounding hides less.
    """
    op, count = results.op, 0
    largest = torch.zeros_like(results.upper)
    for i in range(_REPEATS):
        generator = start_stream(seed, run=i + 1)
        products = FlatProducts(op, results.scale)
        products.keep(maps)
        process = Bidiagonalisation(products, _random_start(op, generator)[maps.to(op.device)], generator)
        again = Triplets(op, Target.of(op, 1, results.rtol), True, results.scale)
        _run(process, _upper_bound(products, again, confidence), again, max_steps, limit, None)
        count += products.count
        largest = torch.maximum(largest, again.upper)
        if bool((largest >= results.upper)[maps].all()):
            break
    results.upper[maps] = torch.minimum(results.upper, largest)[maps]
    return count


def _run(
    process: Bidiagonalisation,
    bound: LanczosBound | None,
    results: Triplets,
    max_steps: int,
    limit: int,
    progress: Callable[[int, float], None] | None,
) -> None:
    running = torch.ones(len(process.products.maps), dtype=torch.bool)  # of the maps still in the process
    value = 0.0
    for steps in range(1, max_steps + 1):
        results.count_step()
        process.step_left()
        near = 0 < process.size < _ALWAYS_CHECK and results.promising(process.products.maps[running])
        if bound is not None and near:
            small = process.project_halfway()
            done = running & results.settled(small, bound, process.products.maps)
            if bool(done.any()):
                results.record(process, small, bound, done)
                running = running & ~done
            if not bool(running.any()):
                if progress is not None:
                    progress(steps, max(value, float((small.values[:, 0] * process.products.scale).max())))
                return
        process.step_right()
        m, exhausted = process.size, process.beta == 0
        full, last = m == limit, steps == max_steps
        due = m <= _ALWAYS_CHECK or m % (m // 16) == 0 or full or last or bool((exhausted & running).any())
        if due:
            small = process.project()
            value = max(value, float((small.theta[:, 0] * process.products.scale).max()))
        if progress is not None:
            progress(steps, value)
        if not due:
            continue
        done = running
        if not last:
            reached = small.theta[:, 0] * process.products.scale >= results.target.stop_at[process.products.maps]
            done = (
                running
                & (m >= results.k)
                & (exhausted | reached | results.settled(small, bound, process.products.maps))
            )
        if bool(done.any()):
            results.record(process, small, bound, done)
            running = running & ~done
        if not bool(running.any()):
            return
        if full:
            keep = results.k + (limit - results.k) // 2
            if bound is not None:
                bound.restart(small, keep)
            process.restart(small, keep)
        if bool((exhausted & running).any()):
            process.refresh(exhausted & running)
        if 4 * int(running.sum()) <= 3 * len(running):
            process.keep(running)
            if bound is not None:
                bound.keep(running)
            running = running[running]


def _check(op: JacobianOperator, k: int, rtol: float, max_steps: int, basis_limit: int | None) -> int:
    """The number of basis vectors to keep, once the options make sense."""
    rank = min(op.in_size, op.out_size)
    if not 1 <= k <= rank:
        raise InvalidInput(f"k={k} singular values do not exist for {op!r}: choose 1 to {rank}.")
    if not 0 < rtol < 1:
        raise InvalidInput(f"rtol is a relative accuracy strictly between 0 and 1, not {rtol}.")
    if max_steps < k:
        raise InvalidInput(f"max_steps={max_steps} cannot give k={k} triplets: allow at least {k} steps.")
    if basis_limit is None:
        per_step = op.batch_size * (op.in_size + op.out_size) * op.dtype.itemsize
        basis_limit = min(max(BASIS_BYTES // per_step, k + 8), 300)
    if basis_limit < min(k + 2, op.in_size):
        raise InvalidInput(f"basis_limit={basis_limit} is too small for k={k}: allow at least {k + 2} vectors.")
    return min(basis_limit, op.in_size)


def _random_start(op: JacobianOperator, generator: torch.Generator) -> Tensor:
    return random_start(op.batch_size, op.in_size, torch.empty((), dtype=op.dtype, device=op.device), generator)


def _given_start(op: JacobianOperator, start: Tensor) -> Tensor:
    if start.shape != op.batch_shape + op.in_shape:
        raise InvalidInput(f"start has shape {tuple(start.shape)}: give {tuple(op.batch_shape + op.in_shape)}.")
    v = start.detach().to(dtype=op.dtype, device=op.device).reshape(op.batch_size, op.in_size)
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64)
    if not bool(torch.isfinite(length).all() & (length > 0).all()):
        raise InvalidInput("start holds a zero, NaN or infinite vector: give one nonzero finite vector per map.")
    return v / length.to(v)
