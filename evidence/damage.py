"""Files with one byte changed: is every one refused, or as good as it was?

A `Kind` says how to make a file and how to read it. `damage` changes one byte at a time, at places and to values that a
seed draws, and reads the file in a process of its own, so that a crash or a hang is seen too.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evidence.tables import table
from howsmooth._util.ledger import Ledger
from howsmooth.errors import HowsmoothError

TITLE = "What does a damaged file do?"
TRIALS = 600
_WINDOWS = 8
SECONDS = 60
"""After which a file that is being read counts as a hang."""
OUTCOMES = ("refused", "same", "different", "crash")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: in words.
        make: writes a sound file of this kind into a folder.
        read: all that the file says, as something that compares equal when it is the same; raises `HowsmoothError`
            to refuse.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]


@dataclass
class Found:
    """What came of many damages.

    Attributes:
        counts: outcome → how often.
        wrong: place, byte and what happened, for every damage that was neither refused nor harmless.
        messages: what was said where the file was refused.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def damage(kind: Kind, trials: int = TRIALS, seed: int = 0) -> Found:
    """Change one byte at a time and see what reading says: "refused", "same", "different" or "crash"."""
    draw, found = random.Random(seed), Found()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sound").mkdir()
        path = kind.make(folder / "sound")
        content = path.read_bytes()
        sound = kind.read(path)  # which may write to it
        for trial in range(trials):
            place = draw.randrange(len(content))
            byte = content[place] ^ draw.randrange(1, 256)
            copy = folder / f"{trial}{path.suffix}"
            copy.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            outcome, said = _outcome(kind, copy, sound)
            found.counts[outcome] += 1
            if outcome == "refused":
                found.messages.append(said)
            elif outcome != "same":
                found.wrong.append(f"byte {place} {content[place]:#x} → {byte:#x}: {outcome}, {said}")
            for left in folder.glob(f"{trial}.*"):
                left.unlink()
    return found


def _outcome(kind: Kind, path: Path, sound: Any) -> tuple[str, str]:
    """What one file does, in a child: it may die of it."""
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe(duplex=False)
    child = forked.Process(target=_read, args=(kind, path, sound, there))
    child.start()
    there.close()
    try:
        said: tuple[str, str] = here.recv() if here.poll(SECONDS) else ("crash", f"no end after {SECONDS} s")
    except EOFError:
        said = ("crash", "the process died")
    child.kill()
    child.join()
    here.close()
    return said


def _read(kind: Kind, path: Path, sound: Any, answer: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        said = ("same", "") if kind.read(path) == sound else ("different", "other contents")
    except HowsmoothError as error:
        said = ("refused", str(error))
    except BaseException as error:
        said = ("crash", f"{type(error).__name__}: {error}")
    answer.send(said)


def _make_store(folder: Path) -> Path:
    from evidence.large_stores import Size, write_store

    write_store(folder / "scan.sqlite", Size(layers=3, heads=4, lengths="8,16,200", windows=3))
    return folder / "scan.sqlite"


def _read_store(path: Path) -> Any:
    """Rows, tokens and shares as a report reads them, to the last bit."""
    from howsmooth.scans import Scan

    scan = Scan.open(path)
    shares = scan.energies.several(list(scan.energies))  # type: ignore[attr-defined]
    return json.dumps([scan.rows, [[*key] for key in shares], *shares.values(), [*scan.tokens.items()], scan.settings])


def _go_on(path: Path) -> Any:
    """The store after a scan has gone on in it."""
    from evidence.large_stores import Size, write_store

    write_store(path, Size(layers=3, heads=4, lengths="8,16,32,200", windows=3))
    return _read_store(path)


def _salvage(path: Path) -> Any:
    """Whether all that is salvaged was written: the store that was sound has more, never other rows."""
    from howsmooth.scans import Scan, salvage

    new = path.with_name(f"{path.stem}.salvaged.sqlite")
    try:
        salvage(path, new)
        rows = {json.dumps(row) for row in Scan.open(new).rows}
    finally:
        new.unlink(missing_ok=True)
    sound = (
        {json.dumps(row) for row in Scan.open(path.parent / "sound" / "scan.sqlite").rows} if _is_copy(path) else rows
    )
    return rows <= sound and bool(rows)


def _is_copy(path: Path) -> bool:
    return path.parent.name != "sound"


def _windows(path: Path) -> Any:
    """The windows of a run of ``quantise``, those that are missing computed anew."""

    def find(window: int) -> dict[str, torch.Tensor]:
        return {"products": torch.arange(4.0) + window, "count": torch.tensor(window)}

    with Ledger.writing(path, {"model": "a"}) as ledger:
        found = [ledger.tensors(f"window {window}", partial(find, window)) for window in range(_WINDOWS)]
    return [{name: tensor.tolist() for name, tensor in one.items()} for one in found]


def _make_windows(folder: Path) -> Path:
    _windows(folder / "quantise.sqlite")
    return folder / "quantise.sqlite"


def _radii(path: Path) -> Any:
    """The images of a run of ``certify``, those that are missing certified anew."""
    with Ledger.writing(path, {"network": "a" * 64, "images": "b" * 64, "norm": "2"}) as ledger:
        known = ledger.read_json()
        for image in range(_WINDOWS):
            if f"image {image}" not in known:
                ledger.write_json(f"image {image}", {"image": image, "radius": 0.125 + image / 7})
        return sorted(json.dumps(row, sort_keys=True) for row in ledger.read_json().values())


def _make_radii(folder: Path) -> Path:
    _radii(folder / "radii.sqlite")
    return folder / "radii.sqlite"


KINDS = {
    "store": Kind("store, read", _make_store, _read_store),
    "store-resumed": Kind("store, a scan goes on in it", _make_store, _go_on),
    "store-salvaged": Kind("store, salvaged", _make_store, _salvage),
    "windows": Kind("ledger of quantise, a run goes on in it", _make_windows, _windows),
    "radii": Kind("ledger of certify, a run goes on in it", _make_radii, _radii),
}
"""Every kind of file that is read; others are added here."""


def parts(progress: Callable[[str], None], names: Sequence[str] = tuple(KINDS)) -> list[str]:
    """The text and table of the documentation page."""
    rows = []
    for name in names:
        progress(KINDS[name].name)
        found = damage(KINDS[name])
        rows.append([KINDS[name].name, TRIALS, *(found.counts[outcome] for outcome in OUTCOMES)])
        if found.wrong:
            progress(f"{name}: {found.wrong[0]}")
    return [
        f"A sound file of each kind has one byte changed, {TRIALS} times, at a place and to a value drawn from a seed, "
        "and is read in a process of its own. *Refused* is one sentence that says what is wrong; *same* is bit by bit "
        "what the sound file says; *different* would be other contents taken for good; a *crash* any other error, a "
        f"signal or no end within {SECONDS} seconds. Of a salvaged store, *same* means that every row it kept was "
        "written by the scan.",
        table(["file", "damages", *OUTCOMES], rows),
    ]
