"""Shards: one scan in N independent parts, each with a store of its own.

Part i of N has the units i, i + N, i + 2N, … of the whole plan, whatever is stored already, so that the parts are
disjoint and together the whole. A store records its part in a table of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from howsmooth._util.sqlite_files import StoreError
from howsmooth._util.validation import shown
from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import CellBatch
from howsmooth.scans.scan_store import Store
from howsmooth.scans.units import split

_MOST = 1_000_000


@dataclass(frozen=True)
class Shard:
    """One part of a scan.

    Attributes:
        number, count: part number 1 … count.
        model_sha256, text_sha256, plan: which scan; ``plan`` is a digest of all cells that were asked for.
        cells, there: how many it has when it is done, and how many it has.
    """

    number: int
    count: int
    model_sha256: str = ""
    text_sha256: str = ""
    plan: str = ""
    cells: int = 0
    there: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def whole(self) -> Shard:
        """The shard without the fields in which parts of one scan differ."""
        return replace(self, number=0, cells=0, there=0)

    def part(self, plan: Sequence[CellBatch]) -> list[CellBatch]:
        """The batches of this shard.

        >>> plan = [CellBatch("head", layer, (0,), 8, window) for window in range(3) for layer in range(4)]
        >>> parts = [Shard(number, 3).part(plan) for number in (1, 2, 3)]
        >>> sum(map(len, parts)), set(plan) == {batch for batches in parts for batch in batches}
        (12, True)
        """
        units = split(plan, self.count)
        return [batch for unit in units[self.number - 1 :: self.count] for batch in unit]

    def of(self, plan: Sequence[CellBatch], model_sha256: str, text_sha256: str) -> Shard:
        """This part of a scan, with the fields that the store records."""
        said = hashlib.sha256(repr(list(plan)).encode()).hexdigest()
        cells = sum(len(batch.heads) for batch in self.part(plan))
        return replace(self, model_sha256=model_sha256, text_sha256=text_sha256, plan=said, cells=cells)


def parse_shard(text: str) -> Shard:
    """``2/8``, or ``slurm``: the task of a job array that this runs in.

    >>> str(parse_shard("2/8"))
    '2/8'
    """
    if text.strip().lower() == "slurm":
        return _of_slurm()
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*/\s*([0-9]{1,7})\s*", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count <= _MOST:
        raise InvalidInput(f"a shard is i/N with i from 1 to N, or slurm, got {shown(text)}.")
    return Shard(number, count)


def _of_slurm() -> Shard:
    """From the variables that SLURM sets in the tasks of a job array, whatever number its tasks begin at."""
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN")
    texts = [os.environ.get(name, "") for name in names]
    if not all(re.fullmatch("[0-9]{1,9}", one) for one in texts[:2]):
        raise InvalidInput(
            "--shard slurm reads SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, which are not set: submit a job array "
            "(sbatch --array=1-N), or write i/N."
        )
    number, count, first = int(texts[0]), int(texts[1]), int(texts[2]) if texts[2].isdigit() else 1
    step = os.environ.get("SLURM_ARRAY_TASK_STEP", "1")
    number = (number - first) // (int(step) if step.isdigit() and int(step) else 1) + 1
    if not 1 <= number <= count:
        raise InvalidInput(f"task {texts[0]} of a SLURM array of {count} is none of its shards: use --array=1-{count}.")
    return Shard(number, count)


def note_shard(store: Store, scan: int, shard: Shard | None) -> None:
    """Record in a store its part of a scan, None for the whole; a store of another part is refused."""
    with store._transaction():
        there = store.shards().get(scan)
        if shard is None:
            if there is not None:
                raise StoreError(
                    f"{store.path} holds shard {there[0]}/{there[1]} of this scan, not the whole: choose another "
                    "--out, or --no-resume to measure the whole anew."
                )
        elif there is None:
            if store._scan(scan)["cells"]:
                raise StoreError(
                    f"{store.path} holds cells of this scan that are of no shard, not those of shard {shard}: give "
                    "every shard a store of its own."
                )
            store.note_shard(scan, (shard.number, shard.count, shard.plan, shard.cells))
        elif there[:3] != (shard.number, shard.count, shard.plan):
            other = "" if there[:2] == (shard.number, shard.count) else f" {there[0]}/{there[1]}"
            raise StoreError(
                f"{store.path} holds shard{other} of another plan, not shard {shard} of this scan: give every shard a "
                "store of its own."
            )


def read_shards(path: Path) -> list[Shard]:
    """The parts that a store records; none for a store that was not made from shards."""
    with Store.reading(path) as store:
        of = {row["id"]: row for row in store.identities()}
        return [
            Shard(number, count, of[scan]["model_sha256"], of[scan]["text_sha256"], plan, cells, of[scan]["cells"])
            for scan, (number, count, plan, cells) in store.shards().items()
        ]
