"""Two worker processes beside one, what handing over costs, and a hundred thousand cells.

``python -m benchmarks.engines CELLS FOLDER`` plans, runs and merges trivial cells once and prints its peak memory.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds, seconds_of
from howsmooth.engines import Load, submit_all
from howsmooth.engines.processes import Processes
from howsmooth.models import open_model
from howsmooth.scans import Store, merge, scan
from howsmooth.scans.plan import CellBatch, ScanCell, ScanSettings
from howsmooth.scans.scan_store import Identity
from howsmooth.scans.units import Shard, split

TEXT = """All heads of all-MiniLM-L6-v2 on windows of Alice in Wonderland, by this process and by two workers in turns,
one thread of torch in each, the least of several rounds. The workers run and have the model open; how long that took is
a row of its own. Then units that only sleep for half a second, on two workers that are
running: what is more than the sleep is the engine. Last, cells that cost nothing: planned, cut into units, handed to
two threads, kept in two stores and merged, by a process of its own whose peak memory is read."""
GIB = 2**30


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Three tables in one."""
    n, windows = (32, 2) if quick else (128, 4)
    start, alone, both = two_against_one({"lengths": n, "windows": windows}, 1 if quick else 3, report)
    report("half-second units")
    units = 4 if quick else 40
    more = overhead(units)
    report("trivial cells")
    cells = 2_000 if quick else 100_000
    seconds, peak = trivial(cells)
    rows = [
        [f"MiniLM, n = {n}, {windows} windows: one process", f"{alone:.1f} s"],
        ["the same by two", f"{both:.1f} s, {alone / both:.2f}× faster"],
        ["the two started, model opened, and 4 windows of 16 tokens", f"{start:.1f} s"],
        [f"{units} units of 0.5 s on two workers: more than they sleep", f"{100 * more:.1f} %"],
        [f"{cells:,} trivial cells planned, run and merged", f"{seconds:.1f} s, {peak / GIB:.2f} GiB"],
    ]
    section = Section("engines", "Engines", TEXT, [Table(["what", "measured"], rows)])
    section.targets = [
        Target("two processes against one, MiniLM's heads", "≥ 1.7×", f"{alone / both:.2f}×", alone / both >= 1.7),
        Target("engine overhead, units of 0.5 s", "< 10 %", f"{100 * more:.1f} %", more < 0.1),
        Target(f"{cells:,} trivial cells: memory of the driver", "< 1 GiB", f"{peak / GIB:.2f} GiB", peak < GIB),
    ]
    return section


def two_against_one(asked: dict[str, Any], rounds: int, report: Callable[[str], None]) -> tuple[float, float, float]:
    """Seconds until two workers have begun, of a scan by this process, and of the same by them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = open_model("minilm")
        with Processes(2, threads=1) as workers:
            report("starting two processes")
            start = seconds_of(lambda: scan(model, lengths=16, windows=4, executor=workers))
            report("one process and two, in turns")
            contestants = {"one": lambda: scan(model, **asked), "two": lambda: scan(model, **asked, executor=workers)}
            best = best_seconds(contestants, rounds, budget=300.0)
    finally:
        torch.set_num_threads(threads)
    return start, best["one"], best["two"]


def overhead(units: int) -> float:
    """The share by which sleeping units take longer on two workers than their sleep."""
    with Processes(2, threads=1) as workers:
        submit_all(workers, time.sleep, [0.0, 0.0], lambda *one: None, load=workers.load)  # started
        items = [0.5] * units
        taken = seconds_of(lambda: submit_all(workers, time.sleep, items, lambda *one: None, load=workers.load))
    return taken / (0.5 * units / 2) - 1


def trivial(cells: int) -> tuple[float, int]:
    """Seconds and peak bytes of a process that plans, runs and merges cells."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.engines", str(cells), folder]
        began = time.perf_counter()
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return time.perf_counter() - began, int(said)


def measure_nothing(batches: tuple[CellBatch, ...]) -> list[tuple[ScanCell, dict[str, Any]]]:
    """Rows as large as real ones."""
    none = dict.fromkeys(
        ["relative", "proved", "value_path", "score_path", *("value_share", "sink", "sink_token", "entropy")]
    )
    facts = {"confidence": 0.99, "converged": True, "bounds": {}, "radius": 1.0, "dtype": "float32", "seconds": 0.0}
    numbers = {"value": 1.0, "lower": 1.0, "upper": 1.0, "input_energy": [1 / 128] * 128} | none | facts
    return [(cell, numbers) for batch in batches for cell in batch.cells()]


def _trivial(cells: int, folder: Path) -> None:
    heads, layers = 10, 10
    plan = [
        CellBatch("head", layer, tuple(range(heads)), 128, window)
        for window in range(cells // (heads * layers))
        for layer in range(layers)
    ]
    identity = Identity("none", "m" * 64, "float32", "none", "t" * 64, ScanSettings(), "0")
    parts = [folder / "1.sqlite", folder / "2.sqlite"]
    for number, path in enumerate(parts, start=1):
        units = split(Shard(number, 2).part(plan), 2)
        with Store.writing(path) as store, ThreadPoolExecutor(2) as threads:
            scan_number = store.begin(identity)
            keep = lambda place, rows: store.add(scan_number, 0, ["token"] * 128, rows)  # noqa: B023, E731
            submit_all(threads, measure_nothing, units, keep, load=Load(4))
    done = merge(parts, folder / "all.sqlite")
    assert done.cells == cells, done
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    _trivial(int(sys.argv[1]), Path(sys.argv[2]))
