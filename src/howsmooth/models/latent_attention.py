"""Multi-head latent attention (DeepSeek-AI 2024): queries, keys and values from short normalised vectors of a token.

A token x gives a query latent c^q = norm(W^{qa}x), a key–value latent c = norm(W^{a}x) and one key of positions
r = W^{r}x for all heads. Head h has queries W^{qb}_h c^q, keys (W^{kb}_h c, r) and values W^{vb}_h c; only r, and the
last coordinates of the queries, are turned by rotary positions. Their order does not matter to a dot product, so they
are put first here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import ComposedAttention, LogitBias, Rotary, SelfAttention, UnitNorm
from howsmooth.attention.composite_map import Feature, Features
from howsmooth.models.module_names import Site

Linear = Callable[[Site, str], tuple[Tensor, Tensor | None]]


def read_latent(
    site: Site,
    linear: Linear,
    rms_norm: Callable[[Any, int, int], UnitNorm],
    rotary: Rotary | None,
    mask: LogitBias | None,
) -> ComposedAttention:
    """The map of one block; ``linear`` and ``rms_norm`` read a projection and a normalisation of it."""
    owner: Any = site.owner
    heads, rank, turned, plain = (
        int(getattr(owner, name)) for name in ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    if getattr(owner, "q_proj", None) is not None:
        query, query_bias = linear(site, "q_proj")
        first = Feature(None)
    else:
        latent, bias = linear(site, "q_a_proj")
        first = Feature(latent, bias, [rms_norm(owner.q_a_layernorm, len(latent), site.layer)])
        query, query_bias = linear(site, "q_b_proj")
    both, bias = linear(site, "kv_a_proj_with_mqa")
    biases = (None, None) if bias is None else bias.split([rank, turned])
    down, places = both.split([rank, turned])
    features = Features(
        first, Feature(down, biases[0], [rms_norm(owner.kv_a_layernorm, rank, site.layer)]), Feature(places, biases[1])
    )
    up, _ = linear(site, "kv_b_proj")
    up = up.unflatten(0, (heads, -1))
    sizes = (query.shape[1], rank, turned)

    def at(index: int, rows: Tensor) -> Tensor:
        """Rows ``(heads, ·, ·)`` that read one of the three parts of the features."""
        parts = [rows if i == index else rows.new_zeros(*rows.shape[:2], size) for i, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1)

    def turned_first(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, plain:], rows[:, :plain]], dim=1)

    eye = torch.eye(turned, dtype=up.dtype, device=up.device).expand(heads, -1, -1)
    key = torch.cat([at(2, eye), at(1, up[:, :plain])], dim=1)
    output, output_bias = linear(site, site.names.output)
    attention = SelfAttention(
        at(0, turned_first(query.unflatten(0, (heads, -1)))).flatten(0, 1),
        key.flatten(0, 1),
        at(1, up[:, plain:]).flatten(0, 1),
        output,
        heads=heads,
        query_bias=None if query_bias is None else turned_first(query_bias.reshape(heads, -1, 1)).flatten(),
        output_bias=output_bias,
        mask=mask,
        rotary=rotary,
        scale=float(owner.scaling),
    )
    return ComposedAttention(attention, features=features)
