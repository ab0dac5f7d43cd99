"""Scans: many measurements of one model on a text, in a store that survives interruption.

Read in this order: `scan_options` and `scan_grammar` (the options and their small language), `prepare` and `plan` (the
batches of cells), `cell_values` (the values of a cell), `units` and `driver` (workers, the loop over missing cells),
`run` (`scan` itself); then `schema` and `scan_store` (the SQLite file), `shards` and `derived_stores` (merged and
salvaged ones); `scan_result`, `compare_scans` and `cost` use the measured cells.
"""

from howsmooth._util.sqlite_files import StoreError
from howsmooth.scans.compare_scans import Comparison, compare
from howsmooth.scans.cost import makespan
from howsmooth.scans.derived_stores import merge, salvage
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
