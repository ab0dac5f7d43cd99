"""Scans: many measurements of one model on a text, in a store that survives interruption.

Read in this order: `plan` (the options and their small language, the batches of cells),
`cell_values` (the values of a cell), `units` (work of a worker, shards), `run` (the loop over missing cells, `scan`
itself); then `scan_store` (the SQLite file) and `derived_stores` (merged and salvaged ones); `scan_result`,
`compare_scans` and `cost` use the measured cells.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
