"""Process-wide settings of torch, changed by one call at a time and restored afterwards.

Forward-mode differentiation, the choice of attention kernels and the fast path of `torch.nn.MultiheadAttention` are
switches of the process, not of a thread. Two threads that turn them at the same time stop each other with an error or
leave them turned, so whoever needs them waits for the other.
"""

from __future__ import annotations

import functools
import linecache
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import graph_module
from torch.nn.attention import SDPBackend, sdpa_kernel

P = ParamSpec("P")
R = TypeVar("R")
ONE_AT_A_TIME = threading.RLock()
"""Held by the thread that has turned a switch of the process; the same thread may take it again."""


@contextmanager
def exact_autograd(device: torch.device) -> Iterator[None]:
    """Autograd on whatever the caller's mode, at full precision, with only those kernels that have a forward mode."""
    with ONE_AT_A_TIME:
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                sdpa_kernel(SDPBackend.MATH),
                torch.autocast(device.type, enabled=False),
            ):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)


@contextmanager
def without_sources() -> Iterator[None]:
    """Forget the sources that torch.fx generates inside; for tracebacks it keeps them as long as the process lives.

    Only those of this thread: another's may still be wanted. They are of no use to whoever runs the code.
    """
    loader, mine, thread = graph_module._loader, [], threading.get_ident()

    def remember(*args: Any, **options: Any) -> str:
        key: str = type(loader).cache(loader, *args, **options)
        if threading.get_ident() == thread:
            mine.append(key)
        return key

    with ONE_AT_A_TIME:
        loader.cache = remember  # type: ignore[method-assign]
        try:
            yield
        finally:
            del loader.cache
            for key in mine:
                loader.eval_cache.pop(key, None)
                linecache.cache.pop(key, None)


def full_precision(call: Callable[P, R]) -> Callable[P, R]:
    """A function that computes in the dtypes of its tensors, also when the caller is under ``torch.autocast``.

    Where torch's default device is meta, whose tensors hold no numbers, its own tensors are made on the CPU.
    """

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type == "meta":
                stack.enter_context(torch.device("cpu"))
            return call(*args, **kwargs)

    return wrapped
