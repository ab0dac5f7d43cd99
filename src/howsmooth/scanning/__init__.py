"""Many measurements of one model: a plan of cells, a runner, and a store that survives interruption."""

from howsmooth.scanning.plan import Cell, Settings
from howsmooth.scanning.results import Scan
from howsmooth.scanning.runner import Progress, scan
from howsmooth.scanning.salvage import Salvaged, salvage
from howsmooth.scanning.store import Store, StoreError

__all__ = ["Cell", "Progress", "Salvaged", "Scan", "Settings", "Store", "StoreError", "salvage", "scan"]
