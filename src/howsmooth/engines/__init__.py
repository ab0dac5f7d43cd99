"""Where work runs: in this process, in several, on SLURM, on Ray, or on any `concurrent.futures.Executor`.

Work is a function of one item and a list of items; an executor is all that it is handed to.

>>> from concurrent.futures import ThreadPoolExecutor
>>> from howsmooth.engines import Load, hand_over
>>> answers = {}
>>> with ThreadPoolExecutor(2) as threads:
...     failures = hand_over(threads, abs, [-1, 2, "x"], answers.__setitem__, load=Load(2))
>>> sorted(answers.items())
[(0, 1), (1, 2)]
>>> [(failure.place, failure.reasons[-1]) for failure in failures]
[(2, "TypeError: bad operand type for abs(): 'str'")]
"""

from typing import TYPE_CHECKING

from howsmooth.small import on_demand

if TYPE_CHECKING:
    from howsmooth.engines.answers import Unfit
    from howsmooth.engines.choosing import Engine, complete, load_of, open_engine
    from howsmooth.engines.handing import EngineError, Failure, Load, State, hand_over
    from howsmooth.engines.processes import Processes

__getattr__, __dir__ = on_demand(  # a worker needs `answers` alone, and no torch where its work needs none
    __name__,
    {
        "answers": ("Unfit",),
        "choosing": ("Engine", "complete", "load_of", "open_engine"),
        "handing": ("EngineError", "Failure", "Load", "State", "hand_over"),
        "processes": ("Processes",),
    },
)

__all__ = [
    "Engine",
    "EngineError",
    "Failure",
    "Load",
    "Processes",
    "State",
    "Unfit",
    "complete",
    "hand_over",
    "load_of",
    "open_engine",
]
