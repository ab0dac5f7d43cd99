"""A case so small that the whole Jacobian fits."""

from __future__ import annotations

from collections.abc import Callable

import howsmooth as hs
from benchmarks import machine, peers
from benchmarks.cases import block_function, random_case
from benchmarks.peers import FuncProducts
from benchmarks.report import Section, Table
from benchmarks.timing import best_seconds

TEXT = """‖J‖ of a block with n = 32 tokens of width 64 (4 heads), where the 2048 × 2048 Jacobian can be written
out. Everything is counted, tracing included; power iteration is stopped by an oracle at 1e-3. The second table says
why the dense way ends here."""
SIZES = ((32, 64), (128, 384), (512, 384), (512, 768), (1024, 768), (32_768, 64))
COPIES = 3
"""What the dense way holds at once: the Jacobian, the copy its decomposition works on, and the rows being made."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time every way on one small block and state the memory of larger Jacobians."""
    case = random_case(32, width=64, heads=4)
    report(case.name)
    exact = case.double()
    reference = peers.dense(block_function(exact), exact.x).value
    f, x, values = block_function(case), case.x, dict[str, float]()

    def keep(name: str, solve: Callable[[], float]) -> Callable[[], None]:
        return lambda: values.update({name: solve()})

    ways: dict[str, Callable[[], float]] = {
        "howsmooth": lambda: float(hs.measure(case.attention, x)),
        "power iteration, jvp + vjp": lambda: peers.power_iteration(FuncProducts.fresh(f, x), x, reference).value,
        "power iteration, linearize + vjp": lambda: (
            peers.power_iteration(FuncProducts.traced(f, x), x, reference).value
        ),
        "ARPACK": lambda: peers.arpack(FuncProducts.traced(f, x), x, x.numel()).value,
        "dense Jacobian + SVD": lambda: peers.dense(f, x).value,
    }
    best = best_seconds({name: keep(name, solve) for name, solve in ways.items()}, rounds=2 if quick else 5, budget=40)
    rows = [
        [
            name,
            f"{1e3 * best[name]:.1f}",
            f"{best[name] / best['howsmooth']:.1f}",
            f"{abs(values[name] / reference - 1):.0e}",
        ]
        for name in ways
    ]
    timed = Table(["contestant", "ms", "ratio", "error"], rows, f"**{case.name}**")
    return Section("small", "A small case, with the dense Jacobian", TEXT, [timed, _memory_of_dense()])


def _memory_of_dense() -> Table:
    rows = []
    for n, width in SIZES:
        size = 4 * (n * width) ** 2 / 2**30
        fits = "fits" if COPIES * size < machine.memory_gib() else "does not fit"
        rows.append([f"n = {n}, width {width}", f"4 · ({n} · {width})² bytes", f"{size:,.2f} GiB", fits])
    return Table(
        ["block", "float32 Jacobian", "memory", f"{COPIES} copies in {machine.memory_gib():.0f} GiB"],
        rows,
        "**Memory of the whole Jacobian**",
    )
