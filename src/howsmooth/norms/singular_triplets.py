"""The results of a Golub–Kahan run for every map: values, ends, vectors and their residuals."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.bidiagonal import Bidiagonalisation, orthonormalised
from howsmooth.norms.counted_products import (
    FlatProducts,
    lengths,
    product_error,
    rounding_allowance,
    widened,
)
from howsmooth.norms.lanczos_bound import LanczosBound, RitzProjection
from howsmooth.norms.measurement import Measurement, rounding_note, uncrossed

_PROMISING = 2.0  # times what may be open, by a guess that is not exact


@dataclass(frozen=True)
class Target:
    """The goal of a run.

    Attributes:
        k, rtol: the number of triplets, and their relative accuracy.
        stop_at, stop_below: a map whose value has reached the first, or whose upper end has come down to the second,
            is finished; one number per map.
    """

    k: int
    rtol: float
    stop_at: Tensor
    stop_below: Tensor

    @classmethod
    def of(
        cls,
        op: JacobianOperator,
        k: int,
        rtol: float,
        stop_at: Tensor | float | None = None,
        stop_below: Tensor | float | None = None,
    ) -> Target:
        """From numbers, or one per map; None for no such stop."""

        def per_map(number: Tensor | float, name: str) -> Tensor:
            if isinstance(number, Tensor) and number.shape not in (torch.Size(()), op.batch_shape):
                raise InvalidInput(f"{name} is one number or one per map, got shape {tuple(number.shape)}.")
            return torch.as_tensor(number, dtype=torch.float64).cpu().expand(op.batch_shape).reshape(-1)

        above, below = math.inf if stop_at is None else stop_at, 0.0 if stop_below is None else stop_below
        return cls(k, rtol, per_map(above, "stop_at"), per_map(below, "stop_below"))


class Triplets:
    """The k leading singular triplets of every map of the batch, filled in as the maps finish.

    ``scale`` is that of the products (`FlatProducts.scale`): the process sees J/scale, everything here is J's own.
    ``bounded`` tells whether the start was random, so that there is an upper bound. ``open`` holds the distance of each
    map from convergence after its last two steps (`LanczosBound.judge`).
    """

    def __init__(self, op: JacobianOperator, target: Target, bounded: bool, scale: Tensor):
        maps, k = op.batch_size, target.k
        self.op, self.target, self.bounded, self.scale, self.steps = op, target, bounded, scale, 0
        self.k, self.rtol = k, target.rtol
        self.product_error = product_error(op)
        self.values = torch.zeros(maps, k, dtype=torch.float64)
        self.residuals = torch.zeros_like(self.values)
        self.lower = torch.zeros(maps, dtype=torch.float64)
        self.upper = torch.full_like(self.lower, math.inf)
        self.accurate = torch.zeros(maps, dtype=torch.bool)
        self.open = torch.full((2, maps), math.inf, dtype=torch.float64)
        self.limited = torch.zeros(maps, dtype=torch.bool)
        self.left = torch.zeros(maps, k, op.out_size, dtype=op.dtype, device=op.device)
        self.right = torch.zeros(maps, k, op.in_size, dtype=op.dtype, device=op.device)
        self.slip = torch.zeros_like(self.lower)

    def count_step(self) -> None:
        """One more step of two products, for which the ends allow."""
        self.steps += 1

    @property
    def allowance(self) -> float:
        return rounding_allowance(self.op.dtype, 2 * self.steps, self.op.accuracy.point)

    @property
    def reuses(self) -> bool:
        """Whether J v is taken from the products made: where the error of J itself is above all of theirs.

        The error of Σ q_j J v_j, |q| = 1, is at most √m times that of one product, which the allowance includes.
        """
        rounding = rounding_allowance(self.op.dtype, 2 * self.steps)
        return self.k == 1 and rounding <= 2 * self.op.accuracy.point and not bool((self.product_error > 0).any())

    @property
    def smallest_rtol(self) -> float:
        return 4 * self.allowance

    def settled(self, small: RitzProjection, bound: LanczosBound | None, maps: Tensor) -> Tensor:
        """Whether each of ``maps`` has reached rtol, all that rounding lets it reach, or an upper end small enough."""
        top = small.values[:, 0]
        rtol = max(self.rtol, self.smallest_rtol)
        if bound is None:
            return (small.residuals[:, : self.k].abs() <= rtol * top[:, None]).all(-1)
        within = torch.maximum(rtol * top, 2 * bound.product_error)
        target = self._target(top, bound.product_error)
        accurate = (_residuals(small, self.k, target) <= within[:, None]).all(-1)
        has_limit = bool((self.target.stop_below[maps] > 0).any())
        if not (has_limit or bool(accurate.any())):
            return accurate
        open_share, limited = bound.judge(target**2, small)
        if small.skew is None:
            self.open[:, maps] = torch.stack([self.open[1, maps], open_share])
        settled = accurate & ((open_share < 1) | limited)
        if has_limit:
            low_enough = (self.target.stop_below[maps] / self.scale[maps] - bound.product_error) / (1 + self.allowance)
            possible = low_enough > top * (1 + self.allowance)
            settled |= possible & bound.excludes(torch.where(possible, low_enough, 2 * top + 1) ** 2, small)
        return settled

    def promising(self, maps: Tensor) -> bool:
        """Whether half a step may settle one of ``maps``: what is open falls about as much as in half of the last.

        It always may where an upper end below some number is requested.
        """
        before, now = self.open[:, maps]
        near = (now * torch.sqrt(now / before) < _PROMISING) | (self.target.stop_below[maps] > 0)
        return self.k == 1 and bool(near.any())

    def _target(self, top: Tensor, error: Tensor) -> Tensor:
        """The upper bound at which both ends, widened, are rtol apart, or as close as rounding allows."""
        rtol = max(self.rtol, self.smallest_rtol)
        wanted = (1 + rtol) * (top * (1 - self.allowance) - error) - error
        return torch.maximum(wanted / (1 + self.allowance), top * (1 + self.allowance) + error)

    def record(
        self, process: Bidiagonalisation, small: RitzProjection, bound: LanczosBound | None, done: Tensor
    ) -> None:
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
        if not bool(null.any()):
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
