"""Timing in turns: the least of several rounds, so that a busy moment hits every contestant and then is forgotten."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


def seconds_of(task: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def best_seconds(
    contestants: Mapping[str, Callable[[], object]], rounds: int = 5, budget: float = math.inf
) -> dict[str, float]:
    """The least seconds of each contestant over rounds in which all run once, one after the other.

    A first call of each is not counted. After the first round no new one begins beyond ``budget`` seconds.

    >>> best = best_seconds({"short": lambda: sum(range(100)), "long": lambda: sum(range(100_000))})
    >>> list(best)
    ['short', 'long']
    """
    started = time.perf_counter()
    best = dict.fromkeys(contestants, math.inf)
    for task in contestants.values():
        task()
    for done in range(rounds):
        if done and time.perf_counter() - started > budget:
            break
        for name, task in contestants.items():
            best[name] = min(best[name], seconds_of(task))
    return best
