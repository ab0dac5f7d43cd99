"""One head at long sequences, with memory that does not grow like n²."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Section, Table, Target
from benchmarks.worker import in_process

TEXT = """One product with J and one with Jᵀ, for one head of width 64 in float32, nothing of size n² kept
(`memory=0`): tiles of the weights are recomputed in every product. Each line is a process of its own; memory is its
peak above that of the interpreter, torch and one product at n = 1024. The error of J v is against torch.func in
float64 at four tokens; the adjoint gap is |⟨w, Jv⟩ − ⟨Jᵀw, v⟩| / (‖w‖ ‖Jv‖). The last column is the size of a
single n × n array, of which torch.func holds several."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time, memory and their growth with n."""
    sizes = (1024, 2048) if quick else (4096, 8192, 16_384, 32_768)
    section = Section("long", "Long sequences", TEXT)
    rows = []
    for causal in (False, True):
        seconds, memory = [], []
        for n in sizes:
            report(f"n = {n}{', causal' if causal else ''}")
            rounds = 3 if n <= 8192 else 1
            found = in_process(task="product", n=n, causal=causal, rounds=rounds, threads=torch.get_num_threads())
            seconds.append(found["seconds"])
            memory.append(max(found["peak"] - found["base"], 1))
            rows.append(
                [
                    f"n = {n:,}{', causal' if causal else ''}",
                    f"{found['seconds']:.3f}",
                    f"{memory[-1] / 2**20:.0f}",
                    f"{found['row_error']:.0e}",
                    f"{found['adjoint_gap']:.0e}",
                    f"{4 * n * n / 2**20:,.0f}",
                ]
            )
        kind = "causal" if causal else "unmasked"
        for what, values, most in (("time", seconds, 2.1), ("memory", memory, 1.1)):
            exponent = growth_exponent(sizes, values)
            claim = f"one head, {kind}, n = {sizes[0]:,} … {sizes[-1]:,}: {what} grows like n^e"
            section.targets.append(Target(claim, f"e ≤ {most}", f"e = {exponent:.2f}", exponent <= most))
    columns = ["one head × 64", "s", "MiB", "error of Jv", "adjoint gap", "one n × n array, MiB"]
    section.tables = [Table(columns, rows)]
    return section


def growth_exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """The slope of log value against log n by least squares.

    >>> round(growth_exponent((1, 2, 4), [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
