"""One head of an attention map as a map of its own."""

from __future__ import annotations

import copy

from torch import nn

from howsmooth.attention import AttentionMap
from howsmooth.errors import InvalidInput


def one_head(attention: AttentionMap, head: int) -> AttentionMap:
    """x ↦ W_h f_h(x), the head's own slice of the output projection included, as `howsmooth.measure_heads` takes it.

    >>> import howsmooth as hs, torch
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
    alone.logit_biases = nn.ModuleList(attention.terms.of_head(head, attention.heads))
    alone.heads = alone.kv_heads = 1
    return alone


def _keep(alone: AttentionMap, name: str, place: int) -> None:
    stacked = alone._buffers.get(name)
    if stacked is not None:
        setattr(alone, name, stacked[place : place + 1])
