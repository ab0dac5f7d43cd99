"""Shapes nobody tuned for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import howsmooth as hs
from benchmarks.bare import in_tiles, projections
from benchmarks.cases import Case, block_function, random_case
from benchmarks.peers import FuncProducts, Run, arpack, power_iteration
from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds, seconds_of
from howsmooth.jacobians.attention_operator import AttentionJacobian

TEXT = """Blocks of attention over lengths, heads × width, masks and dtypes. On the left one JᵀJ product, times ours:
`jvp` + `vjp`, `linearize` + `vjp` closures (traced beforehand) and the bare matrix products. On the right the way to
ends 1e-3 apart, building the operator included, times ours: power iteration by its residual with fresh products, with
closures (tracing counted) and ARPACK with closures (tracing counted); none of the three has ends. Power
iteration is stopped at three times our seconds, or two seconds (">": it had not got there)."""

_SHORT = 3.0
"""Seconds below which peers, too, have the better of two rounds."""
PEERS = ("power, jvp + vjp", "power, linearize + vjp", "ARPACK, linearize + vjp")


@dataclass(frozen=True)
class Ratios:
    """What the peers take, in units of ours."""

    name: str
    product: dict[str, float]
    enclosed: dict[str, float]
    unfinished: frozenset[str] = frozenset()

    def cells(self) -> list[str]:
        """A row of the table."""
        enclosed = (f"{'> ' * (key in self.unfinished)}{ratio:.1f}" for key, ratio in self.enclosed.items())
        return [self.name, *(f"{ratio:.2f}" for ratio in self.product.values()), *enclosed]

    @property
    def fastest(self) -> float:
        return min(self.enclosed.values())


def shapes(quick: bool) -> Iterator[tuple[int, int, int, bool, torch.dtype]]:
    """n, width, heads, causal, dtype: every length with every kind of block, masks and dtypes in turn."""
    blocks = ((64, 1), (128, 4), (384, 12), (576, 9), (1024, 16))
    lengths = (64, 96) if quick else (64, 100, 256, 777, 1024, 2048, 4096)
    for i, n in enumerate(lengths):
        for j, (width, heads) in enumerate(blocks[:2] if quick else blocks):
            if n * width * heads <= 2**24:
                yield n, width, heads, (i + j) % 2 == 1, torch.float64 if (i + 2 * j) % 4 == 3 else torch.float32


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """All shapes, then medians and worst."""
    found = []
    for n, width, heads, causal, dtype in shapes(quick):
        case = random_case(n, width, heads, causal)
        case = case.double() if dtype == torch.float64 else case
        name = f"n = {n}, {heads} × {width // heads}{', causal' if causal else ''}, {str(dtype).removeprefix('torch.')}"
        report(name)
        found.append(ratios(name, case))
    rows = [r.cells() for r in found]
    columns = ["shape", *found[0].product, *found[0].enclosed]
    worst, middle = (
        [f"{pick(r.product[key] for r in found):.2f}" for key in found[0].product]
        + [f"{pick(r.enclosed[key] for r in found):.1f}" for key in found[0].enclosed]
        for pick in (min, statistics.median)
    )
    section = Section("grid", "A grid of shapes", TEXT)
    section.tables = [Table(columns, [*rows, ["least", *worst], ["median", *middle]])]
    fastest = [r.fastest for r in found]
    least, median = min(fastest), statistics.median(fastest)
    section.targets = [
        Target("grid, to ends 1e-3 apart: the fastest peer ÷ ours, worst shape", "≥ 1×", f"{least:.2f}×", least >= 1),
        Target("grid, to ends 1e-3 apart: the fastest peer ÷ ours, median", "≥ 2.5×", f"{median:.1f}×", median >= 2.5),
    ]
    return section


def ratios(name: str, case: Case) -> Ratios:
    """One shape."""
    f, x = block_function(case), case.x
    operator = hs.jacobian(case.attention, x)
    assert isinstance(operator, AttentionJacobian)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    fresh, traced = FuncProducts.fresh(f, x), FuncProducts.traced(f, x)
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: operator.rmatvec(operator.matvec(v)),
        "jvp + vjp": lambda: fresh.gram(v),
        "linearize + vjp": lambda: traced.gram(v),
    }
    if not operator.mixing.streamed and operator.dtype == x.dtype:
        tangents = [torch.randn_like(t) for t in (operator.mixing.query, operator.mixing.key, operator.mixing.value)]
        alone = projections(operator, v), in_tiles(operator.mixing, tuple(tangents))  # type: ignore[arg-type]
        contestants["bare"] = lambda: [products() for products in alone]
    best = best_seconds(contestants, rounds=5, budget=2.0)
    product = {key: best.get(key, float("nan")) / best["ours"] for key in ("jvp + vjp", "linearize + vjp", "bare")}
    ours = min(seconds_of(lambda: hs.measure(case.attention, x)) for _ in range(2))
    most = max(2.0, 3 * ours)
    ways: dict[str, Callable[[], Run]] = {
        PEERS[0]: lambda: power_iteration(FuncProducts.fresh(f, x), x, most_seconds=most),
        PEERS[1]: lambda: power_iteration(FuncProducts.traced(f, x), x, most_seconds=most),
        PEERS[2]: lambda: arpack(FuncProducts.traced(f, x), x, x.numel()),
    }
    runs: dict[str, Run] = {}
    enclosed: dict[str, float] = {}
    for key, way in ways.items():
        first = seconds_of(lambda: runs.update({key: way()}))  # noqa: B023
        again = seconds_of(way) if first < _SHORT else first
        enclosed[key] = min(first, again) / ours
    return Ratios(name, product, enclosed, frozenset(key for key, run in runs.items() if not run.reached))
