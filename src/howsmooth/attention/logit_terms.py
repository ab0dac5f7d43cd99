"""Several terms of the logits as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from howsmooth._util.validation import shown
from howsmooth.attention.masks import Causal, DenseBias, LogitBias, Maps, Sight
from howsmooth.errors import InvalidInput

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
