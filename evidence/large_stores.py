"""Stores as large as those of large models, without measuring anything: how long do they take to open and to report?

`python -m evidence.large_stores OUT LAYERS HEADS LENGTHS WINDOWS` writes one.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evidence.tables import table
from howsmooth.scans import Store
from howsmooth.scans.plan import ScanCell, ScanSettings
from howsmooth.scans.scan_store import Identity

TITLE = "How large may a scan be?"
ROOT = Path(__file__).resolve().parents[1]
LENGTHS = "8,16,32,64,128,256,512,1024"
BOUNDS = ("howsmooth.softmax_jacobian", "howsmooth.sqrt_n", "howsmooth.mean_field", "kim2021.l2", "castin2024.general")


@dataclass(frozen=True)
class Size:
    """The cells of a store."""

    layers: int = 32
    heads: int = 32
    lengths: str = LENGTHS
    windows: int = 24

    @property
    def cells(self) -> int:
        return self.layers * self.heads * len(self.lengths.split(",")) * self.windows


def write_store(out: Path, size: Size, seed: int = 0) -> None:
    """A store with numbers that look like measured ones: σ grows with n, and shares of tokens sum to one."""
    identity = Identity(
        "large", "a" * 64, "float32", "novel.txt", "b" * 64, ScanSettings(windows=size.windows), "0.1.0"
    )
    with Store.writing(out) as store:
        number = store.begin(identity)
        for length in map(int, size.lengths.split(",")):
            for window in range(size.windows):
                draw, shares = random.Random(f"{seed} {length} {window}"), np.random.default_rng([seed, length, window])
                tokens = [f"w{draw.randrange(5000)}" for _ in range(length)]
                found = []
                for layer in range(size.layers):
                    for head in range(size.heads):
                        value = (1 + head / 8) * length ** (layer / size.layers) * draw.uniform(0.8, 1.25)
                        energy = shares.dirichlet(np.full(length, 0.1))
                        found.append((ScanCell("head", layer, head, length, window), _numbers(value, energy, length)))
                store.add(number, 1000 * window, tokens, found)


def _numbers(value: float, energy: np.ndarray, length: int) -> dict[str, object]:
    return {
        "value": value,
        "lower": 0.9995 * value,
        "upper": 1.0005 * value,
        "confidence": 0.99,
        "converged": True,
        "proved": 3.1 * value,
        "bounds": {name: (5 + place) * value for place, name in enumerate(BOUNDS)},
        "radius": 9.87654321,
        "relative": 1.5 * value,
        "value_path": 0.7 * value,
        "score_path": 0.5 * value,
        "value_share": 0.66,
        "sink": 0.3 * length,
        "sink_token": 0,
        "entropy": 1.25,
        "dtype": "float32",
        "seconds": 0.0123456789,
        "input_energy": [float(f"{share:.6g}") for share in energy],
    }


@dataclass(frozen=True)
class Cost:
    """What a piece of work took, in a process of its own."""

    seconds: float
    gigabytes: float


def cost(code: str) -> Cost:
    """Processor time and largest resident memory of some lines of Python; without the time of importing."""
    lines = (
        "import resource, time, howsmooth.scans, howsmooth.reports, howsmooth.cli",
        "begun = time.process_time()",
        code,
        "print(time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, kilobytes = done.stdout.splitlines()[-1].split()
    return Cost(float(seconds), int(kilobytes) * 1024 / 1e9)


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    lines = []
    for size in (Size(windows=3), Size()):
        with tempfile.TemporaryDirectory() as name:
            store, page = Path(name, "large.sqlite"), Path(name, "large.html")
            progress(f"{size.cells} cells: writing")
            write_store(store, size)
            progress(f"{size.cells} cells: reading")
            opened = cost(f"howsmooth.scans.Scan.open({str(store)!r})")
            reported = cost(f"howsmooth.reports.report({str(store)!r}, {str(page)!r})")
            lines.append(
                [
                    f"{size.cells:,}",
                    f"{store.stat().st_size / 1e6:.0f} MB",
                    f"{opened.seconds:.1f} s, {opened.gigabytes:.2f} GB",
                    f"{reported.seconds:.1f} s, {reported.gigabytes:.2f} GB",
                    f"{page.stat().st_size / 1e6:.2f} MB",
                ]
            )
    return [
        "Stores of 32 layers with 32 heads at eight lengths up to 1024 tokens, with numbers that were drawn, not "
        "measured: opened with `Scan.open`, and written as a page with `hs.report`, each in a process of its "
        "own, in seconds of processor time. Memory is the largest that the process held, of which Python and "
        "torch take about 0.3 GB. Opening proves every row by its checksum; the shares of tokens, most of the "
        "file, are read where they are shown.",
        table(["cells", "store", "opened in", "reported in", "page"], lines),
    ]


if __name__ == "__main__":
    write_store(Path(sys.argv[1]), Size(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
