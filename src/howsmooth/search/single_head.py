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
    numbers = {"query_weight": head, "query_bias": head, "output_weight": head, "plain_value": head}
    numbers |= dict.fromkeys(("key_weight", "key_bias", "value_weight", "value_bias"), shared)
    for name, number in numbers.items():
        stacked = alone._buffers.get(name)
        if stacked is not None:
            setattr(alone, name, stacked[number : number + 1])
    alone.output_bias = None  # it belongs to the sum of all heads, and no derivative knows of it
    alone.logit_biases = nn.ModuleList(attention.terms.of_head(head, attention.heads))
    alone.heads = alone.kv_heads = 1
    return alone
