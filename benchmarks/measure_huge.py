"""The full measurement of one causal head at n = 131,072 (``--huge``)."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measure_long import measured
from benchmarks.report import Section


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Measure one causal head."""
    n = 4096 if quick else 131_072
    return measured("measure_huge", f"A full measurement at n = {n:,}", n, (True,), report)
