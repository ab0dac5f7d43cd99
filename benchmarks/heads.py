"""Every head of a layer to 1e-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import howsmooth as hs
from benchmarks.cases import Case, head_functions, minilm_cases, random_case
from benchmarks.race import race, tables, targets
from benchmarks.report import Section

TEXT = """‖J_h‖ of all 12 heads x ↦ W_h f_h(x) to a relative accuracy of 1e-3, in float32: seconds for all heads
together, Jacobian products (J v or Jᵀ u; of one head, ours of all heads at once), and the largest error against
float64 at 1e-9. `hs.measure_heads` is timed whole, from the weights to the result. Power iteration runs head by head
through torch.func (at most 300 iterations and 120 s; ">" marks that it did not get there), with fresh `jvp` + `vjp`
calls or on `linearize` + one `vjp` closure, whose tracing is shown but not counted. ARPACK is
`scipy.sparse.linalg.svds(k=1)` on the latter; it works on 20 Lanczos vectors at least.

First each by its own rule: ours until the ends are 1e-3 apart and the residual ‖Jᵀu − σv‖ is below 1e-3·σ, power
iteration until the same residual is. Then at equal error: an oracle that knows the answer stops both on each head
once it is within 1e-3. That leaves out what makes a number trustworthy, and is kindest to power iteration."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Race on the layers of MiniLM reading real text and on random weights."""
    n, layers = (64, [0]) if quick else (512, [1, 3, 5])
    results = []
    for case in (*minilm_cases(n, layers), random_case(n)):
        report(case.name)
        results.append(race(case, measure_heads, head_functions(case), rounds=1 if quick else 2))
    section = Section("heads", "All heads of a layer to 1e-3", TEXT, tables(results))
    section.targets = targets(f"12 heads to 1e-3, n = {n}", results, 15)
    return section


def measure_heads(case: Case, rtol: float, **options: Any) -> hs.Measurement:
    return hs.measure_heads(case.attention, case.x, rtol=rtol, **options)
