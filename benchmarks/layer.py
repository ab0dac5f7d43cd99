"""A whole attention block to 1e-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import howsmooth as hs
from benchmarks.cases import Case, block_function, minilm_cases, random_case
from benchmarks.race import race, tables, targets
from benchmarks.report import Section

TEXT = """‖J‖ of the whole attention block, output projection included, to a relative accuracy of 1e-3 in float32:
the rules of section 2, with one map instead of twelve. The peers differentiate the block as most code writes it,
linear layers around `scaled_dot_product_attention` (math kernel: the others have no forward mode)."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Race on the layers of MiniLM reading real text and on random weights of width 768."""
    n, layers = (64, [0]) if quick else (512, [1, 3, 5])
    results = []
    for case in (*minilm_cases(n, layers), random_case(n), random_case(n, causal=True)):
        report(case.name)
        results.append(race(case, measure, [block_function(case)], rounds=1 if quick else 2))
    section = Section("layer", "A whole layer to 1e-3", TEXT, tables(results))
    section.targets = targets(f"whole layer to 1e-3, n = {n}", results, 8)
    return section


def measure(case: Case, rtol: float, **options: Any) -> hs.Measurement:
    return hs.measure(case.attention, case.x, rtol=rtol, **options)
