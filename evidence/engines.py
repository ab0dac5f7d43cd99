"""The same scan by every engine, also when a worker or the driver is killed.

`python -m evidence.engines FOLDER OUT ENGINE JOBS ADDRESS PACE` runs the scan of this page once, in a process that can
be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evidence.engine_faults import Place, places
from evidence.scan_faults import TEXT, contents, make_model
from evidence.tables import table
from howsmooth._util.sqlite_files import MEMORY
from howsmooth.engines import Engine, open_engine
from howsmooth.scans import Scan, Store, merge, units
from howsmooth.scans import scan as run_scan
from howsmooth.scans.cost import predict
from howsmooth.scans.plan import ScanOptions
from howsmooth.scans.run import ScanDriver, prepare
from howsmooth.scans.units import Unit, measure_unit

TITLE = "The same scan by every engine, and what dies on the way"
ROOT = Path(__file__).resolve().parents[1]
ASKED: dict[str, Any] = {"lengths": "6,8,12", "windows": 4, "what": "head,attention"}
CELLS = 3 * 4 * 2 * (4 + 1)
LIMIT = 600.0
"""Seconds that a unit may take here: nothing hangs, and a busy machine has its time."""
TROUBLED = (8, 1)
"""Length and window of the unit whose worker is killed."""
_ORDER = "kill"
Content = dict[tuple[Any, ...], tuple[Any, ...]]
Row = list[object]


def troubled(unit: Unit) -> Any:
    """`measure_unit`; the worker of one unit is killed, once, where that was ordered."""
    folder, first = Path(unit.origin.model), unit.batches[0]
    if (first.length, first.window) == TROUBLED and (folder / _ORDER).exists():
        (folder / _ORDER).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return measure_unit(unit)


def scanned(folder: Path, out: Path, executor: Executor | Engine | None, shard: str | None = None) -> Scan:
    """The scan of this page, with whatever trouble is ordered."""
    usual, units.measure_unit = units.measure_unit, troubled
    try:
        where = {} if executor is None else {"executor": executor, "timeout": LIMIT}
        return run_scan(str(folder), folder / TEXT, **ASKED, out=out, shard=shard, **where)
    finally:
        units.measure_unit = usual


@dataclass(frozen=True)
class Ending:
    """How a scan with trouble ended: cells of the undisturbed one that are missing or differ, and what was said."""

    missing: int
    differing: int
    said: tuple[str, ...]

    @classmethod
    def of(cls, whole: Content, out: Path, said: tuple[str, ...] = ()) -> Ending:
        """That of a store, which must pass every check."""
        there = contents(out)
        return cls(
            len(whole.keys() - there.keys()), sum(whole[cell] != content for cell, content in there.items()), said
        )


def disturbed(folder: Path, whole: Content, executor: Executor | Engine) -> Ending:
    """The scan with its trouble."""
    (folder / _ORDER).touch()  # beside the model, where workers look
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "s.sqlite")
        found = scanned(folder, out, executor)
        return Ending.of(whole, out, found.failures or found.notes)


def start(folder: Path, out: Path, engine: Engine, pace: float = 0.0) -> subprocess.Popen[str]:
    """The scan in a process of its own, which rests ``pace`` s at every step."""
    asked = [engine.kind, str(engine.jobs or 1), engine.address or "", str(pace)]
    command = [sys.executable, "-m", "evidence.engines", str(folder), str(out), *asked]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def driver_killed(folder: Path, whole: Content, engine: Engine) -> tuple[int, Ending]:
    """The driver killed when its store has its first cells, then started again; how many it had, and the end."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "s.sqlite")
        process = start(folder, out, engine, pace=1.0)  # else a busy machine may kill it after its end
        assert process.stdout is not None
        process.stdout.readline()  # the first cells are kept
        process.kill()
        process.communicate(timeout=900)  # ends when the workers have, which notice that they are alone
        kept = len(contents(out))
        _, last_words = start(folder, out, engine).communicate(timeout=900)
        return kept, Ending.of(whole, out, tuple(last_words.splitlines()))


def in_shards(folder: Path, count: int) -> Content:
    """The scan in shards, joined."""
    with tempfile.TemporaryDirectory() as name:
        parts = [Path(name, f"{number}.sqlite") for number in range(1, count + 1)]
        for number, part in enumerate(parts, start=1):
            scanned(folder, part, None, f"{number}/{count}")
        merge(parts, Path(name, "all.sqlite"))
        return contents(Path(name, "all.sqlite"))


def by(folder: Path, executor: Executor | Engine | None) -> Content:
    """The scan by an executor."""
    with tempfile.TemporaryDirectory() as name:
        scanned(folder, Path(name, "s.sqlite"), executor)
        return contents(Path(name, "s.sqlite"))


@contextmanager
def model_folder() -> Iterator[Path]:
    """A small model, in a place that workers see."""
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        yield Path(name)


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    torch.set_num_threads(1)
    with model_folder() as folder, tempfile.TemporaryDirectory() as seen, ExitStack() as opened:
        progress("in process")
        whole = by(folder, None)
        assert len(whole) == CELLS
        progress("shards")
        same: list[Row] = [["4 shards, merged", *_compared(whole, in_shards(folder, 4))]]
        faults: list[Row] = []
        for place in places(Path(seen), opened):
            if not isinstance(place, Place):
                same.append([place[0], "not run", place[1]])
                continue
            name, engine = place.name, place.engine
            if engine.kind == "slurm":
                engine = replace(engine, jobs=2, memory=3000)
            progress(name)
            with open_engine(engine) as executor:
                same.append([name, *_compared(whole, by(folder, executor))])
                progress(f"{name}: a worker killed")
                faults.append([name, "a worker killed with -9", *_summed(disturbed(folder, whole, executor))])
    progress("predictions")
    return page(same, faults, prediction_rows())


def predicted(model: str, **asked: Any) -> tuple[int, float, float]:
    """Cells of a scan in this process, the seconds of processor time that are predicted for it, and those it takes.

    Processor time, because the machine that makes this page may have other things to do.
    """
    ready = prepare(model, None, ScanOptions(**asked))
    ready.at_hand.clear()
    expected = predict(ready, ready.plan, clock=time.process_time)
    begun = time.process_time()
    with Store.writing(MEMORY) as store:
        ScanDriver(ready, ready.plan, store, store.begin(ready.identity), lambda progress: None).measure_here()
    return expected.cells, expected.seconds, time.process_time() - begun


SCANS: dict[str, dict[str, Any]] = {
    "random:bert[layers=4,width=64]": {"lengths": "16,32,…,128", "windows": 3, "what": "head"},
    "random:gpt2[layers=3,width=96]": {"lengths": "48,192", "windows": 3, "what": "head,attention"},
    "random:llama[layers=3,width=64]": {"lengths": "32,64,…,512", "windows": 1, "what": "head,mlp"},
}
"""Three scans that have little in common."""


def prediction_rows() -> list[Row]:
    """Prediction against outcome of three scans."""
    rows: list[Row] = []
    for model, asked in SCANS.items():
        cells, expected, took = predicted(model, **asked)
        said = f"{asked['what']}, lengths {asked['lengths']}"
        rows.append([model, said, cells, f"{expected:.1f}", f"{took:.1f}", f"{100 * (expected / took - 1):+.0f} %"])
    return rows


def page(same: list[Row], faults: list[Row], costs: list[Row]) -> list[str]:
    """The page of all tables."""
    return [
        f"A scan of {CELLS} cells (a random BERT of two layers; heads and blocks, lengths {ASKED['lengths']}, "
        f"{ASKED['windows']} windows; one thread of torch everywhere) in one process is compared bit by bit with the "
        "same scan by every engine; only the seconds are left out.",
        table(["by", "cells that differ or are missing", ""], same),
        "Then the worker of one window is killed in the midst of it. Its unit must be measured again, every cell must "
        "be in the store, once, as in the undisturbed scan, and the store must pass `PRAGMA integrity_check`, "
        "`foreign_key_check` and the checksum of every row. Workers here import torch and open a model; [every fault "
        "ten times](engine-faults.md), lost nodes and full disks among them, is done with cells that cost nothing.",
        table(["engine", "fault", "cells missing", "cells that differ", "what was said"], faults),
        "What `--plan` predicts, after its calibration, against what the scan takes: seconds of processor time of one "
        "process with one thread.",
        table(["model", "what", "cells", "predicted", "took", "off by"], costs),
    ]


def _compared(whole: Content, there: Content) -> list[object]:
    wrong = sum(there.get(cell) != content for cell, content in whole.items()) + len(there.keys() - whole.keys())
    return [wrong, f"{len(there)} cells"]


def _summed(ending: Ending) -> list[object]:
    said = "; ".join(line[:160] for line in ending.said[:2])
    return [ending.missing, ending.differing, said.replace("|", "/")]


def _main(folder: str, out: str, kind: str, jobs: str, address: str, pace: str) -> int:
    """Run the scan, print a line when the first cells are kept, and say in one line why it ended early."""
    from howsmooth.errors import HowsmoothError

    torch.set_num_threads(1)
    place = Path(folder)
    engine = Engine(kind, jobs=int(jobs), threads=1, address=address or None, memory=3000, folder=place / "slurm")
    shown: list[int] = []

    def show(now: Any) -> None:
        if now.cells and not shown:
            shown.append(now.cells)
            print(now.label, flush=True)
        if now.cells:
            time.sleep(float(pace))

    try:
        run_scan(str(place), place / TEXT, **ASKED, out=Path(out), executor=engine, timeout=LIMIT, progress=show)
    except HowsmoothError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
