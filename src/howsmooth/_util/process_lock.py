"""One thread at a time in a model: hooks and switches belong to the whole process.

transformers looks attention up in one table by name, hooks hang on the modules of a model that threads may share, the
implementation is a setting of its configuration, and first weights are drawn from torch's one global generator. So
every call that runs, listens to, draws or loads a model holds one lock; numbers are then the same in threads as one
after the other. Measuring captured sites needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from howsmooth._util.torch_globals import ONE_AT_A_TIME

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

LOCK = ONE_AT_A_TIME
"""The lock of forward-mode differentiation, which runs models too: two locks, taken in either order, may stop both."""


def alone(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Run a function while no other thread is in a model."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        with LOCK:
            return function(*args, **kwargs)

    return run
