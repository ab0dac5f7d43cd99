"""Every fault ten times on every engine: workers, nodes, drivers and disks that fail while cells are collected."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evidence.clusters import NODES, Nodes, ray_cluster, slurm_cluster
from evidence.fault_cells import HEADS, TROUBLED, WINDOWS, Piece, measure_piece, node_wanted, order, revoke, value
from evidence.scan_faults import contents
from evidence.tables import table
from howsmooth.engines import Engine, EngineError, open_engine, submit_all
from howsmooth.engines.choice import load_of
from howsmooth.errors import HowsmoothError
from howsmooth.scans import Store
from howsmooth.scans.plan import ScanCell, ScanSettings
from howsmooth.scans.scan_store import Identity

TITLE = "Every fault ten times on every engine"
CELLS = WINDOWS * HEADS
TIMES = 10
LIMIT = 8.0
"""Seconds that a piece may take; what a worker imports before does not count."""
MOST_BYTES = 110_000
"""Room for the store when its disk is full: for the schema and some windows, not for all."""
_PATIENCE = 600
_KEPT = "kept"
Content = dict[tuple[Any, ...], tuple[Any, ...]]
Row = list[object]


@dataclass(frozen=True)
class Ending:
    """How it ended: cells that are missing or differ, and what was said of the piece in trouble."""

    missing: int
    differing: int
    said: tuple[str, ...] = ()
    kept: int = 0


def expected(folder: Path) -> Content:
    """What a store holds when nothing happens: written here, by no engine."""
    out = folder / "expected.sqlite"
    with Store.writing(out) as store:
        number = store.begin(_identity())
        for window in range(WINDOWS):
            _keep(store, number, window, [value(window, head) for head in range(HEADS)])
        store.finish(number)
    return contents(out)


def collect(folder: Path, out: Path, executor: Executor, pace: float, tell: Callable[[int], None]) -> tuple[str, ...]:
    """Have all cells that a store lacks worked on, as a scan does; the reasons of what was tried again, or failed."""
    said: list[str] = []
    with Store.writing(out) as store:
        number = store.begin(_identity())
        there = {cell.window for cell in store.cells(number)}
        pieces = [Piece(str(folder), window, pace) for window in range(WINDOWS) if window not in there]

        def keep(place: int, values: list[float]) -> None:
            _keep(store, number, pieces[place].window, values)
            tell(pieces[place].window)

        failures = submit_all(
            executor,
            measure_piece,
            pieces,
            keep,
            load=load_of(executor),
            limit=LIMIT,
            retry=lambda place, reason: said.append(f"tried again: {reason}"),
        )
        if failures:
            return tuple(f"window {pieces[one.place].window} given up: {one.reasons[-1]}" for one in failures)
        store.finish(number)
    return tuple(said)


def disturbed(folder: Path, whole: Content, executor: Executor, kind: str, pace: float, nodes: Nodes | None) -> Ending:
    """All cells collected once, with one kind of trouble."""
    order(folder, kind)
    try:
        with tempfile.TemporaryDirectory() as name, _losing(folder, nodes):
            out = Path(name, "s.sqlite")
            said = collect(folder, out, executor, pace, lambda window: None)
            return _ending(whole, out, said)
    finally:
        revoke(folder)


def driver_lost(folder: Path, whole: Content, engine: Engine, pace: float, machine: bool = False) -> Ending:
    """The driver killed when its store has its first cells, with all its workers if ``machine``; then started again."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "s.sqlite")
        driver = Driver(folder, out, engine, 3 * pace)
        driver.first_cells()
        driver.kill(machine)
        kept = len(contents(out))
        return _ending(whole, out, Driver(folder, out, engine, pace).last_words(), kept)


def disk_full(folder: Path, whole: Content, engine: Engine, pace: float) -> Ending:
    """The driver without room for its store, then with."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "s.sqlite")
        first = Driver(folder, out, engine, pace, MOST_BYTES).last_words()
        kept = len(contents(out))
        return _ending(whole, out, (*first, *Driver(folder, out, engine, pace).last_words()), kept)


class Driver:
    """A process, and a process group, that collects the cells into a store, and may write files up to a size.

    It is forked from a server that has imported what it needs: starting Python sixty times is no part of the matter.
    """

    def __init__(self, folder: Path, out: Path, engine: Engine, pace: float, most_bytes: int | None = None):
        here = multiprocessing.get_context("forkserver")
        here.set_forkserver_preload([__name__])
        self._words, words = here.Pipe(duplex=False)
        self._process = here.Process(target=_drive, args=(folder, out, engine, pace, most_bytes, words))
        self._process.start()
        words.close()

    def first_cells(self) -> None:
        """Wait until the store has some."""
        assert self._words.poll(_PATIENCE)
        assert self._words.recv() == _KEPT

    def kill(self, machine: bool) -> None:
        """The driver alone, or all that it has started too."""
        pid = self._process.pid
        assert pid is not None
        (os.killpg if machine else os.kill)(pid, signal.SIGKILL)
        self._process.join()

    def last_words(self) -> tuple[str, ...]:
        """What it said, once it has ended."""
        said: list[str] = []
        with suppress(EOFError):
            while self._words.poll(_PATIENCE):
                word = self._words.recv()
                said += [] if word == _KEPT else [word]
        self._process.join()
        return tuple(said)


def rounds(place: Place, whole: Content, pace: float, times: int) -> Iterator[tuple[str, list[Ending]]]:
    """Every fault several times on an engine; where it lets several drivers work at once, faults go side by side."""
    engine, nodes = place.engine, place.nodes

    def inside(kind: str) -> list[Ending]:
        folder = _made(place.folder / kind)
        with open_engine(engine) as executor:
            return [disturbed(folder, whole, executor, kind, pace, nodes) for _ in range(times)]

    def outside(fault: Callable[..., Ending], *more: bool) -> list[Ending]:
        folder = _made(place.folder / fault.__name__)
        return [fault(folder, whole, engine, pace, *more) for _ in range(times)]

    lost = partial(outside, driver_lost, True) if nodes is None else partial(inside, "node")
    yield "machine lost: driver and workers" if nodes is None else "node lost", lost()  # alone: it hits all drivers
    faults = {words: partial(inside, kind) for kind, words in _WORDS.items()}
    faults |= {"driver killed, run again": partial(outside, driver_lost)}
    faults |= {"disk full, then room made": partial(outside, disk_full)}
    with ThreadPoolExecutor(1 if engine.kind == "ray" else 3) as threads:
        yield from zip(faults, threads.map(lambda fault: fault(), faults.values()), strict=True)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@dataclass(frozen=True)
class Place:
    """An engine that can run here: its name, itself, the cluster whose nodes can be lost, and a folder it sees."""

    name: str
    engine: Engine
    nodes: Nodes | None
    folder: Path


def places(folder: Path, opened: ExitStack) -> Iterator[Place | tuple[str, str]]:
    """All engines, or the reason why one cannot run here."""
    for name in ("processes", "slurm", "ray"):
        own = folder / name
        own.mkdir()
        title = {"processes": "2 processes", "slurm": f"SLURM, {NODES} nodes", "ray": f"Ray, {NODES} nodes"}[name]
        try:
            if name == "slurm":
                slurm = opened.enter_context(slurm_cluster())
                with open_engine(Engine("slurm", jobs=2, folder=own / "jobs")):
                    pass
                yield Place(title, Engine("slurm", jobs=4, memory=1000, folder=own / "jobs"), slurm, own)
            elif name == "ray":
                ray = opened.enter_context(ray_cluster())
                yield Place(title, Engine("ray", address=ray.address), ray, own)
            else:
                yield Place(title, Engine(jobs=2, threads=1), None, own)
        except EngineError as error:
            yield title, str(error)


def parts(progress: Callable[[str], None], times: int = TIMES, pace: float = 0.3) -> list[str]:
    """The text and table of the documentation page; engines mostly wait, so that they take their rounds together."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        whole = expected(folder)
        assert len(whole) == CELLS
        found = list(places(folder, opened))
        there = [one for one in found if isinstance(one, Place)]
        absent = [one for one in found if not isinstance(one, Place)]
        run = partial(_rows, whole, pace, times, progress)
        with ThreadPoolExecutor(len(there)) as threads:
            futures = {one.name: threads.submit(run, one) for one in there if one.engine.kind != "ray"}
            ray = {one.name: run(one) for one in there if one.engine.kind == "ray"}  # wants the main thread
            tables = {name: future.result() for name, future in futures.items()} | ray
        rows = [row for table_ in tables.values() for row in table_]
    rows += [[name, f"not run: {why}", 0, "", "", "", ""] for name, why in absent]
    return page(rows, time.perf_counter() - began)


def page(rows: list[Row], seconds: float) -> list[str]:
    """The page of the table."""
    return [
        f"{CELLS} cells in {WINDOWS} units are worked on by real engines on one machine, and kept in a store by the "
        "code that scans use (`submit_all`, retries, limits and the store); only the numbers are made up, so that a "
        "worker starts without torch and hundreds can be lost. SLURM has a scheduler and a daemon for each node; a "
        "node is lost when its daemon and all processes of its jobs are killed at once. Ray's nodes are daemons with "
        "workers of their own, beside a head. For processes, the machine is lost: driver and workers killed together.",
        f"Trouble comes to window {TROUBLED}. A unit that hangs is ended after {LIMIT:g} s. Every other cell must be "
        "in the store, once, with the numbers that it has when nothing happens; the store must pass `PRAGMA "
        "integrity_check`, `foreign_key_check` and the checksum of every row, also when the driver has just died.",
        table(["engine", "fault", "times", "missing each time", "differ", "kept before", "what was said"], rows),
        f"Missing are the {HEADS} cells of the window that always fails, or hangs, and no others. It took "
        f"{seconds / 60:.0f} minutes, mostly waiting; {os.cpu_count()} cores had a load of {os.getloadavg()[2]:.0f}. "
        "Real scans with some of these faults are in [the same scan by every engine](engines.md).",
    ]


def _rows(whole: Content, pace: float, times: int, progress: Callable[[str], None], place: Place) -> list[Row]:
    rows: list[Row] = []
    for words, endings in rounds(place, whole, pace, times):
        rows.append([place.name, words, *summed(endings)])
        progress(f"{place.name}: {words}: {rows[-1][2:]}")
    return rows


def summed(endings: list[Ending]) -> Row:
    """Several endings in one row."""
    missing = " or ".join(map(str, sorted({ending.missing for ending in endings})))
    kept = sorted(ending.kept for ending in endings)
    said = sorted({line for ending in endings for line in ending.said}, key=len)
    before = f"{kept[0]} to {kept[-1]}" if kept[-1] else ""
    return [
        len(endings),
        missing,
        sum(ending.differing for ending in endings),
        before,
        (said[0] if said else "")[:160].replace("|", "/"),
    ]


_WORDS = {
    "kill": "worker killed with -9",
    "fail": "unit that always fails",
    "hang": "unit that hangs",
}


def _identity() -> Identity:
    return Identity("none", "m" * 64, "float32", "none", "t" * 64, ScanSettings(windows=WINDOWS), "0")


def _keep(store: Store, number: int, window: int, values: list[float]) -> None:
    none = dict.fromkeys(
        ["proved", "value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "relative"]
    )
    facts = {"confidence": 0.99, "converged": True, "bounds": {}, "radius": 1.0, "dtype": "float32", "seconds": 0.0}
    energy = {"input_energy": [1 / 128] * 128}
    rows: list[tuple[ScanCell, dict[str, Any]]] = [
        (ScanCell("head", 0, head, 128, window), {"value": one, "lower": one, "upper": one} | energy | none | facts)
        for head, one in enumerate(values)
    ]
    store.add(number, window, ["token"] * 128, rows)


def _ending(whole: Content, out: Path, said: tuple[str, ...], kept: int = 0) -> Ending:
    there = contents(out)
    said = tuple(line.replace(str(out), out.name) for line in said)
    differing = sum(whole.get(cell) != content for cell, content in there.items())
    return Ending(len(whole.keys() - there.keys()), differing, said, kept)


@contextmanager
def _losing(folder: Path, nodes: Nodes | None) -> Iterator[None]:
    """Lose the node that is wanted meanwhile, and have another afterwards."""
    over, lost = threading.Event(), list[str]()

    def watch() -> None:
        while not over.wait(0.2):
            name = node_wanted(folder)
            if name is not None and nodes is not None:
                nodes.lose(name)
                lost.append(name)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for name in lost:
            assert nodes is not None
            nodes.mend(name)


def _drive(folder: Path, out: Path, engine: Engine, pace: float, most_bytes: int | None, words: Any) -> None:
    """In a driver: collect, tell when cells are kept, and say in one line why it ended early."""
    os.setsid()
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    try:
        with open_engine(engine) as executor:
            said = collect(folder, out, executor, pace, lambda window: words.send(_KEPT))
    except HowsmoothError as error:
        said = (str(error),)
    for line in said:
        words.send(line)
