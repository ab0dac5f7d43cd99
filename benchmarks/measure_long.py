"""The full measurement of one head at n = 32,768 (``--long``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from benchmarks.report import Section, Table, Target
from benchmarks.worker import in_process

TEXT = """`hs.measure` with its defaults (to 1e-3, the upper end with probability 99 %) on one head of width 64
in float32, in a process of its own; the memory is the peak of the whole process."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Measure with and without a causal mask."""
    n = 2048 if quick else 32_768
    return measured("measure_long", f"A full measurement at n = {n:,}", n, (False, True), report, limit=2.0)


def measured(
    name: str, title: str, n: int, masks: Iterable[bool], report: Callable[[str], None], limit: float = math.inf
) -> Section:
    """The section for one length, with a limit on the memory in GiB."""
    section, rows = Section(name, title, TEXT), []
    for causal in masks:
        what = f"n = {n:,}, {'causal' if causal else 'unmasked'}"
        report(what)
        found = in_process(task="measure", n=n, causal=causal, threads=torch.get_num_threads())
        rows.append(
            [
                what,
                f"{found['value']:.5g}",
                f"{found['lower']:.6g} … {found['upper']:.6g}",
                "yes" if found["converged"] else "no",
                f"{found['products']}",
                f"{found['seconds']:.0f}",
                f"{found['peak'] / 2**30:.2f}",
            ]
        )
        peak = found["peak"] / 2**30
        wanted, met = (f"< {limit:g} GiB", peak < limit) if limit < math.inf else ("", None)
        section.targets.append(Target(f"hs.measure, one head, {what}: peak memory", wanted, f"{peak:.2f} GiB", met))
    section.tables = [Table(["one head × 64", "‖J‖₂", "bounds", "converged", "products", "s", "peak GiB"], rows)]
    return section
