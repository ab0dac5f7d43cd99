"""How many threads to take on a machine where others compute too."""

from __future__ import annotations

import os


def leave_room() -> None:
    """Let torch take the cores that are free, before it is imported; where OMP_NUM_THREADS says how many, those."""
    if "OMP_NUM_THREADS" not in os.environ and (threads := free_cores()) is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def free_cores() -> int | None:
    """The cores that this process may use less those that are busy, at least one; None where nobody else computes.

    torch takes all cores there are. Beside other work each of its products then waits for the slowest of its threads,
    and two such programs take several times as long as one after the other.
    """
    try:
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        busy = os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
    return None if busy < 0.5 else max(1, mine - round(busy))
