"""The physical limit: the eight n × n × k matrix products of one JᵀJ product of attention, and nothing else.

Without the elementwise steps between them the results mean nothing; only the time does. `whole_batch` runs them as
eight batched products over all heads, `in_tiles` in the tiles of `howsmooth.jacobians.softmax_products.Mixing` (hidden
tiles left out), where one product feeds the next while it is in the cache, in the order of memory that the operator has
chosen. Outputs have their memory beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howsmooth.attention.memory_layout import (
    add_product,
    is_channels_first,
    join_channels,
    matmul,
    to_preferred_layout,
    zeros_in_layout,
)
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.jacobians.projection import BlockProjection
from howsmooth.jacobians.softmax_products import Mixing

Tangents = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def whole_batch(mixing: Mixing, tangents: Tangents) -> Callable[[], tuple[Tensor, ...]]:
    """dq kᵀ + q dkᵀ =: M, M v + P dv =: g, g vᵀ =: N, N k, Nᵀ q and Pᵀ g, each for all maps at once."""
    query, key, value = mixing.query, mixing.key, mixing.value
    dquery, dkey, dvalue = tangents
    maps, n, _ = query.shape
    weights = query.new_zeros(maps, n, n)
    for tile in mixing.tiles:
        assert tile.weights is not None
        weights[tile.maps, tile.rows, tile.cols] = tile.weights
    moved = torch.empty_like(weights)
    out, gquery, gkey, gvalue = (torch.empty_like(t) for t in (value, query, key, value))

    def run() -> tuple[Tensor, ...]:
        torch.bmm(dquery, key.mT, out=moved)
        moved.baddbmm_(query, dkey.mT)
        torch.bmm(moved, value, out=out)
        out.baddbmm_(weights, dvalue)
        torch.bmm(out, value.mT, out=moved)
        torch.bmm(moved, key, out=gquery)
        torch.bmm(moved.mT, query, out=gkey)
        torch.bmm(weights.mT, out, out=gvalue)
        return gquery, gkey, gvalue

    return run


@torch.no_grad()
def in_tiles(mixing: Mixing, tangents: Tangents) -> Callable[[], tuple[Tensor, ...]]:
    """The same products tile by tile; dq kᵀ + q dkᵀ is one product of twice the width, as in `Mixing.jvp`."""
    dquery, dkey, dvalue = tangents
    left = join_channels([mixing.query, dquery])
    right = join_channels([mixing.key, dkey]).mT
    out, gquery, gkey, gvalue = (zeros_in_layout(t) for t in (mixing.value, mixing.query, mixing.key, mixing.value))
    scratch = {tile.weights.shape: torch.empty_like(tile.weights) for tile in mixing.tiles if tile.weights is not None}

    def run() -> tuple[Tensor, ...]:
        for total in (out, gquery, gkey, gvalue):
            total.zero_()
        for tile in mixing.tiles:
            assert tile.weights is not None
            moved = scratch[tile.weights.shape]
            torch.bmm(left[tile.queries], right[tile.maps, :, tile.cols], out=moved)
            add_product(out[tile.queries], moved, mixing.value[tile.keys])
            add_product(out[tile.queries], tile.weights, dvalue[tile.keys])
        for tile in mixing.tiles:
            assert tile.weights is not None
            moved, grad = scratch[tile.weights.shape], out[tile.queries]
            torch.bmm(grad, mixing.value[tile.keys].mT, out=moved)
            add_product(gquery[tile.queries], moved, mixing.key[tile.keys])
            add_product(gkey[tile.keys], moved.mT, mixing.query[tile.queries])
            add_product(gvalue[tile.keys], tile.weights.mT, grad)
        return gquery, gkey, gvalue

    return run


@torch.no_grad()
def projections(operator: AttentionJacobian, v: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """The four products of a block with its projections, into the heads and out of them, both ways."""
    projection = operator.projection
    assert isinstance(projection, BlockProjection)
    into, out = projection.weight_in, projection.weight_out
    v = to_preferred_layout(v)
    pairs = (v, into), (matmul(v, out.mT), out), (v, out.mT), (matmul(v, into), into.mT)
    return all_of([prepared(tokens, matrix) for tokens, matrix in pairs])


def prepared(tokens: Tensor, matrix: Tensor) -> Callable[[], Tensor]:
    """tokens @ matrix in the order of the tokens (`howsmooth.attention.memory_layout.times`)."""
    left, right = (matrix.mT, tokens.mT) if is_channels_first(tokens) else (tokens, matrix)
    memory = left @ right
    return lambda: torch.mm(left, right, out=memory)


def all_of(products: Sequence[Callable[[], Tensor]]) -> Callable[[], tuple[Tensor, ...]]:
    """One product after the other."""
    return lambda: tuple(product() for product in products)
