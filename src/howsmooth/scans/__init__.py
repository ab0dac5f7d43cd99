"""Many measurements of one model: a plan of cells, a runner, and a store that survives interruption."""

from howsmooth.scans.compare_scans import Change, Comparison, compare
from howsmooth.scans.cost import makespan
from howsmooth.scans.damaged_store import Salvaged, salvage
from howsmooth.scans.merge_stores import Merged, merge
from howsmooth.scans.plan import Cell, Settings
from howsmooth.scans.run import Progress, scan
from howsmooth.scans.scan_result import Scan
from howsmooth.scans.scan_store import Store, StoreError

__all__ = [
    "Cell",
    "Change",
    "Comparison",
    "Merged",
    "Progress",
    "Salvaged",
    "Scan",
    "Settings",
    "Store",
    "StoreError",
    "compare",
    "makespan",
    "merge",
    "salvage",
    "scan",
]
