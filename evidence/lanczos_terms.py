"""Upper ends of Golub–Kahan runs whose starts are as unlucky as their confidence allows, beside the norms themselves.

Of `howsmooth.norms.lanczos_bound`. On the event |⟨start, x⟩| ≥ τ nothing is left to chance: a start with just this
component on the top singular vector x must never lead to an end below the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mpmath
import torch
from torch import Tensor

from evidence.juries import Example, Modules, agreement
from howsmooth.jacobians.operator import MatrixOperator
from howsmooth.norms.bidiagonal import Bidiagonalisation
from howsmooth.norms.counted_products import FlatProducts
from howsmooth.norms.lanczos_bound import RitzProjection, smallest_component

SIZE, MAPS, CONFIDENCE = 8, 40, 0.99
LIMIT, KEPT, STEPS = 5, 3, 9
"""Basis vectors before a restart and after it, and steps of a run with restarts."""
SETTLED = 1e-6
"""Where θ₁ is this near to the norm, ends are not compared: rounding is all there is to see."""


def halfway_with_errors(
    size: int, steps: int, error: float, seed: int, gap: float | None = None
) -> tuple[RitzProjection, Tensor, Tensor]:
    """Half a step of a run whose vectors are all off: its projection, λ of the largest value, the start's part on it.

    V is orthonormal, U need not be; what is missing in J V = U B̂ + α u eᵀ and Jᵀ U = V B̂ᵀ are the errors. They point
    along the vectors that they can hide best.
    """
    run = _Perturbed(size, steps, error, seed, gap)
    ahead, back = run.matrix @ run.v - run.u @ run.b, run.matrix.T @ run.u[:, :-1] - run.v @ run.b[:-1].T
    drift = torch.stack([ahead.norm(dim=0), torch.cat([back.norm(dim=0), torch.zeros(1).double()])])[:, None]
    skew = torch.linalg.matrix_norm(run.u.T @ run.u - torch.eye(steps + 1).double())
    small = RitzProjection.halfway(run.b[None], skew[None], 0, drift)
    return small, run.lam, run.overlap


def steps_with_errors(
    size: int, steps: int, error: float, seed: int, gap: float | None = None
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The same after whole steps: what `RitzProjection.of` takes, λ and the start's part."""
    run = _Perturbed(size, steps, error, seed, gap)
    u, v, b, beta = run.u[:, :-1], run.v[:, :-1], run.b[:-1, :-1], run.b[-2, -1]
    ahead = run.matrix @ v - u @ b
    back = run.matrix.T @ u - v @ b.T
    back[:, -1] -= beta * run.v[:, -1]
    drift = torch.stack([ahead.norm(dim=0), back.norm(dim=0)])[:, None]
    return {"b": b[None], "beta": beta[None], "products": 0, "drift": drift}, run.lam, run.overlap


class _Perturbed:
    """A run of some steps and a half on a random matrix, its vectors moved by errors along x and y.

    With a ``gap`` the largest singular value is so little above the next, which is one.
    """

    def __init__(self, size: int, steps: int, error: float, seed: int, gap: float | None):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.matrix = random(size, size)
        left, sigma, right = torch.linalg.svd(self.matrix)
        if gap is not None:
            sigma = torch.linspace(1.0, 0.2, size - 1, dtype=torch.float64)
            sigma = torch.cat([1 + sigma.new_tensor([gap]), sigma])
            self.matrix = (left * sigma) @ right
        x, y = right[0], left[:, 0]
        start = random(size)
        start = torch.nn.functional.normalize(start - 0.9 * (start @ x) * x, dim=0)
        process = Bidiagonalisation(FlatProducts(MatrixOperator(self.matrix)), start[None], generator)
        for _ in range(steps):
            process.step()
        process.step_left()
        u, v = process._left[0, : steps + 1].T, process._right[0, : steps + 1].T
        self.b = process._b[0, : steps + 1, : steps + 1].clone()
        v = v + error * torch.outer(x, random(steps + 1).sign()) + error * random(*v.shape) / size
        orthonormal, triangle = torch.linalg.qr(v)
        self.v = orthonormal * triangle.diagonal().sign()
        self.u = torch.nn.functional.normalize(u + error * torch.outer(y, random(steps + 1).sign()), dim=0)
        self.lam, self.overlap = sigma[0] ** 2, (self.v[:, 0] @ x).abs()


@dataclass(frozen=True)
class Event:
    """What a bound gets to see: whole steps (skew None), half a step, or a restart, which keeps some."""

    b: Tensor
    beta: Tensor
    skew: Tensor | None
    products: int
    drift: Tensor
    kept: int | None = None

    def projection(self, module: Any) -> Any:
        """The small problem, by a module."""
        if self.skew is None:
            return module.RitzProjection.of(self.b, self.beta, self.products, self.drift)
        return module.RitzProjection.halfway(self.b, self.skew, self.products, self.drift)


def unlucky(restarts: bool) -> tuple[list[Event], Tensor]:
    """Runs on random matrices from starts whose component on x is τ and no more, and the norms."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(MAPS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    _, sigma, right = torch.linalg.svd(matrices)
    tau, x = smallest_component(SIZE, CONFIDENCE) * (1 + 1e-9), right[:, 0]
    start = torch.randn(MAPS, SIZE, generator=generator, dtype=torch.float64)
    start = torch.nn.functional.normalize(start - (start * x).sum(-1, keepdim=True) * x, dim=-1)
    start = tau * x + (1 - tau**2) ** 0.5 * start
    process = Bidiagonalisation(FlatProducts(MatrixOperator(matrices)), start, generator)
    scale, events = process.products.scale, []
    for _ in range(STEPS if restarts else SIZE - 1):
        process.step_left()
        half = process.project_halfway()
        if process.size:
            m = process.size + 1
            events.append(Event(process._b[:, :m, :m].clone(), process.beta, half.skew, half.products, half.drift))
        process.step_right()
        small, m = process.project(), process.size
        event = Event(process._b[:, :m, :m].clone(), process.beta.clone(), None, small.products, small.drift.clone())
        events.append(event)
        if restarts and m == LIMIT:
            events.append(replace(event, kept=KEPT))
            process.restart(small, KEPT)
    return events, sigma[:, 0] / scale


def _runs(restarts: bool) -> Example:
    events, norms = unlucky(restarts)
    floors = [torch.linalg.matrix_norm(event.b if event.skew is None else event.b[:, :-1], 2) for event in events]

    def above(upper: Tensor, floor: Tensor) -> Tensor:
        return torch.where(norms - floor > SETTLED, upper - floor, 0.0)

    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        module = modules["norms.lanczos_bound"]
        for number, event in enumerate(events):
            # On its own, and after all restarts before it.
            bound = module.LanczosBound(MAPS, SIZE, CONFIDENCE)
            for before in events[:number]:
                if before.kept is not None:
                    bound.restart(before.projection(module), before.kept)
            small = event.projection(module)
            yield f"upper end {number}", above(bound.tighten(small), floors[number])
            yield (
                f"overlap {number}",
                bound.judge(norms.square().clamp_min(floors[number] ** 2 + SETTLED), small)[0],
            )

    truths = {}
    for number, floor in enumerate(floors):
        truths[f"upper end {number}"] = above(norms, floor)
        truths[f"overlap {number}"] = torch.where(norms.square() > floor**2 + SETTLED, 1.0, 0.0)
    return Example("with restarts" if restarts else "without restarts", proved, truths)


def _errors(halfway: bool) -> Example:
    """Errors that hide as much as they can: the largest overlap beside the true one, in units of τ."""
    make: Any = halfway_with_errors if halfway else steps_with_errors
    cases = []
    for size, error, seed, gap in (*itertools.product((4,), (1e-3, 0.03, 0.1), (4, 64, 96), (None,)),
                                   *itertools.product((SIZE,), (1e-6, 1e-3, 3e-2), range(12), (None,)),
                                   *itertools.product((4,), (1e-6, 1e-3), (9, 31, 35), (0.01,))):  # fmt: skip
        small, lam, overlap = make(size, 2 + seed % (size - 2), error, seed, gap)
        given = small if halfway else RitzProjection.of(**small)
        if float(lam) > float(given.theta[0, 0]) ** 2 * (1 + SETTLED):
            cases.append((size, small, lam[None], overlap / smallest_component(size, CONFIDENCE)))

    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        module, found, noisy = modules["norms.lanczos_bound"], [], []
        for size, given, lam, _ in cases:
            small = given if halfway else module.RitzProjection.of(**given)
            found.append(module.LanczosBound(1, size, CONFIDENCE).judge(lam, small)[0])
            # The same errors, known as those of single products instead of as what was taken away.
            plain = replace(small, drift=0 * small.drift, products=small.theta.shape[-1])
            for eps, noise in ((0.0, small.drift.amax()), (float(small.drift.amax() / lam.sqrt()), 0 * lam[0])):
                bound = module.LanczosBound(1, size, CONFIDENCE, eps, noise[None])
                noisy.append(bound.judge(lam, plain)[0])
        yield "overlap", torch.cat(found)
        yield "overlap, errors of products", torch.cat(noisy)

    shares = torch.stack([share for *_, share in cases])
    return Example(f"errors {'halfway' if halfway else 'after steps'}", proved,
                   {"overlap": shares, "overlap, errors of products": shares.repeat_interleave(2)})  # fmt: skip


def _quantiles() -> Example:
    """τ against the distribution in 50 digits, and the a-priori bound against its formula."""
    cases = [(size, confidence) for size in (2, 3, 30, 1000) for confidence in (0.5, 0.99, 0.999999)]
    with mpmath.workdps(50):
        exact = [1 / _quantile(size, confidence) for size, confidence in cases]
        epsilon = (mpmath.log(mpmath.mpf("1.648") * mpmath.sqrt(100) / mpmath.mpf("0.01")) / 99) ** 2
        known = float(2 / mpmath.sqrt(1 - epsilon))

    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        module = modules["norms.lanczos_bound"]
        taus = [module.smallest_component(size, confidence) for size, confidence in (*cases, (1, 0.5))]
        yield "inverse of the smallest component", 1 / torch.tensor(taus, dtype=torch.float64)
        apriori = module.kuczynski_wozniakowski1992(2.0, steps=50, size=100, confidence=0.99)
        yield "a-priori bound", agreement(torch.tensor([apriori]).double(), torch.tensor([known]).double())
        yield "values halfway", agreement(_half(module).values, _known_half())

    return Example("closed forms", proved, {
        "inverse of the smallest component": torch.tensor([*exact, 1.0], dtype=torch.float64),
        "a-priori bound": torch.ones(1).double(), "values halfway": torch.ones(1, 2).double()})  # fmt: skip


def _quantile(size: int, confidence: float) -> float:
    """√ of the point below which Beta(½, (N−1)/2) has the mass 1 − confidence."""
    mass, b = 1 - mpmath.mpf(confidence), mpmath.mpf(size - 1) / 2
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(80):
        middle = (low + high) / 2
        below = mpmath.betainc(0.5, b, 0, middle**2, regularized=True) < mass
        low, high = (middle, high) if below else (low, middle)
    return float(high)


_SMALL = torch.tensor([[[2.0, 0.7], [0.0, 1.5]]], dtype=torch.float64)


def _half(module: Any) -> Any:
    return module.RitzProjection.halfway(_SMALL, torch.zeros(1).double(), 2, torch.zeros(2, 1, 2).double())


def _known_half() -> Tensor:
    """|J v_i| of the right singular vectors of the first row, J being that small matrix."""
    vectors = torch.linalg.svd(torch.stack([_SMALL[0, 0], 0 * _SMALL[0, 0]])).Vh
    return (vectors @ _SMALL[0].T).norm(dim=-1)[None]


def examples() -> list[Example]:
    """Runs, errors and closed forms."""
    return [_runs(False), _runs(True), _errors(False), _errors(True), _quantiles()]
