"""Engines: work in several processes, on SLURM, on Ray, or on any `concurrent.futures.Executor`.

Work is a function of one item and a list of items. Read in this order: `choice` (an engine and its executor),
`dispatch` (items to an executor, and in a worker), then the executors `processes`, `slurm` and `ray`.

>>> from concurrent.futures import ThreadPoolExecutor
>>> from howsmooth.engines import Load, submit_all
>>> answers = {}
>>> with ThreadPoolExecutor(2) as threads:
...     failures = submit_all(threads, abs, [-1, 2, "x"], answers.__setitem__, load=Load(2))
>>> sorted(answers.items())
[(0, 1), (1, 2)]
>>> [(failure.place, failure.reasons[-1]) for failure in failures]
[(2, "TypeError: bad operand type for abs(): 'str'")]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
