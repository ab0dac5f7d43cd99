"""What a Golub–Kahan run found out about every map: values, ends, vectors and how far they can be trusted."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.bidiagonal import Bidiagonalisation, orthonormalised
from howsmooth.norms.counted_products import (
    FlatProducts,
    lengths,
    product_error,
    rounding_allowance,
    widened,
)
from howsmooth.norms.lanczos_bound import Certificate, Projection
from howsmooth.norms.measurement import Measurement, rounding_note, uncrossed

_PROMISING = 2.0  # times what may be open, by a guess that is not exact


class Triplets:
    """The k leading singular triplets of every map of the batch, filled in as the maps finish.

    ``scale`` is that of the products (`FlatProducts.scale`): the process sees J/scale, everything here is J's own.
    ``open`` says how far each map was from being certified after its last two steps (`Certificate.judge`).
    """

    def __init__(self, op: JacobianOperator, k: int, rtol: float, certifiable: bool, scale: Tensor):
        maps = op.batch_size
        self.op, self.k, self.rtol, self.certifiable, self.scale, self.steps = op, k, rtol, certifiable, scale, 0
        self.noise = product_error(op)
        self.values = torch.zeros(maps, k, dtype=torch.float64)
        self.residuals = torch.zeros_like(self.values)
        self.lower = torch.zeros(maps, dtype=torch.float64)
        self.upper = torch.full_like(self.lower, math.inf)
        self.enough, self.little = torch.full_like(self.lower, math.inf), torch.zeros_like(self.lower)
        self.accurate = torch.zeros(maps, dtype=torch.bool)
        self.open = torch.full((2, maps), math.inf, dtype=torch.float64)
        self.limited = torch.zeros(maps, dtype=torch.bool)
        self.left = torch.zeros(maps, k, op.out_size, dtype=op.dtype, device=op.device)
        self.right = torch.zeros(maps, k, op.in_size, dtype=op.dtype, device=op.device)
        self.slip = torch.zeros_like(self.lower)

    @property
    def allowance(self) -> float:
        return rounding_allowance(self.op.dtype, 2 * self.steps, self.op.accuracy.point)

    @property
    def reuses(self) -> bool:
        """Whether J v is taken from the products made: where J is blurred by more than all of them can have lost.

        The error of Σ q_j J v_j, |q| = 1, is at most √m times that of one product: the allowance has it, noise has not.
        """
        lost = rounding_allowance(self.op.dtype, 2 * self.steps)
        return self.k == 1 and lost <= 2 * self.op.accuracy.point and not bool((self.noise > 0).any())

    @property
    def least_rtol(self) -> float:
        return 4 * self.allowance

    def settled(self, small: Projection, certificate: Certificate | None, maps: Tensor) -> Tensor:
        """Whether each of ``maps`` has reached rtol, all that rounding lets it reach, or an upper end small enough."""
        top = small.values[:, 0]
        rtol = max(self.rtol, self.least_rtol)
        if certificate is None:
            return (small.residuals[:, : self.k].abs() <= rtol * top[:, None]).all(-1)
        within = torch.maximum(rtol * top, 2 * certificate.noise)
        target = self._target(top, certificate.noise)
        accurate = (_residuals(small, self.k, target) <= within[:, None]).all(-1)
        asked = bool((self.little[maps] > 0).any())
        if not (asked or bool(accurate.any())):
            return accurate
        open_share, limited = certificate.judge(target**2, small)
        if small.skew is None:
            self.open[:, maps] = torch.stack([self.open[1, maps], open_share])
        settled = accurate & ((open_share < 1) | limited)
        if asked:
            little = (self.little[maps] / self.scale[maps] - certificate.noise) / (1 + self.allowance)
            possible = little > top * (1 + self.allowance)
            settled |= possible & certificate.excludes(torch.where(possible, little, 2 * top + 1) ** 2, small)
        return settled

    def promising(self, maps: Tensor) -> bool:
        """Whether half a step may settle one of ``maps``: what is open falls about as much as in half of the last.

        It always may where an upper end below some number is all that is asked for.
        """
        before, now = self.open[:, maps]
        near = (now * torch.sqrt(now / before) < _PROMISING) | (self.little[maps] > 0)
        return self.k == 1 and bool(near.any())

    def _target(self, top: Tensor, noise: Tensor) -> Tensor:
        """Where the certificate has to reach so that both ends, widened, are rtol apart (or least_rtol, or noise)."""
        rtol = max(self.rtol, self.least_rtol)
        wanted = (1 + rtol) * (top * (1 - self.allowance) - noise) - noise
        return torch.maximum(wanted / (1 + self.allowance), top * (1 + self.allowance) + noise)

    def record(
        self, process: Bidiagonalisation, small: Projection, certificate: Certificate | None, done: Tensor
    ) -> None:
        where, k = process.products.maps[done], min(self.k, process.size)
        scale = self.scale[where]
        self.values[where, :k] = small.values[done, :k] * scale[:, None]
        largest = small.values[:, 0]
        if certificate is not None:
            # Should the event of small probability happen and a later cycle pass the bound, the bound gives way.
            largest = torch.maximum(certificate.tighten(small), largest)
            upper = largest[done] * (1 + self.allowance)
            self.upper[where] = upper * scale + self.noise[where]
            target = self._target(small.values[:, 0], certificate.noise)
            self.limited[where] = certificate.judge(target**2, small)[1][done]
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
        error = self.noise + (self.slip if reuses else 0.0)
        self.lower, _ = widened(self.values[:, 0], allowance, error)
        return products.count

    def _complete(self, i: int, moved: Tensor, products: FlatProducts, generator: torch.Generator) -> None:
        """Where J v is rounding, any left vector orthogonal to those before will do; its residual is taken for true."""
        null = self.values[:, i] <= self.allowance * self.values[:, 0] + self.noise if i else self.values[:, 0] == 0
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
        """Whether the residuals are small and, unless the start was given, the value is certified."""
        certified = (self.lower <= self.upper) & (self.upper <= (1 + self.rtol) * self.lower)
        return self.accurate & certified if self.certifiable else self.accurate

    def measurement(self, products: int, confidence: float, started: float, notes: tuple[str, ...]) -> Measurement:
        batch, triplets = self.op.batch_shape, () if self.k == 1 else (self.k,)
        lower, upper, crossed = uncrossed(self.lower, self.upper)
        converged = self.converged
        noisy = 3 * self.noise > self.rtol * self.values[:, 0]  # then `_target` is out of reach
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
            notes=notes + crossed + rounding_note((self.limited | noisy) & ~converged, self.op.dtype),
        )


def _residuals(small: Projection, k: int, largest: Tensor) -> Tensor:
    """‖Jᵀu_i − θ_i v_i‖ of the first k triplets, where no singular value exceeds ``largest``.

    Between the halves of a step ρ = ‖J v − θu‖ is known. For u' = Jv/|Jv| it makes Jᵀu' − |Jv|v = (ρ/|Jv|) Jᵀu_{m+1}
    less its part along v, as ⟨Jᵀu_{m+1}, v⟩ = ρ: at most ρσ₁/|Jv|.
    """
    residuals = small.residuals[:, :k].abs()
    return residuals if small.skew is None else residuals * largest[:, None] / small.values[:, :k]
