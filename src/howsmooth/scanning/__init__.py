"""Many measurements of one model: a plan of cells, a runner, and a store that survives interruption."""

from howsmooth.scanning.comparison import Change, Comparison, compare
from howsmooth.scanning.cost import makespan
from howsmooth.scanning.merge import Merged, merge
from howsmooth.scanning.plan import Cell, Settings
from howsmooth.scanning.results import Scan
from howsmooth.scanning.runner import Progress, scan
from howsmooth.scanning.salvage import Salvaged, salvage
from howsmooth.scanning.store import Store, StoreError

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
