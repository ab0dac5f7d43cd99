r"""Fixed points of contractions, one per item of a batch, with a bound on the remaining error.

Let T be a contraction, :math:`|T(a)-T(b)| \le c|a-b|` with c < 1. It has one fixed point x*, and (Banach 1922) at any x̂

.. math:: |T(\hat x) - x^*| \le \frac{c}{1-c}\,|T(\hat x)-\hat x|,

for every x̂. With a computed T̃(x̂) that is off by at most E,

.. math:: |\tilde T(\hat x) - x^*| \le \frac{c\,|\tilde T(\hat x)-\hat x| + E}{1-c}.

So x̂ may come from Anderson acceleration (1965): the combination of the last points whose
linearised residual is smallest. A plain step x̂ ← T(x̂) shrinks the residual by c at least; an accelerated one is
accepted only when it does as well, otherwise the plain step is taken from the last accepted point. Hence at least every
second evaluation shrinks the residual by c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howsmooth.errors import DoesNotApply, HowsmoothError

FixedPointMap = Callable[[Tensor, Tensor], Tensor]
RoundingBound = Callable[[Tensor], Tensor]
DEFAULT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Default relative error."""
ROUNDING_UNITS = 16
"""Default bound on the rounding of one evaluation of T, in units in the last place of |x| + |y|."""
NEGLIGIBLE_SHARE = 1 / 16
"""Share of the bound on rounding below which the error of the iteration is negligible."""


@dataclass(frozen=True)
class Contraction:
    """|T(a) − T(b)| ≤ coefficient·|a − b|, coefficient < 1, in a norm: 2, 1 or inf of an item seen as one vector.

    Attributes:
        by_theorem: whether a theorem says so, its constant evaluated in float64; otherwise it is the user's assumption.
    """

    coefficient: float
    norm: float = 2
    by_theorem: bool = True

    @property
    def dual(self) -> Contraction:
        """Return the contraction of the transposed Jacobian, in the dual norm."""
        return replace(self, norm={2: 2, 1: math.inf, math.inf: 1}[self.norm])

    def size(self, x: Tensor) -> Tensor:
        """Return the norm of every item of a batch."""
        return torch.linalg.vector_norm(x.flatten(1), self.norm, dim=1)


class DidNotConverge(HowsmoothError, RuntimeError):
    """A fixed point was not reached; ``result`` holds the best points."""

    def __init__(self, message: str, result: FixedPoint):
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class FixedPoint:
    """One fixed point per item.

    Attributes:
        x: the points, shape of the start.
        error_bound: ``(batch,)`` bounds on |x − x*|; they hold when the contraction constant does.
        residual: ``(batch,)`` |T(x̂) − x̂| at the point x̂ with x = T(x̂).
        iterations: ``(batch,)`` evaluations of T.
        converged: ``(batch,)`` whether the error bound met the tolerance.
        accelerated: ``(batch,)`` number of accepted accelerated steps.
    """

    x: Tensor
    error_bound: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    accelerated: Tensor


def solve_fixed_point(
    step: FixedPointMap,
    start: Tensor,
    *,
    contraction: Contraction,
    scale: Tensor,
    tolerance: float | None = None,
    max_iterations: int = 200,
    memory: int = 8,
    rounding_bound: RoundingBound | None = None,
    checked: bool = True,
) -> FixedPoint:
    """Compute the fixed points of ``step``, ``(batch, …)``; each item stops when its own error bound is small enough.

    Args:
        step: T; takes the points of the active items and their positions in the batch.
        start: initial points.
        contraction: constant and norm of T. Two iterates that contradict it, beyond rounding, raise an error, for the
            bound would be false; ``checked=False`` omits the check.
        scale: ``(batch,)`` size of the other inputs of T (|y| for x = y − f(x)), for the default bound on rounding.
        tolerance: relative error to reach; by default 1e-12 (float64), 1e-5 (float32) or as far as rounding allows.
        memory: number of earlier points that acceleration combines; 0 for plain steps.
        rounding_bound: bounds on |T̃(x) − T(x)| for points of the batch; by default 16 units in the last place of
            |x| + |y|.

    >>> halve, zero = lambda x, index: 1 + x / 2, torch.zeros(1, 3, dtype=torch.float64)
    >>> fixed = solve_fixed_point(halve, zero, contraction=Contraction(0.5), scale=torch.ones(1))
    >>> round(float(fixed.x[0, 0]), 12), int(fixed.iterations)
    (2.0, 3)
    """
    c, size, batch = contraction.coefficient, contraction.size, len(start)
    unknown, none = start.new_full((batch,), math.inf), torch.zeros(batch, dtype=torch.long, device=start.device)
    answer = FixedPoint(start.clone(), unknown, unknown.clone(), none, none.bool(), none.clone())
    work, scale = _ActiveItems(start, memory), scale.to(start)
    eps, places = torch.finfo(start.dtype).eps, math.prod(start.shape[1:])
    made_from = start.clone()
    rounding_of: RoundingBound = rounding_bound or (lambda points: points.new_zeros(len(points)))
    rounded = rounding_of(start)  # about its final value

    def error_bounds(points: Tensor, residual: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Return error bounds, and their part from rounding."""
        rounding = rounding_of(points) + ROUNDING_UNITS * eps * magnitude
        return (c * residual * (1 + places * eps) + rounding) / (1 - c), rounding / (1 - c)

    for _ in range(max_iterations):
        if len(work.index) == 0:
            break
        image = step(work.point, work.index)
        residual = size(image - work.point)
        if checked:
            _check_claim(work, image, residual, contraction, scale[work.index], rounding_of)
        magnitude = size(image) + scale[work.index]
        remaining = c / (1 - c) * residual
        wanted = magnitude * (DEFAULT_TOLERANCE[start.dtype] if tolerance is None else tolerance)
        better = torch.isfinite(residual) & ~(answer.residual[work.index] <= residual)
        items = work.index[better]
        answer.x[items], answer.residual[items], made_from[items] = image[better], residual[better], work.point[better]
        answer.iterations[work.index] += 1
        floor = torch.maximum(NEGLIGIBLE_SHARE * rounded[work.index], ROUNDING_UNITS * eps * magnitude) / (1 - c)
        aim = torch.maximum(wanted, floor) if tolerance is None else wanted  # as far as rounding allows
        done = better & (remaining <= aim)
        if bool(done.any()):
            bound, rounding = error_bounds(work.point, residual, magnitude)
            done &= bound <= (torch.maximum(wanted, 2 * rounding) if tolerance is None else wanted)
            answer.error_bound[work.index[done]] = bound[done]
            answer.converged[work.index[done]] = True
        failed = work.plain & ~torch.isfinite(residual)
        accepted = work.plain | (residual <= c * work.residual)
        answer.accelerated[work.index[accepted & ~work.plain]] += 1
        work.advance(image, residual, accepted)
        work.select(~(done | failed))
    late = ~answer.converged & torch.isfinite(answer.residual)
    if bool(late.any()):
        bound, rounding = error_bounds(made_from[late], answer.residual[late], size(answer.x[late]) + scale[late])
        answer.error_bound[late] = bound
        if tolerance is None:  # only rounding remains
            answer.converged[late] = bound <= 2 * rounding
    return answer


class _ActiveItems:
    """The items that have not converged: the last accepted point of each, its image, earlier points, the next point."""

    def __init__(self, start: Tensor, memory: int):
        batch = len(start)
        self.index = torch.arange(batch, device=start.device)
        self.point = start
        self.plain = torch.ones(batch, dtype=torch.bool, device=start.device)
        self.best = self.image = start
        self.residual = start.new_full((batch,), math.inf)
        self.points = start.new_zeros(batch, memory, math.prod(start.shape[1:]))
        self.images = torch.zeros_like(self.points)
        self.filled = torch.zeros(batch, memory, dtype=torch.bool, device=start.device)

    def advance(self, image: Tensor, residual: Tensor, accepted: Tensor) -> None:
        """Store the accepted points, drop the history of the others, and choose the next points."""
        remembered = torch.isfinite(self.residual) & accepted  # nothing before the first evaluation
        if self.filled.shape[1]:
            self.points = torch.cat([self.best.flatten(1)[:, None], self.points[:, :-1]], dim=1)
            self.images = torch.cat([self.image.flatten(1)[:, None], self.images[:, :-1]], dim=1)
            self.filled = torch.cat([remembered[:, None], self.filled[:, :-1]], dim=1) & accepted[:, None]
        shape = (-1,) + (1,) * (image.dim() - 1)
        self.best = torch.where(accepted.view(shape), self.point, self.best)
        self.image = torch.where(accepted.view(shape), image, self.image)
        self.residual = torch.where(accepted, residual, self.residual)
        self.plain = ~self.filled.any(1) if self.filled.shape[1] else torch.ones_like(accepted)
        self.point = torch.where(self.plain.view(shape), self.image, self._combined())

    def select(self, which: Tensor) -> None:
        """Continue with some of the items."""
        if bool(which.all()):
            return
        for name in ("index", "point", "plain", "best", "image", "residual", "points", "images", "filled"):
            setattr(self, name, getattr(self, name)[which])

    def _combined(self) -> Tensor:
        r"""Anderson's point: :math:`T(x) + \sum_j\gamma_j(T(x_j) - T(x))`, γ minimising
        :math:`|r + \sum_j\gamma_j(r_j - r)|`, r = T(x) − x."""
        image = self.image.flatten(1)
        residual = (image - self.best.flatten(1))[:, :, None]
        moved = (self.images - self.points).mT - residual  # (items, size, memory)
        lengths = torch.linalg.vector_norm(moved, dim=1).clamp_min(torch.finfo(image.dtype).tiny)
        moved = moved / lengths[:, None] * self.filled[:, None]
        ridge = 1e3 * torch.finfo(image.dtype).eps * torch.eye(moved.shape[-1], dtype=image.dtype, device=image.device)
        gamma = torch.linalg.solve_ex(moved.mT @ moved + ridge, -moved.mT @ residual).result / lengths[:, :, None]
        moved_images = (self.images - image[:, None]) * self.filled[:, :, None]
        return (image + (moved_images.mT @ gamma).squeeze(-1)).view_as(self.image)


def _check_claim(
    work: _ActiveItems,
    image: Tensor,
    residual: Tensor,
    contraction: Contraction,
    scale: Tensor,
    rounding_of: RoundingBound,
) -> None:
    """Refuse a contraction constant that two iterates contradict beyond rounding."""
    size = contraction.size
    apart, moved = size(work.point - work.best), size(image - work.image)
    noise = 1e3 * ROUNDING_UNITS * torch.finfo(image.dtype).eps * (size(image) + scale)
    known = torch.isfinite(work.residual) & torch.isfinite(residual)
    wrong = known & (moved > contraction.coefficient * apart + noise)
    if bool(wrong.any()):
        noise = noise + rounding_of(work.point) + rounding_of(work.best)
        wrong = wrong & (moved > contraction.coefficient * apart + noise)
    if bool(wrong.any()):
        ratio = float((moved[wrong] / apart[wrong]).max())
        raise DoesNotApply(
            f"the map moved two points by {ratio:.4g} times their distance, so {contraction.coefficient:.4g} is not "
            "its Lipschitz constant and no error bound holds: give the right coefficient, or scale the map down."
        )
