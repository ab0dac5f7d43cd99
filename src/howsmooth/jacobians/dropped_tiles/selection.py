"""Which tiles of weights go, so that products with what is left are cheaper and still tell the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.jacobians.dropped_tiles.tile_bounds import TileSizes
from howsmooth.jacobians.evaluation_point import EvaluationPoint
from howsmooth.jacobians.product_error import per_map

if TYPE_CHECKING:
    from howsmooth.jacobians.attention_operator import AttentionJacobian

_ROUGHLY, _GLANCES = 0.1, 2
_WORTH, _LITTLE = 0.5, 1e-4
_LOWER, _MORE_LEFT = (0.05, 0.1), 1.5


def path_norms(attention: AttentionMap, point: EvaluationPoint) -> Tensor:
    """N_q, N_k, N_v of `tile_bounds` and ‖W_O‖, ``(4, maps)``: exact norms of the projections."""
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    norms = [torch.linalg.matrix_norm(weight.double(), 2) for weight in weights]
    norms = [per_map(norm, size, attention) * size for norm, size in zip(norms, point.sizes, strict=True)]
    out = per_map(torch.linalg.matrix_norm(attention.output_weight.double(), 2), norms[2], attention)
    return torch.stack([*norms[:2], norms[2] * out, out]).cpu()


def thinned(whole: AttentionJacobian, skip: float, memory: int) -> AttentionJacobian:
    """The Jacobian without the least of its tiles: those that together are at most about ``skip`` of its norm.

    Where these are few, products of what is left are no cheaper, and only so little goes that the ends may move by it.
    Of the norm a lower bound is taken, from a few products without those that are a tenth of the bound for all tiles.
    """
    sizes, maps = whole.mixing.sizes, len(whole.mixing.query)
    assert sizes is not None
    assert whole.norms is not None
    norms = whole.norms[:3]
    every = (norms * sizes.left_out(torch.ones(sizes.sizes.shape[1], dtype=torch.bool), maps).sizes).sum(0)
    rough = whole.without(sizes.least(norms, _ROUGHLY * every), memory)
    whole.least, guess = rough.glance(_GLANCES)
    least = whole.least.reshape(-1, 1)
    heads = maps // len(least)
    budget = (least / heads).expand(-1, heads).reshape(-1)
    gone = _least_for_most(sizes, norms, budget, skip)
    worth = bool(gone.double().mean() >= _WORTH)
    if not worth:
        gone = sizes.least(norms, min(skip, _LITTLE) * budget)
    del rough
    thin = whole.without(gone, memory)
    thin.guess = guess
    return thin


def _least_for_most(sizes: TileSizes, norms: Tensor, budget: Tensor, skip: float) -> Tensor:
    """The tiles within a share of the norms, or a lower one where little more is left: then b₀ + ε is sharper."""
    gone = sizes.least(norms, skip * budget)
    for share in (share for share in _LOWER if share < skip):
        fewer = sizes.least(norms, share * budget)
        if (~fewer).sum() <= _MORE_LEFT * (~gone).sum() and fewer.double().mean() >= _WORTH:
            return fewer
    return gone
