"""The way to the number: howsmooth, power iteration and ARPACK until ‖J‖ is known to 1e-3.

Everything is in favour of the peers. Power iteration is stopped by an oracle the moment it is close enough, so it never
pays for finding that out; `linearize` may trace before the clock starts. Ours runs from nothing until its own
certificate says 1e-3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, TokenMap
from benchmarks.peers import FuncProducts, Run, arpack, power_iteration
from benchmarks.report import Table, Target
from benchmarks.timing import seconds_of

RTOL = 1e-3
MOST_SECONDS = 120.0
COLUMNS = ["case", "howsmooth", "power iteration", "ratio", "power, linearize", "ratio", "ARPACK", "ratio"]
Measure = Callable[[Case, float], hs.Measurement]


@dataclass(frozen=True)
class Finish:
    """How a contestant did on all maps of a case together; ours makes each product for all maps at once."""

    seconds: float
    products: int
    error: float
    reached: bool = True
    setup: float = 0.0

    def cell(self) -> str:
        setup = f" (+ {self.setup:.2f} s tracing)" if self.setup else ""
        return f"{'' if self.reached else '> '}{self.seconds:.3f} s{setup}, {self.products} products, {self.error:.0e}"


@dataclass(frozen=True)
class Result:
    """One case: ours and the peers."""

    case: Case
    ours: Finish
    peers: tuple[Finish, ...]

    def ratio(self, peer: int) -> float:
        return self.peers[peer].seconds / self.ours.seconds

    def row(self) -> list[str]:
        cells = [self.case.name, self.ours.cell()]
        for i, peer in enumerate(self.peers):
            cells += [peer.cell(), f"{'' if peer.reached else '> '}{self.ratio(i):.1f}×"]
        return cells


def race(case: Case, measure: Measure, maps: Sequence[TokenMap], rounds: int = 2, budget: float = 20) -> Result:
    """All contestants on the maps of a case: the heads one by one, or the block alone; the best of each counts.

    The reference comes from ``measure`` in float64 to 1e-9; ARPACK, which uses torch.func alone, confirms it. After
    the first round no new one begins beyond ``budget`` seconds.
    """
    target = measure(case.double(), 1e-9).value.reshape(-1)
    fresh = [FuncProducts.fresh(f, case.x) for f in maps]
    traced: list[FuncProducts] = []
    setup = seconds_of(lambda: traced.extend(FuncProducts.traced(f, case.x) for f in maps))
    out_size = len(case.x) * case.attention.out_features
    contestants: list[Callable[[], Finish]] = [
        lambda: _ours(case, measure, target),
        lambda: _peer(fresh, target, lambda J, sigma, left: power_iteration(J, case.x, sigma, RTOL, most_seconds=left)),
        lambda: _peer(
            traced, target, lambda J, sigma, left: power_iteration(J, case.x, sigma, RTOL, most_seconds=left)
        ),
        lambda: _peer(traced, target, lambda J, sigma, left: arpack(J, case.x, out_size, RTOL)),
    ]
    measure(case, RTOL)
    started = time.perf_counter()
    finishes: list[list[Finish]] = []
    while not finishes or (len(finishes) < rounds and time.perf_counter() - started < budget):
        finishes.append([contestant() for contestant in contestants])
    ours, power, power_traced, lanczos = (
        min(runs, key=lambda run: run.seconds) for runs in zip(*finishes, strict=True)
    )
    return Result(case, ours, (power, replace(power_traced, setup=setup), replace(lanczos, setup=setup)))


def _ours(case: Case, measure: Measure, target: Tensor) -> Finish:
    results: list[hs.Measurement] = []
    seconds = seconds_of(lambda: results.append(measure(case, RTOL)))
    (found,) = results
    error = float((found.value.reshape(-1) / target - 1).abs().max())
    return Finish(seconds, found.products, error, bool(found.converged.all()))


def _peer(
    operators: Sequence[FuncProducts], target: Tensor, solve: Callable[[FuncProducts, float, float], Run]
) -> Finish:
    runs: list[Run] = []
    for operator, sigma in zip(operators, target.tolist(), strict=True):
        left = MOST_SECONDS - sum(run.seconds for run in runs)
        runs.append(solve(replace(operator, count=0), sigma, left))
    error = max(abs(run.value / sigma - 1) for run, sigma in zip(runs, target.tolist(), strict=True))
    seconds, products = sum(run.seconds for run in runs), sum(run.products for run in runs)
    return Finish(seconds, products, error, all(run.reached for run in runs))


def table(results: Sequence[Result]) -> Table:
    """One row per case."""
    return Table(COLUMNS, [result.row() for result in results])


def targets(what: str, results: Sequence[Result], wanted: float) -> list[Target]:
    """The total time of the cases of each kind against the total of ours."""
    found = []
    for kind in ("MiniLM", "random"):
        chosen = [result for result in results if result.case.name.startswith(kind)]
        if not chosen:
            continue
        ours = sum(result.ours.seconds for result in chosen)
        for i, peer in enumerate(("power iteration", "power iteration on linearize", "ARPACK")):
            ratio = sum(result.peers[i].seconds for result in chosen) / ours
            mark = "" if all(result.peers[i].reached for result in chosen) else "> "
            goal, met = ("", None) if i else (f"≥ {wanted:g}×", ratio >= wanted)
            found.append(Target(f"{what}, {kind}: faster than {peer}", goal, f"{mark}{ratio:.1f}×", met))
    return found
