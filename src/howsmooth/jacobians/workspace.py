"""The buffers behind the products of operators."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from howsmooth.attention.memory_layout import is_channels_first, join_channels


class Workspace(threading.local):
    """Buffers that serve one product after the other: fresh memory would cost page faults at every tile.

    All operators that are alive have the same ones, as only one product runs at a time in a thread: thirty layers of
    their own would be as much memory as all their tokens. Every thread has its own, released with
    the last operator.
    """

    _known: ClassVar[WeakValueDictionary[str, Workspace]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @classmethod
    def shared(cls) -> Workspace:
        """The workspace of all operators."""
        return cls._known.setdefault("shared", cls())

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """The batched matrix product, valid until the next call."""
        return torch.bmm(left, right, out=self.buffer("tile", (*left.shape[:2], right.shape[2]), left))

    def joined(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a and b side by side in the order of a, valid until the next call with this name."""
        maps, n, width = *a.shape[:2], a.shape[2] + b.shape[2]
        out = (
            self.buffer(name, (maps, width, n), a).mT
            if is_channels_first(a)
            else self.buffer(name, (maps, n, width), a)
        )
        return join_channels([a, b], out)

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of this shape, and of the dtype and device of another tensor, until the next call with this name."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        if key not in self.buffers or self.buffers[key].numel() < size:
            self.buffers.pop(key, None)
            with torch.inference_mode(False):  # or nobody outside that mode could use it again
                self.buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self.buffers[key][:size].view(shape)


def trim_memory() -> None:
    """Return free memory of the C library to the system, where it can: large maps leave much of it behind."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, not of musl
        if trim is not None:
            trim(0)
