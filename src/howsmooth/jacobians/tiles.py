"""Attention weights cut into blocks of queries and keys, the logits behind each block, and the buffers of products."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.masks import Maps, Terms
from howsmooth.attention.memory_layout import is_channels_first, join_channels

TILE_ROWS = 1024
TILE_COLS = 1024
TILE_SIZE = 2**21
"""Maximum entries of a tile, over all its maps: enough for the matrix products to run at full speed, little enough for
the arrays of a tile to stay in the cache between the steps that touch them."""
BAND_SIZE = 2**23
"""Maximum entries of the logits of one band of queries that are stored at once while the weights are first
evaluated."""
_PIECE = 2**26
"""Bytes of a piece of memory for weights: enough to be the system's own, which gets it back when it is released."""
MASKED_SHARE = 4
"""Under a mask tiles have fewer rows by this factor, so that less of the hidden part is computed with the diagonal."""


@dataclass(frozen=True)
class Tile:
    """One block of queries and keys for a run of maps, with its weights where they are stored."""

    maps: slice
    rows: slice
    cols: slice
    weights: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def size(self) -> int:
        return math.prod(span.stop - span.start for span in (self.maps, self.rows, self.cols))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weights and slopes."""
        return sum({id(t): t.nbytes for t in (self.weights, self.slopes) if t is not None}.values())

    def changed(self, change: Callable[[Tensor], Tensor], **spans: Any) -> Tile:
        """The same with other spans, and with its stored weights and slopes changed; one array stays one."""
        if self.weights is None or self.slopes is None:
            return replace(self, **spans)
        weights = change(self.weights)
        slopes = weights if self.slopes is self.weights else change(self.slopes)
        return replace(self, **spans, weights=weights, slopes=slopes)

    def columns(self, first: int, last: int) -> Tile:
        """Some of its columns."""
        start = self.cols.start
        return self.changed(lambda array: array[..., first:last], cols=slice(start + first, start + last))

    def select(self, index: Tensor) -> Tile | None:
        """The part of the maps at ``index`` (increasing), which are numbered anew; None where it has none of them."""
        inside = (index >= self.maps.start) & (index < self.maps.stop)
        if not bool(inside.any()):
            return None
        members, local = inside.nonzero().flatten(), index[inside] - self.maps.start
        return self.changed(
            lambda array: array[local] if len(local) < len(array) else array,
            maps=slice(int(members[0]), int(members[-1]) + 1),
        )

    @property
    def queries(self) -> tuple[slice, slice]:
        return self.maps, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        return self.maps, self.cols


@dataclass(frozen=True)
class Logits:
    """S = cap(q kᵀ) + biases, tile by tile.

    Attributes:
        eps: of the dtype in which the logits of all weights were evaluated.
    """

    query: Tensor
    key: Tensor
    maps: Maps
    terms: Terms
    softcap: float | None
    eps: float

    @classmethod
    def between(cls, query: Tensor, key: Tensor, attention: AttentionMap) -> Logits:
        maps = Maps.every(len(query) // attention.heads, attention.heads, query.shape[1], query)
        return cls(query, key, maps, attention.terms, attention.softcap, torch.finfo(query.dtype).eps)

    def of(self, tile: Tile, work: Workspace | None = None) -> Tensor:
        """The logits of a tile; in the memory of ``work``, valid until its next product, where that is given."""
        multiply = torch.bmm if work is None else work.product
        logits = multiply(self.query[tile.queries], self.key[tile.keys].mT)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        block = self.terms.block(tile.rows, tile.cols, self.maps.select(tile.maps))
        return logits if block is None else logits.add_(block)

    def rounded(self, dtype: torch.dtype, stored: bool) -> Logits:
        """The logits of rounded queries and keys; with ``stored`` no weight will be evaluated from them again."""
        query, key = self.query.to(dtype), self.key.to(dtype)
        eps = self.eps if stored else torch.finfo(dtype).eps
        return replace(self, query=query, key=key, maps=replace(self.maps, like=query), eps=eps)

    def slope_of(self, tile: Tile) -> Tensor:
        """The slope 1 − tanh² of the soft-cap in a tile."""
        assert self.softcap is not None
        capped = torch.bmm(self.query[tile.queries], self.key[tile.keys].mT).div_(self.softcap).tanh_()
        return 1 - capped.square_()


class WeightMemory:
    """Memory for the stored weights, up to a number of bytes.

    Weights of a large map lie in pieces of many tiles. Tile by tile they would lie between the arrays of their own
    making, and leave holes where those were: an eighth of the memory of one head of 20,000 tokens.
    """

    def __init__(self, memory: int, numbers: int, like: Tensor):
        self.remaining, self.like = memory, like
        self.pieces = numbers * like.element_size() > _PIECE
        self.free = like.new_empty(0)

    def store(self, tile: Tile, weights: Tensor, slopes: Tensor) -> Tile:
        """The tile with its weights and slopes, or without them where the memory is full."""
        whole = replace(tile, weights=weights, slopes=slopes)
        if whole.nbytes > self.remaining:
            return tile
        self.remaining -= whole.nbytes
        return whole.changed(self._moved) if self.pieces else whole

    def _moved(self, array: Tensor) -> Tensor:
        if array.numel() > self.free.numel():
            self.free = self.like.new_empty(max(_PIECE // self.like.element_size(), array.numel()))
        place, self.free = self.free.split([array.numel(), self.free.numel() - array.numel()])
        return place.view(array.shape).copy_(array)


def bands(maps: int, n: int, terms: Terms, device: torch.device) -> Iterator[list[Tile]]:
    """The visible tiles of each block of queries.

    >>> from howsmooth.attention.masks import Terms
    >>> [[(tile.rows.stop, tile.cols.stop) for tile in band] for band in bands(2, 5, Terms(()), torch.device("cpu"))]
    [[(5, 5)]]
    """
    entries = tile_size(device)
    side = max(1, math.isqrt(entries // TILE_SIZE))
    rows = min(max(1, side * TILE_ROWS // MASKED_SHARE) if terms else side * TILE_ROWS, n)
    cols = side * TILE_COLS
    return tiles_between(maps, n, terms, max(1, entries // (rows * min(cols, n))), rows, cols)


def tiles_between(
    maps: int, n: int, terms: Terms, group: int, rows: int, cols: int, grid: int = 1
) -> Iterator[list[Tile]]:
    """The visible tiles of each block of ``rows`` queries of ``group`` maps, with edges at multiples of ``grid``."""
    for first in range(0, maps, group):
        together = slice(first, min(first + group, maps))
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            low, high = terms.key_range(start, stop, n)
            low, high = low // grid * grid, min(-(-high // grid) * grid, n)
            edges = [low, *range(low + cols, high, cols), high]
            yield [
                Tile(together, slice(start, stop), slice(left, right))
                for left, right in pairwise(edges)
                if left < right
            ]


def fits_at_once(band: list[Tile]) -> bool:
    """Whether the logits of a band can be stored at once."""
    return sum(tile.size for tile in band) <= BAND_SIZE


def tile_size(device: torch.device) -> int:
    """Maximum entries of a tile: the size of a cache on a CPU; elsewhere a sixty-fourth of the free memory in numbers.

    A tile takes about four arrays of its size, so that they stay within a quarter of what is free in float32.

    >>> tile_size(torch.device("cpu")) == TILE_SIZE
    True
    """
    if device.type in ("cpu", "meta"):
        return TILE_SIZE
    try:
        free = int(torch.get_device_module(device).mem_get_info(device)[0])
    except (AttributeError, RuntimeError, AssertionError, NotImplementedError):  # a device without this number
        return TILE_SIZE
    return max(TILE_SIZE, free // 64)


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
        if is_channels_first(a):
            return join_channels([a, b], self.buffer(name, (maps, width, n), a).mT)
        return join_channels([a, b], self.buffer(name, (maps, n, width), a))

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
