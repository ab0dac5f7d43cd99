"""Cells that cost nothing, and the trouble that can be ordered for those of one window: what workers import.

Nothing here imports torch, so that a worker is there in a moment and hundreds can be lost.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WINDOWS, HEADS = 12, 10
TROUBLED = 5
"""The window that trouble comes to."""
_ORDERS, _ONCE, _PLACE = "trouble.json", "happened", "node"


@dataclass(frozen=True)
class Piece:
    """All cells of a window; ``folder`` is where trouble is ordered, ``pace`` how many seconds they take."""

    folder: str
    window: int
    pace: float


def value(window: int, head: int) -> float:
    """What the cell of a head in a window holds."""
    return 2 + math.sin(1 + window * HEADS + head)


def order(folder: Path, kind: str) -> None:
    """What happens to the piece of one window: "kill" or "node" (its worker, or its machine, is lost: once), "fail" or
    "hang" (always)."""
    for name in (_ONCE, _PLACE):
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    (folder / _ORDERS).write_text(json.dumps(kind), encoding="utf-8")


def revoke(folder: Path) -> None:
    """No more trouble."""
    (folder / _ORDERS).unlink()


def node_wanted(folder: Path) -> str | None:
    """The machine that is to be lost, once a worker on it has begun the piece; None before."""
    with suppress(FileNotFoundError):
        return (folder / _PLACE).read_text(encoding="utf-8") or None
    return None


def measure_piece(piece: Piece) -> list[float]:
    """The values of a piece, with the trouble that was ordered."""
    folder = Path(piece.folder)
    time.sleep(piece.pace)
    if piece.window == TROUBLED and (folder / _ORDERS).exists():
        _TROUBLES[json.loads((folder / _ORDERS).read_text(encoding="utf-8"))](folder)
    return [value(piece.window, head) for head in range(HEADS)]


def _kill(folder: Path) -> None:
    if not (folder / _ONCE).exists():
        (folder / _ONCE).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _lose_node(folder: Path) -> None:
    if not (folder / _ONCE).exists():
        (folder / _ONCE).touch()
        (folder / _PLACE).write_text(_this_node(), encoding="utf-8")
        time.sleep(10**6)


def _this_node() -> str:
    """As the engine calls it."""
    if "SLURMD_NODENAME" in os.environ:
        return os.environ["SLURMD_NODENAME"]
    with suppress(ImportError):
        import ray

        if ray.is_initialized():
            return str(ray.get_runtime_context().get_node_id())
    return str(os.getpgid(0))


def _fail(folder: Path) -> None:
    raise ArithmeticError("this window always fails")


def _hang(folder: Path) -> None:
    time.sleep(10**6)


_TROUBLES: dict[str, Callable[[Path], None]] = {"kill": _kill, "node": _lose_node, "fail": _fail, "hang": _hang}
