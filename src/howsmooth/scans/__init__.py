"""Scans: many measurements of one model on a text, in a store that survives interruption.

Read in this order: `scan_options` and `scan_grammar` (the options and their small language), `prepare` and `plan` (the
batches of cells), `cell_values` (the values of a cell), `units` and `driver` (workers, the loop over missing cells),
`run` (`scan` itself); then `schema`, `scan_store` and `store_reader` (the SQLite file), `shards`, `merge_stores` and
`damaged_store`; `scan_result`, `compare_scans` and `cost` use the measured cells.
"""

from howsmooth._util.sqlite_files import StoreError
from howsmooth.scans.compare_scans import Comparison, compare
from howsmooth.scans.cost import makespan
from howsmooth.scans.damaged_store import salvage
from howsmooth.scans.merge_stores import merge
from howsmooth.scans.run import scan
from howsmooth.scans.scan_options import ScanOptions
from howsmooth.scans.scan_result import Scan
from howsmooth.scans.scan_store import Store

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
