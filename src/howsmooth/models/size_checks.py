"""Checks that the sizes in a configuration agree with its weights and fit into free memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from howsmooth._util.common import printable
from howsmooth.errors import InvalidInput

_LAYERS = re.compile(r"(^|_)(n_?layers?|num_\w*layers|\w+_layers|depths?|num_\w*blocks|num_labels)$")
_ORDINARY = 1000
"""Larger counts are compared with the number of tensors."""
_LONGEST = 2**20
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def check_config(path: Path, tensors: int) -> None:
    """Refuse a config.json whose counts of layers and labels do not agree with the number of tensors in the file.

    Layers are Python objects and labels entries of a table: a thousand million of them would fill the memory before any
    weight is read.
    """
    try:
        if path.stat().st_size > 64 * _LONGEST:
            raise ValueError("larger than 64 MB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not a configuration in JSON ({printable(str(error))[:100]}): get the file again."
        ) from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} is not a configuration: it must hold one JSON object.")
    check_counts(content, tensors, path.name)


def check_counts(content: dict[str, Any], tensors: int, name: str) -> None:
    """Refuse counts of layers and labels above the number of tensors; every layer has at least one."""
    for key, value in _numbers(content):
        if _LAYERS.search(key) and value > max(_ORDINARY, tensors):
            raise InvalidInput(
                f"{name} sets {printable(key)} to {value:g}, but the weights are {tensors} tensors: give the "
                "configuration that belongs to them."
            )


def _numbers(content: Any) -> Iterator[tuple[str, float]]:
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(min(value, 1e300))


def check_size(skeleton: nn.Module, stored: int) -> None:
    """Refuse a model with far more parameters than the file; ``skeleton`` is the model on the meta device."""
    described = sum(t.numel() for t in {id(t): t for t in (*skeleton.parameters(), *skeleton.buffers())}.values())
    # A file may lack poolers, an unused decoder and computed tables of positions.
    if described > 4 * stored + 2**24:
        raise InvalidInput(
            f"config.json describes a model of {described:.3g} numbers, but the weights hold {stored:.3g}: give the "
            "config.json that belongs to them."
        )


def check_free_memory(numbers: int, what: str) -> None:
    """Refuse a number of float32 values that does not fit into free memory."""
    free = free_bytes()
    if 4 * numbers > free:
        raise InvalidInput(
            f"{what} has about {numbers:.2g} parameters, {4 * numbers / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB of "
            "memory are free: ask for fewer layers or a smaller width, or free some memory."
        )


def free_bytes() -> int:
    """Free memory: the minimum over the machine, the control group and the limit of this process."""
    free = []
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):
            free.append(int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
    with suppress(ImportError, OSError, ValueError):
        import resource

        maximum = resource.getrlimit(resource.RLIMIT_AS)[0]
        if maximum != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            free.append(maximum - pages * resource.getpagesize())
    return max(0, min(free, default=2**33))
