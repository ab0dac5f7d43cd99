"""One head of an attention map as a map of its own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, Causal, LogitBias, Padding, SlidingWindow
from howsmooth.attention.masks import Maps
from howsmooth.errors import InvalidInput


def one_head(attention: AttentionMap, head: int) -> AttentionMap:
    """x ↦ W_h f_h(x), the head's own slice of the output projection included, as `howsmooth.measure_heads` takes it.

    >>> import howsmooth as hs
    >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    >>> block = hs.SelfAttention.random(8, heads=2)
    >>> torch.allclose(sum(one_head(block, h)(x) for h in (0, 1)), block(x), atol=1e-6)
    True
    """
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < attention.heads:
        raise InvalidInput(f"there is no head {head}: choose from 0 to {attention.heads - 1}.")
    shared = head * attention.kv_heads // attention.heads
    alone = copy.copy(attention)
    alone._buffers, alone._modules = dict(attention._buffers), dict(attention._modules)
    for name, place in {"query": head, "key": shared, "value": shared}.items():
        for part in (f"{name}_weight", f"{name}_bias"):
            _keep(alone, part, place)
    _keep(alone, "output_weight", head)
    _keep(alone, "plain_value", head)
    alone.output_bias = None  # it belongs to the sum of all heads, and no derivative knows of it
    alone.logit_biases = nn.ModuleList(_of_head(term, head, attention.heads) for term in attention.logit_terms())
    alone.heads = alone.kv_heads = 1
    return alone


def _keep(alone: AttentionMap, name: str, place: int) -> None:
    stacked = alone._buffers.get(name)
    if stacked is not None:
        setattr(alone, name, stacked[place : place + 1])


def _of_head(term: LogitBias, head: int, heads: int) -> LogitBias:
    return term if isinstance(term, Causal | SlidingWindow | Padding) else _HeadTerm(term, head, heads)


class _HeadTerm(LogitBias):
    """What a term adds to the logits of one head."""

    def __init__(self, term: LogitBias, head: int, heads: int):
        super().__init__()
        self.term, self.head, self.heads = term, head, heads

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return self.term.key_range(start, stop, n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        return self.term.block(rows, cols, Maps(maps.batch, torch.full_like(maps.heads, self.head), maps.n, maps.like))

    def check(self, n: int, heads: int, batch: int) -> None:
        self.term.check(n, self.heads, batch)
