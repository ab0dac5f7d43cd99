"""Masks and other additive terms of the logits, evaluated block by block so that no n × n array is ever needed.

A `LogitBias` adds a constant (independent of the tokens) to the logit of query i and key j; −∞ hides j from i. It
gives, for a block of queries and keys, the range of visible keys (so that hidden blocks are skipped) and the term
inside the block. Its facts serve as assumptions of theorems: the visible pairs, and their number per token. `Terms` are
several terms as one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from howsmooth._util.validation import (
    Count,
    check_count,
    check_weights,
    shown,
    validated,
)
from howsmooth.errors import InvalidInput

HIDDEN = float("-inf")
Sight = Literal["full", "causal", "ordered", "any"]
"""The visible pairs: all; token i exactly the tokens j ≤ i; only such tokens, and of two tokens that see the
same one the later sees the earlier (causal windows); or anything."""
_BAND = 2**24
"""Pairs of tokens, over all heads, that are evaluated together."""


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

    A subclass defines the term, `block`. Its other methods and facts make it faster or let more theorems apply; the
    defaults are the least favourable. Facts hold for every length, item and head.

    Attributes:
        sight: the visible pairs, see `Sight`.
        hides_only: whether it adds nothing but 0 and −∞, which is exact, where other terms round.
        keeps_self: whether every token sees itself. Where this is not known, `sees_itself` evaluates the mask.
        items: how many items of a batch have masks of their own; 1 when it is the same for all.

    >>> class Pairs(LogitBias):
    ...     hides_only = keeps_self = True
    ...
    ...     def block(self, rows, cols, maps):
    ...         return maps.hide(maps.positions(rows)[:, None] // 2 == maps.positions(cols) // 2)[None]
    ...
    ...     def most_seen(self, n):
    ...         return min(n, 2)
    >>> Pairs().sight, Pairs().looks_back(4), Pairs().first_blind(4)
    ('any', False, None)
    """

    sight: Sight = "any"
    hides_only = False
    keeps_self = False
    items = 1

    @abstractmethod
    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        """The term of the logits of a block, ``(g or 1, rows, cols)``, or None for zero."""

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        """Smallest known range of keys that contains every key seen by the queries ``start … stop − 1``."""
        return 0, n

    def check(self, n: int, heads: int, batch: int) -> None:
        """Raise `InvalidInput` when this term does not fit the input."""

    def most_seen(self, n: float) -> float:
        """The maximum number of tokens that one of n sees, or is seen by."""
        return n

    @property
    def hides(self) -> bool:
        """Whether it may hide some token from some other."""
        return self.sight != "full"

    @property
    def is_causal(self) -> bool:
        """Whether token i sees exactly the tokens j ≤ i, with nothing added to their logits."""
        return self.sight == "causal" and self.hides_only

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is added to any logit."""
        return self.sight == "full" and self.hides_only

    def added_to(self, logits: Tensor, maps: Maps, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """The logits ``(g, rows, cols)`` of a block, by default of all tokens, with this term."""
        every = slice(0, maps.n)
        block = self.block(rows or every, cols or every, maps)
        return logits if block is None else logits + block

    def sees_itself(self, n: int, heads: int = 1, batch: int = 1) -> bool:
        """Whether each of n tokens sees itself in every head of every item."""
        bands = [] if self.keeps_self else self._seen(n, heads, batch)
        return all(bool(seen.diagonal(rows.start, dim1=-2, dim2=-1).all()) for rows, seen in bands)

    def looks_back(self, n: int, heads: int = 1) -> bool:
        """Whether token i sees none of the tokens j > i."""
        bands = [] if self.sight in ("causal", "ordered") else self._seen(n, heads)
        return not any(bool(seen.triu(rows.start + 1).any()) for rows, seen in bands)

    def first_blind(self, n: int, heads: int = 1) -> int | None:
        """The first of n tokens that sees nothing in some head, if there is one."""
        for rows, seen in [] if self.keeps_self else self._seen(n, heads):
            blind = ~seen.any(-1).all(0)
            if bool(blind.any()):
                return rows.start + int(blind.nonzero()[0])
        return None

    def _seen(self, n: int, heads: int, batch: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Bands of queries and, for each, which keys are seen, ``(batch·heads, rows, n)``."""
        self.check(n, heads, batch)
        device = next((buffer.device for buffer in self.buffers()), None)
        logits = torch.zeros(batch * heads, 1, 1, dtype=torch.float64, device=device)
        maps, step = Maps.every(batch, heads, n, logits), max(1, _BAND // (n * batch * heads))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            band = logits.expand(-1, rows.stop - start, n)
            yield rows, self.added_to(band, maps, rows) != HIDDEN


class Causal(LogitBias):
    """Token i sees the tokens j ≤ i."""

    sight: Sight = "causal"
    hides_only = keeps_self = True

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return 0, min(stop, n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        if cols.stop - 1 <= rows.start:
            return None
        return maps.hide(maps.positions(cols) <= maps.positions(rows)[:, None])[None]


class SlidingWindow(LogitBias):
    """Token i sees the ``window`` tokens i − window < j ≤ i, or |i − j| < window when ``causal`` is False."""

    hides_only = keeps_self = True

    @validated
    def __init__(self, window: Count, causal: bool = True):
        super().__init__()
        self.window, self.causal = int(window), causal
        self.sight = "ordered" if causal else "any"

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

    def most_seen(self, n: float) -> float:
        return min(n, self.window if self.causal else 2 * self.window - 1)


class Chunked(LogitBias):
    """Token i sees the tokens j ≤ i of its own chunk: ⌊i/chunk⌋ = ⌊j/chunk⌋ (Llama 4)."""

    sight: Sight = "ordered"
    hides_only = keeps_self = True

    @validated
    def __init__(self, chunk: Count):
        super().__init__()
        self.chunk = int(chunk)

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return start // self.chunk * self.chunk, min(stop, n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        i, j = maps.positions(rows)[:, None], maps.positions(cols)
        return maps.hide((j <= i) & (i // self.chunk == j // self.chunk))[None]

    def most_seen(self, n: float) -> float:
        return min(n, self.chunk)


class Padding(LogitBias):
    """Padded tokens are hidden from all and see nothing, so their outputs and derivatives are zero.

    The Jacobian is then that of the sequence without padding, bordered by zeros.

    Args:
        keep: ``(batch, n)`` booleans, True for real tokens, as a tokenizer's attention mask.
    """

    hides_only = True

    @validated
    def __init__(self, keep: Tensor):
        super().__init__()
        if keep.dim() == 1:
            keep = keep[None]
        if keep.dim() != 2:
            raise InvalidInput(f"a padding mask has shape (batch, n), got {tuple(keep.shape)}.")
        self.keep: Tensor
        self.register_buffer("keep", keep.bool(), persistent=False)
        self.items = len(keep)

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        real = self.keep.any(0).nonzero()
        return (0, 0) if len(real) == 0 else (int(real[0]), int(real[-1]) + 1)

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

    @validated
    def __init__(self, bias: Tensor):
        super().__init__()
        if bias.dim() not in (2, 3, 4) or bias.shape[-1] != bias.shape[-2]:
            raise InvalidInput(
                f"a mask has shape (n, n), (heads, n, n) or (batch, heads, n, n), got {tuple(bias.shape)}."
            )
        if not (bias.dtype == torch.bool or bias.is_floating_point()):
            raise InvalidInput(f"a mask holds booleans (True = may look) or logits to add, got {bias.dtype}.")
        _check_below_infinity(bias, "an additive mask")
        self.bias: Tensor
        self.register_buffer("bias", bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)), persistent=False)
        self.items = len(self.bias)
        self.hides_only = bias.dtype == torch.bool or bool(((bias == 0) | (bias == HIDDEN)).all())
        seen = self.bias if bias.dtype == torch.bool else self.bias != HIDDEN
        self.keeps_self = bool(seen.diagonal(dim1=-2, dim2=-1).all())
        if bool((seen == torch.ones_like(seen).tril()).all()):
            self.sight = "causal"
        elif bool(seen.all()):
            self.sight = "full"
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
            block = self.bias[0, :, rows, cols]
        else:
            block = self.bias[maps.batch * (items > 1), maps.heads * (per_head > 1), rows, cols]
        if block.dtype == torch.bool:
            return None if bool(block.all()) else maps.hide(block)
        return block.to(maps.like)

    def check(self, n: int, heads: int, batch: int) -> None:
        items, per_head, size, _ = self.bias.shape
        if size != n or items not in (1, batch) or per_head not in (1, heads):
            raise InvalidInput(
                f"the mask has shape {tuple(self.bias.shape)}, but the input has {batch} item(s), {heads} head(s) "
                f"and {n} tokens."
            )


class ALiBi(LogitBias):
    """Linear biases (Press et al. 2022): the logit of (i, j) in head h gains −slope_h·|i − j|."""

    sight: Sight = "full"
    keeps_self = True

    @validated
    def __init__(self, slopes: Tensor):
        super().__init__()
        if slopes.dim() != 1 or not bool(torch.isfinite(slopes).all()):
            raise InvalidInput(f"ALiBi needs one finite slope per head, got a tensor of shape {tuple(slopes.shape)}.")
        self.slopes: Tensor
        self.register_buffer("slopes", slopes, persistent=False)

    @classmethod
    @validated
    def standard(cls, heads: int) -> ALiBi:
        """The slopes of the paper: 2^{−8/m}, 2^{−16/m}, … for m = heads a power of two, interpolated otherwise."""
        check_weights(check_count(heads, "heads"), "ALiBi")
        closest = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
        slopes += [2 ** (-4 * (2 * h + 1) / closest) for h in range(heads - closest)]
        return cls(torch.tensor(slopes, dtype=torch.float64))

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        distance = (maps.positions(rows)[:, None] - maps.positions(cols)).abs()
        return -self.slopes[maps.heads, None, None].to(maps.like) * distance

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.slopes) != heads:
            raise InvalidInput(f"ALiBi has {len(self.slopes)} slopes, but the attention has {heads} heads.")


class RelativeBias(LogitBias):
    """Additive bias by relative position: the logit of (i, j) in head h gains ``table[h, clip(j − i) + reach]``.

    Args:
        table: ``(heads or 1, 2·reach + 1)``; offsets beyond ± reach use the outermost entries. Bucketed schemes
            (T5, MPNet) are of this form once their buckets are written out by offset.
    """

    @validated
    def __init__(self, table: Tensor):
        super().__init__()
        if table.dim() != 2 or table.shape[1] % 2 == 0:
            raise InvalidInput(f"a relative bias table has shape (heads, 2·reach + 1), got {tuple(table.shape)}.")
        _check_below_infinity(table, "a relative bias table")
        self.table: Tensor
        self.register_buffer("table", table, persistent=False)
        self.keeps_self = bool((table[:, table.shape[1] // 2] != HIDDEN).all())
        self.sight = "full" if bool((table != HIDDEN).all()) else "any"

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        reach = self.table.shape[1] // 2
        offset = maps.positions(cols) - maps.positions(rows)[:, None]
        table = self.table if len(self.table) == 1 else self.table[maps.heads]
        return table.to(maps.like)[:, offset.clamp(-reach, reach) + reach]

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.table) not in (1, heads):
            raise InvalidInput(f"the relative bias has {len(self.table)} rows, but the attention has {heads} heads.")


def _check_below_infinity(logits: Tensor, name: str) -> None:
    if bool((logits.isnan() | (logits == float("inf"))).any()):
        raise InvalidInput(f"{name} may hold finite logits and −inf, but this one holds NaN or +inf.")


def softmax(logits: Tensor) -> Tensor:
    """Weights over the keys; a query that sees none (−∞ alone) has weights zero, and derivatives zero."""
    blind = (logits == HIDDEN).all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


_SIGHTS: tuple[Sight, ...] = get_args(Sight)


class Terms(LogitBias):
    """The sum of terms: a token is seen where every one of them lets it be seen.

    Its facts follow from theirs. Sights are ordered by their promise, and the weakest one holds for the sum: full sight
    changes nothing, and masks by which the later of two tokens sees the earlier have an intersection of this kind.

    >>> from howsmooth.attention import ALiBi, SlidingWindow
    >>> terms = Terms([Causal(), SlidingWindow(3), ALiBi(torch.ones(2))])
    >>> terms.sight, terms.hides_only, terms.keeps_self, terms.most_seen(10), terms.key_range(5, 7, 10)
    ('ordered', False, True, 3, (3, 7))
    """

    def __init__(self, terms: Iterable[LogitBias] = ()):
        super().__init__()
        flat = [single for term in terms for single in (term if type(term) is Terms else (term,))]
        self.each = nn.ModuleList(flat)
        self.sight = _SIGHTS[max([0, *(_SIGHTS.index(term.sight) for term in flat)])]
        self.hides_only = all(term.hides_only for term in flat)
        self.keeps_self = all(term.keeps_self for term in flat)
        self.items = max([1, *(term.items for term in flat)])

    def __iter__(self) -> Iterator[LogitBias]:
        return iter(self.each)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.each)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        total: Tensor | None = None
        for term in self:
            block = term.block(rows, cols, maps)
            total = block if total is None else total if block is None else total + block
        return total

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        ranges = [term.key_range(start, stop, n) for term in self]
        low = max([0, *(first for first, _ in ranges)])
        return low, max(low, min([n, *(last for _, last in ranges)]))

    def check(self, n: int, heads: int, batch: int) -> None:
        for term in self:
            term.check(n, heads, batch)

    def most_seen(self, n: float) -> float:
        return min([n, *(term.most_seen(n) for term in self)])

    def looks_back(self, n: int, heads: int = 1) -> bool:
        return any(term.sight in ("causal", "ordered") for term in self) or super().looks_back(n, heads)

    def of_head(self, head: int, heads: int) -> Terms:
        """The same terms for one head by itself, of so many."""
        return self if heads == 1 else Terms(_OneHead(term, head, heads) for term in self)


class _OneHead(Terms):
    """A term of the logits of one head."""

    def __init__(self, term: LogitBias, head: int, heads: int):
        super().__init__([term])
        self.head, self.heads = head, heads

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        return super().block(rows, cols, replace(maps, heads=torch.full_like(maps.heads, self.head)))

    def check(self, n: int, heads: int, batch: int) -> None:
        super().check(n, self.heads, batch)


def as_mask(mask: LogitBias | Tensor | str | None) -> Terms:
    """The mask argument of an attention map: None, "causal", a tensor or a `LogitBias`."""
    if mask is None:
        return Terms()
    if isinstance(mask, LogitBias):
        return Terms([mask])
    if isinstance(mask, Tensor):
        return Terms([DenseBias(mask)])
    if mask == "causal":
        return Terms([Causal()])
    raise InvalidInput(f"a mask is None, 'causal', a tensor or a LogitBias, got {shown(mask)}.")
