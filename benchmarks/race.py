"""The way to the number: howsmooth, power iteration and ARPACK until ‖J‖ is known to 1e-3, twice.

First each by its own rule, as it would be used: ours until its ends and its residual say 1e-3, power iteration
until its residual says 1e-3, ARPACK until ARPACK is content. Then at equal error: an oracle that knows the answer stops
ours and power iteration on every map as soon as it is within 1e-3. `linearize` may trace before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, TokenMap
from benchmarks.peers import FuncProducts, Run, arpack, power_iteration
from benchmarks.report import Table, Target
from benchmarks.timing import seconds_of

RTOL = 1e-3
MOST_SECONDS = 120.0
OWN_RULE = ["power iteration", "power, linearize", "ARPACK"]
EQUAL_ERROR = ["power iteration", "power, linearize"]


class Measure(Protocol):
    """`hs.measure` or `hs.measure_heads` on a case."""

    def __call__(self, case: Case, rtol: float, **options: Any) -> hs.Measurement: ...


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
    """One case under one rule: ours and the peers."""

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


def race(
    case: Case, measure: Measure, maps: Sequence[TokenMap], rounds: int = 2, budget: float = 15
) -> tuple[Result, Result]:
    """All contestants on the maps of a case (the heads one by one, or the block alone): own rule, then equal error.

    The reference comes from ``measure`` in float64 to 1e-9; ARPACK, which uses torch.func alone, confirms it. The best
    round of each counts; after the first round no new one begins beyond ``budget`` seconds.
    """
    target = measure(case.double(), 1e-9).value.reshape(-1)
    fresh = [FuncProducts.fresh(f, case.x) for f in maps]
    traced: list[FuncProducts] = []
    setup = seconds_of(lambda: traced.extend(FuncProducts.traced(f, case.x) for f in maps))
    out_size = len(case.x) * case.attention.out_features
    goal = target.reshape(measure(case, RTOL, max_steps=1, dense_limit=0).value.shape) * (1 - RTOL)

    def power(operators: Sequence[FuncProducts], oracle: bool) -> Callable[[], Finish]:
        return lambda: _peer(
            operators,
            target,
            lambda J, sigma, left: power_iteration(J, case.x, sigma if oracle else None, RTOL, most_seconds=left),
        )

    contestants: list[Callable[[], Finish]] = [
        lambda: _ours(case, measure, target, {}),
        power(fresh, oracle=False),
        power(traced, oracle=False),
        lambda: _peer(traced, target, lambda J, sigma, left: arpack(J, case.x, out_size, RTOL)),
        lambda: _ours(case, measure, target, {"stop_at": goal, "dense_limit": 0}),
        power(fresh, oracle=True),
        power(traced, oracle=True),
    ]
    measure(case, RTOL)
    started = time.perf_counter()
    finishes: list[list[Finish]] = []
    while not finishes or (len(finishes) < rounds and time.perf_counter() - started < budget):
        finishes.append([_best_of_short(contestant) for contestant in contestants])
    best = [min(runs, key=lambda run: run.seconds) for runs in zip(*finishes, strict=True)]
    for i in (2, 3, 6):
        best[i] = replace(best[i], setup=setup)
    return Result(case, best[0], tuple(best[1:4])), Result(case, best[4], tuple(best[5:]))


def _best_of_short(contestant: Callable[[], Finish]) -> Finish:
    """A run, or the best of three when it takes less than a second: a short one is easily disturbed."""
    first = contestant()
    return first if first.seconds > 1 else min((first, contestant(), contestant()), key=lambda run: run.seconds)


def _error(value: Tensor, target: Tensor) -> float:
    return float((value.reshape(-1) / target - 1).abs().max())


def _ours(case: Case, measure: Measure, target: Tensor, options: dict[str, Any]) -> Finish:
    results: list[hs.Measurement] = []
    seconds = seconds_of(lambda: results.append(measure(case, RTOL, **options)))
    (found,) = results
    error = _error(found.value, target)
    return Finish(seconds, found.products, error, error <= RTOL)


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


def tables(results: Sequence[tuple[Result, Result]]) -> list[Table]:
    """One table for each rule, one row per case."""
    captions = ("Each by its own rule:", "At equal error, stopped by an oracle:")
    found = []
    for which, (caption, peers) in enumerate(zip(captions, (OWN_RULE, EQUAL_ERROR), strict=True)):
        columns = ["case", "howsmooth", *(text for peer in peers for text in (peer, "ratio"))]
        found.append(Table(columns, [pair[which].row() for pair in results], caption))
    return found


def targets(what: str, results: Sequence[tuple[Result, Result]], wanted: float) -> list[Target]:
    """The total time of the cases of each kind against the total of ours."""
    found = []
    for kind in ("MiniLM", "random"):
        chosen = [pair for pair in results if pair[0].case.name.startswith(kind)]
        if not chosen:
            continue
        for which, (rule, peers) in enumerate(zip(("own rule", "oracle"), (OWN_RULE, EQUAL_ERROR), strict=True)):
            runs = [pair[which] for pair in chosen]
            ours = sum(run.ours.seconds for run in runs)
            for i, peer in enumerate(peers):
                ratio = sum(run.peers[i].seconds for run in runs) / ours
                mark = "" if all(run.peers[i].reached for run in runs) else "> "
                goal, met = ("", None) if i else (f"≥ {wanted:g}×", ratio >= wanted)
                found.append(Target(f"{what}, {kind}, {rule}: faster than {peer}", goal, f"{mark}{ratio:.1f}×", met))
    return found
