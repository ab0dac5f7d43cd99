from .compare_scans import Comparison, compare
from .cost import makespan
from .derived_stores import merge, salvage
from .plan import ScanOptions
from .run import scan
from .scan_result import Scan
from .scan_store import Store, StoreError

__all__ = [
    "Comparison",
    "Scan",
    "ScanOptions",
    "Store",
    "StoreError",
    "compare",
    "makespan",
    "merge",
    "salvage",
    "scan",
]
