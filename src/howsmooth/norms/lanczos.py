"""The spectral norm and the top singular triplets of Jacobians from products, with bounds on both sides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator, random_start, start_stream
from howsmooth.norms.bidiagonal import Bidiagonalisation, orthonormalised
from howsmooth.norms.counted_products import (
    FlatProducts,
    harmless_scale,
    lengths,
    product_error,
    rounding_allowance,
    widened,
)
from howsmooth.norms.lanczos_bound import LanczosBound, RitzProjection, smallest_component
from howsmooth.norms.measurement import Measurement, NormKind, measurement_between, rounding_note, uncrossed

BASIS_BYTES = 2**30
_SPARE = 0.1  # share of the chance of failing that is reserved for maps which rounding limits,
_REPEATS = 4  # and the number of runs they get from it
_ALWAYS_CHECK = 32  # up to this size the small decomposition is checked after every step, later every 1/16 of the size
_PROMISING = 2.0  # times what may be open, by a guess that is not exact


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
        results = Triplets(op, k, rtol, products.scale, stop_at, stop_below)
        # Decided before anything is known of the start, so that the two chances of failing add up to 1 − confidence.
        spare = _SPARE if op.dtype == torch.float32 or (results.product_error > 0).any() else 0.0
        failing = 1 - confidence
        results.run(process, None if start is not None else 1 - (1 - spare) * failing, max_steps, limit, progress)
        del process
        count = products.count + (results.verify(generator) if verify else 0)
        again = results.limited & ~results.converged & (results.values[:, 0] < results.stop_at)
        if spare and again.any() and start is None and rtol >= results.smallest_rtol:
            each = 1 - (spare * failing) ** (1 / _REPEATS)
            count += _repeat(results, again, each, seed, max_steps, limit)
    notes = [] if start is None else ["no upper bound, as the start was given: converged means the residuals alone"]
    if rtol < results.smallest_rtol:
        notes.append(f"rtol={rtol:g} is below what {str(op.dtype).removeprefix('torch.')} products can resolve")
    if k > 1:
        notes.append("repeated singular values may be counted once")
    return results.measurement(count, confidence if start is None else 0.0, started, tuple(notes))


def spectral_norm_and_products(
    op: JacobianOperator, rtol: float, confidence: float, seed: int
) -> tuple[Measurement, FlatProducts]:
    """A rough ‖J‖₂, as a bound on other norms, and products whose squares neither overflow nor vanish."""
    spectral = golub_kahan(op, rtol=min(10 * rtol, 0.1), confidence=confidence, seed=seed)
    return spectral, FlatProducts(op, harmless_scale(spectral.value.flatten(), op.dtype))


def below_spectral_norm(
    op: JacobianOperator,
    estimate: Callable[[FlatProducts, Measurement], Tensor],
    dimension: int,
    rtol: float,
    confidence: float,
    seed: int,
    norm: NormKind,
    method: str,
) -> Measurement:
    """A norm that is at most √dimension·‖J‖₂, its upper end; an estimate by products attains the lower one."""
    started, factor = time.perf_counter(), math.sqrt(dimension)
    spectral, flat = spectral_norm_and_products(op, rtol, confidence, seed)
    value = estimate(flat, spectral)
    lower, _ = widened(value, rounding_allowance(op.dtype, 1, op.accuracy.point), factor * product_error(op))
    lower, upper, notes = uncrossed(lower, factor * spectral.upper.flatten())
    notes = ("the value is the largest one found, hence a lower bound", *notes)
    facts = {"products": flat.count + spectral.products, "seconds": time.perf_counter() - started}
    return measurement_between(op, value, (lower, upper), rtol, confidence, notes, norm=norm, method=method, **facts)


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
        again = Triplets(op, 1, results.rtol, results.scale)
        again.run(process, confidence, max_steps, limit)
        count += products.count
        largest = torch.maximum(largest, again.upper)
        if (largest >= results.upper)[maps].all():
            break
    results.upper[maps] = torch.minimum(results.upper, largest)[maps]
    return count


class Triplets:
    """The k leading singular triplets of every map of the batch, filled in as the maps finish.

    ``scale`` is that of the products (`FlatProducts.scale`): the process sees J/scale, everything here is J's own.
    A map is finished, too, when its value has reached ``stop_at``, or when its upper end has come down to
    ``stop_below``: one number, or one per map, and None for no such stop. ``bounded`` tells whether the start was
    random, so that there is an upper bound. ``open`` holds the distance of each map from convergence after its last two
    steps (`LanczosBound.judge`).
    """

    def __init__(
        self,
        op: JacobianOperator,
        k: int,
        rtol: float,
        scale: Tensor,
        stop_at: Tensor | float | None = None,
        stop_below: Tensor | float | None = None,
    ):
        maps = op.batch_size
        self.op, self.k, self.rtol, self.scale = op, k, rtol, scale
        self.stop_at = _per_map(op, math.inf if stop_at is None else stop_at, "stop_at")
        self.stop_below = _per_map(op, 0.0 if stop_below is None else stop_below, "stop_below")
        self.steps, self.bounded = 0, True
        self.product_error = product_error(op)
        self.values = torch.zeros(maps, k, dtype=torch.float64)
        self.residuals = torch.zeros_like(self.values)
        self.lower, self.slip = torch.zeros(2, maps, dtype=torch.float64)
        self.upper = torch.full_like(self.lower, math.inf)
        self.accurate, self.limited = torch.zeros(2, maps, dtype=torch.bool)
        self.open = torch.full((2, maps), math.inf, dtype=torch.float64)
        self.left = torch.zeros(maps, k, op.out_size, dtype=op.dtype, device=op.device)
        self.right = torch.zeros(maps, k, op.in_size, dtype=op.dtype, device=op.device)

    @property
    def allowance(self) -> float:
        return rounding_allowance(self.op.dtype, 2 * self.steps, self.op.accuracy.point)

    @property
    def reuses(self) -> bool:
        """Whether J v is taken from the products made: where the error of J itself is above all of theirs.

        The error of Σ q_j J v_j, |q| = 1, is at most √m times that of one product, which the allowance includes.
        """
        rounding = rounding_allowance(self.op.dtype, 2 * self.steps)
        return self.k == 1 and rounding <= 2 * self.op.accuracy.point and not (self.product_error > 0).any()

    @property
    def smallest_rtol(self) -> float:
        return 4 * self.allowance

    def run(
        self,
        process: Bidiagonalisation,
        confidence: float | None,
        max_steps: int,
        limit: int,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """Step until every map of the process is finished; no upper bound without a ``confidence``."""
        products, bound = process.products, None
        self.bounded = confidence is not None
        if confidence is not None:
            error, eps = self.product_error[products.maps] / products.scale, torch.finfo(self.op.dtype).eps
            alignment = self.op.accuracy.alignment
            bound = LanczosBound(len(products.maps), self.op.in_size, confidence, eps, error, alignment)
        running = torch.ones(len(products.maps), dtype=torch.bool)  # of the maps still in the process
        value = 0.0
        for step in range(1, max_steps + 1):
            self.steps += 1
            process.step_left()
            near = 0 < process.size < _ALWAYS_CHECK and self._promising(products.maps[running])
            if bound is not None and near:
                small = process.project_halfway()
                done = running & self._settled(small, bound, products.maps)
                self._record(process, small, bound, done)
                running = running & ~done
                if not running.any():
                    if progress is not None:
                        progress(step, max(value, float((small.values[:, 0] * products.scale).max())))
                    return
            process.step_right()
            m, exhausted = process.size, process.beta == 0
            full, last = m == limit, step == max_steps
            due = m <= _ALWAYS_CHECK or m % (m // 16) == 0 or full or last or bool((exhausted & running).any())
            if due:
                small = process.project()
                largest = small.theta[:, 0] * products.scale
                value = max(value, float(largest.max()))
            if progress is not None:
                progress(step, value)
            if not due:
                continue
            done = running
            if not last:
                reached = exhausted | (largest >= self.stop_at[products.maps])
                done = running & (m >= self.k) & (reached | self._settled(small, bound, products.maps))
            self._record(process, small, bound, done)
            running = running & ~done
            if not running.any():
                return
            if full:
                ritz = self.k + (limit - self.k) // 2
                if bound is not None:
                    bound.restart(small, ritz)
                process.restart(small, ritz)
            if (exhausted & running).any():
                process.refresh(exhausted & running)
            if 4 * int(running.sum()) <= 3 * len(running):
                process.keep(running)
                if bound is not None:
                    bound.keep(running)
                running = running[running]

    def _settled(self, small: RitzProjection, bound: LanczosBound | None, maps: Tensor) -> Tensor:
        """Whether each of ``maps`` has reached rtol, all that rounding lets it reach, or an upper end small enough."""
        top = small.values[:, 0]
        rtol = max(self.rtol, self.smallest_rtol)
        if bound is None:
            return (small.residuals[:, : self.k].abs() <= rtol * top[:, None]).all(-1)
        within = torch.maximum(rtol * top, 2 * bound.product_error)
        target = self._target(top, bound.product_error)
        accurate = (_residuals(small, self.k, target) <= within[:, None]).all(-1)
        has_limit = bool((self.stop_below[maps] > 0).any())
        if not (has_limit or accurate.any()):
            return accurate
        open_share, limited = bound.judge(target**2, small)
        if small.skew is None:
            self.open[:, maps] = torch.stack([self.open[1, maps], open_share])
        settled = accurate & ((open_share < 1) | limited)
        if has_limit:
            low_enough = (self.stop_below[maps] / self.scale[maps] - bound.product_error) / (1 + self.allowance)
            possible = low_enough > top * (1 + self.allowance)
            settled |= possible & bound.excludes(torch.where(possible, low_enough, 2 * top + 1) ** 2, small)
        return settled

    def _promising(self, maps: Tensor) -> bool:
        """Whether half a step may settle one of ``maps``: the open distance falls about as much as in half of the last.

        It always may where an upper end below some number is requested.
        """
        before, now = self.open[:, maps]
        near = (now * torch.sqrt(now / before) < _PROMISING) | (self.stop_below[maps] > 0)
        return self.k == 1 and bool(near.any())

    def _target(self, top: Tensor, error: Tensor) -> Tensor:
        """The upper bound at which both ends, widened, are rtol apart, or as close as rounding allows."""
        rtol = max(self.rtol, self.smallest_rtol)
        wanted = (1 + rtol) * (top * (1 - self.allowance) - error) - error
        return torch.maximum(wanted / (1 + self.allowance), top * (1 + self.allowance) + error)

    def _record(
        self, process: Bidiagonalisation, small: RitzProjection, bound: LanczosBound | None, done: Tensor
    ) -> None:
        """Write down the results of the finished maps of the process, where ``done`` is true."""
        if not done.any():
            return
        where, k = process.products.maps[done], min(self.k, process.size)
        scale = self.scale[where]
        self.values[where, :k] = small.values[done, :k] * scale[:, None]
        largest = small.values[:, 0]
        if bound is not None:
            # Should the event of small probability happen and a later cycle pass the bound, the bound gives way.
            largest = torch.maximum(bound.tighten(small), largest)
            upper = largest[done] * (1 + self.allowance)
            self.upper[where] = upper * scale + self.product_error[where]
            target = self._target(small.values[:, 0], bound.product_error)
            self.limited[where] = bound.judge(target**2, small)[1][done]
        self.residuals[where, :k] = _residuals(small, k, largest)[done] * scale[:, None]
        within = self.rtol * self.values[where, :1]
        self.accurate[where] = (self.residuals[where] <= within).all(-1) & (process.size >= self.k)
        self.right[where.to(self.op.device), :k] = process.right_vectors(small, done, k)
        if self.reuses:
            self.left[where.to(self.op.device), :k] = process.images(small, done, k)
            self.slip[where] = small.drift[0, done].norm(dim=-1) * scale  # of Σ q_j e_j, |q| = 1, after restarts too

    def verify(self, generator: torch.Generator) -> int:
        """Take every value anew as ‖J v‖ of its unit vector v, which also gives the left vectors; products made."""
        products, reuses = FlatProducts(self.op, self.scale), self.reuses
        for i in range(self.k):
            right = self.right[:, i]
            moved = self.left[:, i].clone() if reuses else products.matvec(right)
            length, norm = lengths(right), lengths(moved)
            self.values[:, i] = torch.where(length > 0, norm / length, 0.0).cpu() * self.scale
            inverse = torch.where(norm > 0, 1 / norm, 0.0)
            self.left[:, i] = moved * inverse.to(moved)[:, None]
            self._complete(i, moved, products, generator)
        allowance = self.allowance if reuses else rounding_allowance(self.op.dtype, 1, self.op.accuracy.point)
        error = self.product_error + (self.slip if reuses else 0.0)
        self.lower, _ = widened(self.values[:, 0], allowance, error)
        return products.count

    def _complete(self, i: int, moved: Tensor, products: FlatProducts, generator: torch.Generator) -> None:
        """Where J v is rounding, any left vector orthogonal to those before will do; its residual is taken for true."""
        limit = self.allowance * self.values[:, 0] + self.product_error if i else 0.0
        null = self.values[:, i] <= limit
        if not null.any():
            return
        device = null.to(self.op.device)
        basis = self.left[device, :i]
        unit = orthonormalised(moved[device], basis, generator)
        self.left[device, i] = unit
        back = products.rmatvec(self.left[:, i])[device].double()
        sigma = (self.values[null, i] / self.scale[null]).to(back)[:, None]
        ahead = moved[device].double() - sigma * unit.double()
        residual = torch.maximum(ahead.norm(dim=-1), (back - sigma * self.right[device, i].double()).norm(dim=-1))
        self.residuals[null, i] = residual.cpu() * self.scale[null]
        self.accurate[null] &= self.residuals[null, i] <= self.rtol * self.values[null, 0]

    @property
    def converged(self) -> Tensor:
        """Whether the residuals are small and, unless the start was given, the ends are ``rtol`` apart."""
        close = (self.lower <= self.upper) & (self.upper <= (1 + self.rtol) * self.lower)
        return self.accurate & close if self.bounded else self.accurate

    def measurement(self, products: int, confidence: float, started: float, notes: tuple[str, ...]) -> Measurement:
        batch, triplets = self.op.batch_shape, () if self.k == 1 else (self.k,)
        lower, upper, crossed = uncrossed(self.lower, self.upper)
        converged = self.converged
        inaccurate = 3 * self.product_error > self.rtol * self.values[:, 0]  # then `_target` is out of reach
        return Measurement(
            value=self.values[:, 0].reshape(batch),
            lower=lower.reshape(batch),
            upper=upper.reshape(batch),
            confidence=confidence,
            norm=2,
            converged=converged.reshape(batch),
            products=products,
            method="golub-kahan",
            dtype=self.op.dtype,
            seconds=time.perf_counter() - started,
            left=self.left.reshape(*batch, *triplets, *self.op.out_shape),
            right=self.right.reshape(*batch, *triplets, *self.op.in_shape),
            values=self.values.reshape(*batch, self.k),
            residuals=self.residuals.reshape(*batch, self.k),
            rounding=self.op.accuracy.guarantee,
            notes=notes + crossed + rounding_note((self.limited | inaccurate) & ~converged, self.op.dtype),
        )


def _residuals(small: RitzProjection, k: int, largest: Tensor) -> Tensor:
    """‖Jᵀu_i − θ_i v_i‖ of the first k triplets, where no singular value exceeds ``largest``.

    Between the halves of a step ρ = ‖J v − θu‖ is known. For u' = Jv/|Jv| it makes Jᵀu' − |Jv|v = (ρ/|Jv|) Jᵀu_{m+1}
    less its part along v, as ⟨Jᵀu_{m+1}, v⟩ = ρ: at most ρσ₁/|Jv|.
    """
    residuals = small.residuals[:, :k].abs()
    return residuals if small.skew is None else residuals * largest[:, None] / small.values[:, :k]


def _per_map(op: JacobianOperator, number: Tensor | float, name: str) -> Tensor:
    if isinstance(number, Tensor) and number.shape not in (torch.Size(()), op.batch_shape):
        raise InvalidInput(f"{name} is one number or one per map, got shape {tuple(number.shape)}.")
    return torch.as_tensor(number, dtype=torch.float64).cpu().expand(op.batch_shape).flatten()


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
