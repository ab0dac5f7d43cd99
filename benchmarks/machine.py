"""The machine a benchmark ran on, in one line."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name as the system gives it.

    >>> bool(processor())
    True
    """
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe() -> str:
    """Processor, cores, memory, versions, threads, and the load found: a busy machine makes ratios unsure."""
    return (
        f"{processor()}, {cores()} cores, {memory_gib():.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).date().isoformat()
