"""Section 2: every head of a layer to 1e-3."""

from __future__ import annotations

from collections.abc import Callable

import howsmooth as hs
from benchmarks.cases import Case, head_functions, minilm_cases, random_case
from benchmarks.race import race, table, targets
from benchmarks.report import Section

TEXT = """‖J_h‖ of all 12 heads x ↦ W_h f_h(x) to a relative accuracy of 1e-3, in float32: seconds for all heads
together, Jacobian products (J v or Jᵀ u; of one head, ours of all heads at once), and the largest error against
float64 at 1e-9. `hs.measure_heads` is timed whole, from the weights to certified bounds. Power iteration runs head
by head through torch.func, each stopped by an oracle once its error is 1e-3 (at most 300 iterations and 120 s; ">"
marks that it did not get there), with fresh `jvp` + `vjp` calls or on `linearize` + one `vjp` closure, whose
tracing is shown but not counted. ARPACK is `scipy.sparse.linalg.svds(k=1)` on the latter; it works on 20
Lanczos vectors at least."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Race on the layers of MiniLM reading real text and on random weights."""
    n, layers = (64, range(1)) if quick else (512, range(6))
    results = []
    for case in (*minilm_cases(n, layers), random_case(n)):
        report(case.name)
        results.append(race(case, measure_heads, head_functions(case), rounds=1 if quick else 2))
    section = Section("heads", "2. All heads of a layer to 1e-3", TEXT, [table(results)])
    section.targets = targets(f"12 heads to 1e-3, n = {n}", results, 15)
    return section


def measure_heads(case: Case, rtol: float) -> hs.Measurement:
    return hs.measure_heads(case.attention, case.x, rtol=rtol)
