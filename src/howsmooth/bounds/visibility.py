"""Who sees whom: the facts about masks that theorems assume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap, Causal, DenseBias, LogitBias, Padding, SlidingWindow
from howsmooth.attention.masks import HIDDEN, Maps

_BAND = 2**24


class Masked(Protocol):
    """Whatever knows the terms of its logits: an attention map, or the masks of one call of a layer."""

    def logit_terms(self) -> Iterator[LogitBias]:
        """Masks and additive biases of the logits."""
        ...


def hides(attention: Masked) -> bool:
    """Whether a mask hides some token from some other.

    >>> import howsmooth as hs
    >>> hides(hs.SelfAttention.random(4)), hides(hs.SelfAttention.random(4, mask="causal"))
    (False, True)
    """
    return any(_hides(term) for term in attention.logit_terms())


def is_causal(attention: AttentionMap) -> bool:
    """Whether token i sees exactly the tokens j ≤ i, with nothing else added to the logits."""
    terms = list(attention.logit_terms())
    return len(terms) == 1 and isinstance(terms[0], Causal)


def sees_itself(attention: AttentionMap, n: int) -> bool:
    """Whether every token sees itself in every head."""
    return all(bool(seen.diagonal(rows.start, dim1=-2, dim2=-1).all()) for rows, seen in _bands(attention, n))


def first_blind(attention: AttentionMap, n: int) -> int | None:
    """The first token that sees nothing in some head, if there is one."""
    for rows, seen in _bands(attention, n):
        blind = ~seen.any(-1).all(0)
        if bool(blind.any()):
            return rows.start + int(blind.nonzero()[0])
    return None


def _hides(term: LogitBias) -> bool:
    if isinstance(term, DenseBias):
        return not bool(term.bias.all() if term.bias.dtype == torch.bool else (term.bias != HIDDEN).all())
    return isinstance(term, Causal | SlidingWindow | Padding)


def _bands(attention: AttentionMap, n: int) -> list[tuple[slice, Tensor]]:
    """Bands of queries and, for each, which keys are seen, ``(heads, rows, n)``; nothing when all terms keep self.

    Causal masks and windows always let a token see itself, so only masks given as arrays are looked at.
    """
    terms = [term for term in attention.logit_terms() if _hides(term)]
    if all(isinstance(term, Causal | SlidingWindow) for term in terms):
        return []
    maps = Maps.every(1, attention.heads, n, torch.zeros((), dtype=torch.float64))
    step = max(1, _BAND // (n * attention.heads))
    bands = []
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        seen = torch.ones(attention.heads, rows.stop - rows.start, n, dtype=torch.bool)
        for term in terms:
            term.check(n, attention.heads, 1)
            block = term.block(rows, slice(0, n), maps)
            if block is not None:
                seen &= block != HIDDEN
        bands.append((rows, seen))
    return bands
