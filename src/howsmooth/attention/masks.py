"""Masks and other additive terms of the logits, evaluated block by block so that no n × n array is ever needed.

A `LogitBias` adds a constant (independent of the tokens) to the logit of query i and key j; −∞ hides j from i. It
answers two questions for a block of queries and keys: which keys can be seen at all (so that hidden blocks are
skipped), and what to add inside the block. Masks live here, position-dependent terms in `positions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.checks import Count, door, shown
from howsmooth.errors import InvalidInput

HIDDEN = float("-inf")


@dataclass(frozen=True)
class Maps:
    """The maps a block of logits belongs to: g pairs of batch item and head, on sequences of n tokens.

    Attributes:
        batch, heads: for each of the g maps, its item in the batch and its head.
        n: number of tokens.
        like: a tensor with the dtype and device of the logits.
    """

    batch: Tensor
    heads: Tensor
    n: int
    like: Tensor

    @classmethod
    def every(cls, batch: int, heads: int, n: int, like: Tensor) -> Maps:
        """All maps of a batch, heads running fastest."""
        index = torch.arange(batch * heads, device=like.device)
        return cls(index // heads, index % heads, n, like)

    def select(self, index: Tensor | slice) -> Maps:
        """Some of the maps."""
        return Maps(self.batch[index], self.heads[index], self.n, self.like)

    def positions(self, span: slice) -> Tensor:
        """The token positions of a span."""
        return torch.arange(span.start, span.stop, device=self.like.device)

    def hide(self, seen: Tensor) -> Tensor:
        """Zero where ``seen``, −∞ elsewhere."""
        return torch.where(seen, torch.zeros((), dtype=self.like.dtype, device=self.like.device), HIDDEN)


class LogitBias(nn.Module, ABC):
    """A term added to the logits that does not depend on the tokens.

    Attributes:
        hides_only: whether it adds nothing but 0 and −∞, which is exact, where other terms round.
    """

    hides_only = False

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        """Smallest known range of keys that contains every key seen by the queries ``start … stop − 1``."""
        return 0, n

    @abstractmethod
    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        """What to add to the logits of a block, ``(g or 1, rows, cols)``, or None when nothing."""

    def check(self, n: int, heads: int, batch: int) -> None:
        """Raise `InvalidInput` when this term does not fit the input."""


class Causal(LogitBias):
    """Token i sees the tokens j ≤ i."""

    hides_only = True

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return 0, min(stop, n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        if cols.stop - 1 <= rows.start:
            return None
        return maps.hide(maps.positions(cols) <= maps.positions(rows)[:, None])[None]


class SlidingWindow(LogitBias):
    """Token i sees the ``window`` tokens i − window < j ≤ i, or |i − j| < window when ``causal`` is False."""

    hides_only = True

    @door
    def __init__(self, window: Count, causal: bool = True):
        super().__init__()
        self.window, self.causal = int(window), causal

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        high = stop if self.causal else stop + self.window - 1
        return max(0, start - self.window + 1), min(high, n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        inside_past = rows.stop - 1 - cols.start < self.window
        ahead = cols.stop - 1 - rows.start
        if inside_past and ahead <= (0 if self.causal else self.window - 1):
            return None
        distance = maps.positions(rows)[:, None] - maps.positions(cols)
        seen = distance < self.window
        seen &= (distance >= 0) if self.causal else (distance > -self.window)
        return maps.hide(seen)[None]


class Padding(LogitBias):
    """Padded tokens are hidden from everyone and see nothing, so their outputs and derivatives are zero.

    The Jacobian is then that of the sequence without padding, bordered by zeros.

    Args:
        keep: ``(batch, n)`` booleans, True for real tokens, as a tokenizer's attention mask.
    """

    hides_only = True

    @door
    def __init__(self, keep: Tensor):
        super().__init__()
        if keep.dim() == 1:
            keep = keep[None]
        if keep.dim() != 2:
            raise InvalidInput(f"a padding mask has shape (batch, n), got {tuple(keep.shape)}.")
        self.keep: Tensor
        self.register_buffer("keep", keep.bool(), persistent=False)

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        kept = self.keep.any(0).nonzero()
        return (0, 0) if len(kept) == 0 else (int(kept[0]), int(kept[-1]) + 1)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        keep = self.keep[maps.batch] if len(self.keep) > 1 else self.keep
        if bool(keep[:, rows].all()) and bool(keep[:, cols].all()):
            return None
        return maps.hide(keep[:, rows, None] & keep[:, None, cols])

    def check(self, n: int, heads: int, batch: int) -> None:
        if self.keep.shape[1] != n or self.keep.shape[0] not in (1, batch):
            raise InvalidInput(
                f"the padding mask has shape {tuple(self.keep.shape)}, but the input has {batch} item(s) of {n} tokens."
            )


class DenseBias(LogitBias):
    """Any mask or additive bias given as an array.

    Args:
        bias: booleans (True = may look, as in ``scaled_dot_product_attention``) or logits to add (−∞ hides), of shape
            ``(n, n)``, ``(heads, n, n)`` or ``(batch or 1, heads or 1, n, n)``.
    """

    def __init__(self, bias: Tensor):
        super().__init__()
        if not isinstance(bias, Tensor):
            raise InvalidInput(f"a mask must be a torch.Tensor, got {shown(bias)}.")
        if bias.dim() not in (2, 3, 4) or bias.shape[-1] != bias.shape[-2]:
            raise InvalidInput(
                f"a mask has shape (n, n), (heads, n, n) or (batch, heads, n, n), got {tuple(bias.shape)}."
            )
        if not (bias.dtype == torch.bool or bias.is_floating_point()):
            raise InvalidInput(f"a mask holds booleans (True = may look) or logits to add, got {bias.dtype}.")
        if bias.is_floating_point() and bool((bias.isnan() | (bias == float("inf"))).any()):
            raise InvalidInput("an additive mask may hold finite logits and −inf, but this one holds NaN or +inf.")
        self.bias: Tensor
        self.register_buffer("bias", bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)), persistent=False)
        self.hides_only = bias.dtype == torch.bool or bool(((bias == 0) | (bias == HIDDEN)).all())
        seen = self.bias if bias.dtype == torch.bool else self.bias != HIDDEN
        seen = seen.flatten(0, 1).any(0)
        index = torch.arange(seen.shape[-1], device=seen.device)
        self._first = torch.where(seen, index, seen.shape[-1]).amin(-1).tolist()
        self._last = torch.where(seen, index, -1).amax(-1).tolist()

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        low, high = min(self._first[start:stop]), max(self._last[start:stop]) + 1
        return (low, high) if low < high else (0, 0)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        items, per_head = self.bias.shape[:2]
        if items == per_head == 1:
            part = self.bias[0, :, rows, cols]
        else:
            part = self.bias[maps.batch * (items > 1), maps.heads * (per_head > 1), rows, cols]
        if part.dtype == torch.bool:
            return None if bool(part.all()) else maps.hide(part)
        return part.to(maps.like)

    def check(self, n: int, heads: int, batch: int) -> None:
        items, per_head, size, _ = self.bias.shape
        if size != n or items not in (1, batch) or per_head not in (1, heads):
            raise InvalidInput(
                f"the mask has shape {tuple(self.bias.shape)}, but the input has {batch} item(s), {heads} head(s) "
                f"and {n} tokens."
            )


def as_mask(mask: LogitBias | Tensor | str | None) -> list[LogitBias]:
    """The mask argument of an attention map as a list of terms: None, "causal", a tensor or a `LogitBias`."""
    if mask is None:
        return []
    if isinstance(mask, LogitBias):
        return [mask]
    if isinstance(mask, Tensor):
        return [DenseBias(mask)]
    if mask == "causal":
        return [Causal()]
    raise InvalidInput(f"a mask is None, 'causal', a tensor or a LogitBias, got {shown(mask)}.")
