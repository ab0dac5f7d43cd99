"""The three-path bound beside measuring, on real heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, minilm_cases, random_case
from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds
from howsmooth.bounds.point_bounds import ThreePath, three_path_parts

TEXT = """An upper bound on ‖J_h‖ of all heads that needs no iteration on the Jacobian, against `hs.measure_heads` to
1e-3: milliseconds for all heads together, the bound over the measured value (least, median, most over heads), and the
median share of each path in the bound. The bound is deterministic and computed in float64; measuring is in float32."""
MOST = 3.5


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time bound and measurement in turns on every layer of MiniLM and on random weights."""
    n, layers = (32, [0]) if quick else (96, list(range(6)))
    rows, ratios, gains = [], [], []
    for case in (*minilm_cases(n, layers), random_case(n)):
        report(case.name)
        row, ratio, gain = _compare(case, rounds=2 if quick else 10)
        rows.append(row)
        if case.name.startswith("MiniLM"):
            ratios.append(ratio)
            gains.append(gain)
    columns = ["case", "bound, ms", "measured, ms", "times faster", "bound ÷ measured", "value", "diagonal", "cross"]
    worst = max(float(ratio.max()) for ratio in ratios)
    section = Section("three_path", "The three-path bound", TEXT, [Table(columns, rows)])
    section.targets = [
        Target(
            f"three-path bound of 12 heads, n = {n}", "> 1× faster than measuring", f"{min(gains):.1f}×", min(gains) > 1
        ),
        Target(f"three-path bound ÷ measured, n = {n}", f"≤ {MOST}", f"{worst:.2f}", worst <= MOST),
    ]
    return section


def _compare(case: Case, rounds: int) -> tuple[list[str], Tensor, float]:
    """The row of a case, the ratio of every head, and how many times faster the bound is."""

    def bound() -> ThreePath:
        with torch.no_grad():
            return three_path_parts(case.attention, case.x)

    best = best_seconds(
        {"bound": bound, "measured": lambda: hs.measure_heads(case.attention, case.x)}, rounds=rounds, budget=20
    )
    parts = bound()
    ratio = parts.total / hs.measure_heads(case.attention, case.x).value.double()
    gain = best["measured"] / best["bound"]
    shares = [
        f"{100 * float((part / parts.total).median()):.0f} %" for part in (parts.value, parts.diagonal, parts.cross)
    ]
    spread = f"{float(ratio.min()):.2f} / {float(ratio.median()):.2f} / {float(ratio.max()):.2f}"
    times = [f"{1e3 * best[name]:.1f}" for name in ("bound", "measured")]
    return [case.name, *times, f"{gain:.1f}×", spread, *shares], ratio, gain
