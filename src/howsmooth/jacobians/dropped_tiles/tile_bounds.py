r"""Tiles of attention weights that can be dropped, with bounds on their part of the Jacobian.

Trained heads leave most of a long input nearly unseen. With D the entries of some tiles of P, everything else unchanged
(outputs o_i and sums of rows are those of all entries), the error of products without D is

.. math:: E\,(dq, dk, dv)_i = \sum_{j\in D_i} P_{ij}\,(dq_i\cdot k_j + q_i\cdot dk_j)\,(v_j - o_i)
                              + \sum_{j\in D_i} P_{ij}\,dv_j,

with D = ∂P in place of P under a soft-cap or sigmoid, which is no larger. Let tile (I, J) have the sizes

- in dq, which is block diagonal in i: :math:`a_{IJ} = \max_{i\in I} (\sum_{j\in J} P_{ij}|k_j|^2)^{1/2}
  (\sum_{j\in J} P_{ij}|(v_j - o_i)W_O|^2)^{1/2}`, by Cauchy–Schwarz;
- in dk, where the blocks are numbers :math:`P_{ij}|q_i||(v_j - o_i)W_O|` times a projection: their Frobenius norm is at
  most :math:`b_{IJ} = (\sum_{i\in I} p_i|q_i|^2\sum_{j\in J} P_{ij}|(v_j - o_i)W_O|^2)^{1/2}` with the largest weight
  :math:`p_i = \max_{j\in J} P_{ij}` of a row;
- in dv, where it is :math:`P_D \otimes W_VW_O`: likewise
  :math:`c_{IJ} = (\sum_{i\in I} p_i\sum_{j\in J} P_{ij})^{1/2}`.

The norm of a matrix of blocks is at most that of the matrix of their norms, so without the tiles of a set S

.. math:: \|E\| \le \varepsilon = N_q\max_I\sum_{J: IJ\in S} a_{IJ} + N_k\,\|b_S\|_2 + N_v\,\|c_S\|_2

with bounds N_q, N_k, N_v on the maps from tokens to dq, dk and (through W_O) dv. It is gathered while the weights are
evaluated once and does not depend on any random start. By Weyl's inequality :math:`|\sigma(J - E) - \sigma(J)| \le
\varepsilon`; `howsmooth.norms.norm_choice` makes far more of it.

**One product.** A vector that is known says more: with the lengths of dq, dk, dv in blocks of tokens I and J,

.. math:: |(E x)_I| \le \sum_{J: IJ\in S} (a_{IJ}|dq_I| + b_{IJ}|dk_J| + c_{IJ}|dv_JW_O|),

and :math:`|E^Tu| \le N_q|(\sum_J a_{IJ}|u_I|)_I| + N_k|(\sum_I b_{IJ}|u_I|)_J| + N_v|(\sum_I c_{IJ}|u_I|)_J|`. Singular
vectors of trained heads live on a few tokens, so that a tenth of the tiles gives their products to four digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from howsmooth.jacobians.softmax_products import Mixing
from howsmooth.jacobians.tiles import Tile

_OF_SUMS = 1 + 1e-3
"""For the rounding of the sums, of positive numbers in single precision."""
FINE_TILE, FINE_TILES = 128, 128
"""Rows and columns of tiles that can be dropped; twice as many where there would be more tiles than this on a side."""
_LARGEST_MATRIX = 512
"""Up to so many tiles on a side the norm of the matrix of sizes is computed, beyond it bounded by Schur's test."""


_Parts = list[tuple[Tensor, Tensor]]
"""Bounds on the parts that tiles add to blocks of a vector, and the indices of these blocks."""


@dataclass(frozen=True)
class DroppedTiles:
    """Bounds on the dropped part of every map in dq, dk and dv, ``(3, maps)``, and the share of all tiles."""

    bounds: Tensor
    share: float

    def select(self, index: Tensor) -> DroppedTiles:
        """The bounds of some maps."""
        return DroppedTiles(self.bounds[:, index], self.share)


def fine_side(n: int) -> int:
    """Rows and columns of tiles that can be dropped, for n tokens."""
    return FINE_TILE if n <= FINE_TILE * FINE_TILES else 2 * FINE_TILE


@dataclass(frozen=True)
class TileSizes:
    """The map, the row and the column of every tile, ``(3, tiles)``, and its sizes a, b, c, ``(3, tiles)``.

    Attributes:
        side: rows and columns of a tile.
        counts: how many of them, one after the other, lie side by side in each tile of the products.
    """

    places: Tensor
    sizes: Tensor
    side: int
    counts: tuple[int, ...]

    def by_tile(self, mask: Tensor) -> tuple[Tensor, ...]:
        """A mask of the tiles, cut into those that lie in one tile of the products."""
        return mask.split(self.counts)

    def select(self, index: Tensor) -> TileSizes:
        """The tiles of some maps, at ``index`` (increasing), which are numbered anew."""
        index = index.cpu()
        chosen = torch.isin(self.places[0], index)
        places = torch.stack([torch.searchsorted(index, self.places[0, chosen]), *self.places[1:, chosen]])
        counts = tuple(count for count, here in zip(self.counts, self.by_tile(chosen), strict=True) if bool(here.any()))
        return TileSizes(places, self.sizes[:, chosen], self.side, counts)

    def smallest_within(self, norms: Tensor, budget: Tensor) -> Tensor:
        """The smallest tiles of every map that stay within its budget together; norms: N_q, N_k, N_v."""
        dropped = torch.zeros(self.sizes.shape[1], dtype=torch.bool)
        for m, limit in enumerate(budget.tolist()):
            here = (self.places[0] == m).nonzero().flatten()
            order = here[(norms[:, m, None] * self.sizes[:, here]).sum(0).argsort()]
            low, high = 0, len(order)
            while low < high:
                middle = (low + high + 1) // 2
                within = float((norms[:, m] * self._bounds(order[:middle], exact=False)).sum()) <= limit
                low, high = (middle, high) if within else (low, middle - 1)
            dropped[order[:low]] = True
        return dropped

    def droppable_forward(self, tangents: Sequence[Tensor], limit: Tensor) -> tuple[Tensor, Tensor]:
        """The tiles that the product with known dq, dk and dv W_O, ``(maps, n, ·)``, does not need.

        The error of every map is at most ``limit``, ``(maps,)``; the second value bounds it more sharply.
        """
        query, key, value = (self._blocks(t) for t in tangents)

        def parts(m: int, row: Tensor, column: Tensor, a: Tensor, b: Tensor, c: Tensor) -> _Parts:
            return [(a * query[m, row] + b * key[m, column] + c * value[m, column], row)]

        return self._droppable(parts, limit)

    def droppable_backward(self, cotangent: Tensor, norms: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        """The tiles that the product with a known u, ``(maps, n, ·)``, does not need, likewise."""
        blocks = self._blocks(cotangent)

        def parts(m: int, row: Tensor, column: Tensor, *sizes: Tensor) -> _Parts:
            adds = [norm * size * blocks[m, row] for norm, size in zip(norms[:, m], sizes, strict=True)]
            return list(zip(adds, (row, column, column), strict=True))

        return self._droppable(parts, limit)

    def _blocks(self, tokens: Tensor) -> Tensor:
        """The lengths of the blocks of ``side`` tokens, ``(maps, blocks)``, float64 on the CPU."""
        squares = tokens.double().square().sum(-1).cpu()
        return (
            torch.nn.functional.pad(squares, (0, -squares.shape[1] % self.side))
            .unflatten(1, (-1, self.side))
            .sum(-1)
            .sqrt()
        )

    def _droppable(self, parts: Callable[..., _Parts], limit: Tensor) -> tuple[Tensor, Tensor]:
        dropped = torch.zeros(self.sizes.shape[1], dtype=torch.bool)
        errors = torch.zeros_like(limit)
        side = int(self.places[1:].max()) + 1
        for m, budget in enumerate(limit.tolist()):
            here = (self.places[0] == m).nonzero().flatten()
            adds = parts(m, *self.places[1:, here], *self.sizes[:, here])
            order = torch.stack([each for each, _ in adds]).sum(0).argsort()

            def error_of(count: int, adds: _Parts = adds, order: Tensor = order) -> float:
                some = order[:count]
                sums = (torch.zeros(side, dtype=torch.float64).index_add_(0, i[some], add[some]) for add, i in adds)
                return _OF_SUMS * sum(float(torch.linalg.vector_norm(each)) for each in sums)

            low, high = 0, len(order)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if error_of(middle) <= budget else (low, middle - 1)
            dropped[here[order[:low]]] = True
            errors[m] = error_of(low)
        return dropped, errors

    def bounds_of(self, dropped: Tensor, maps: int) -> DroppedTiles:
        """The bounds for a set of tiles."""
        index = dropped.nonzero().flatten()
        parts = [self._bounds(index[self.places[0, index] == m], exact=True) for m in range(maps)]
        return DroppedTiles(_OF_SUMS * torch.stack(parts, dim=1), len(index) / max(1, len(dropped)))

    def without(self, mixing: Mixing, dropped: Tensor, memory: int = 0) -> Mixing:
        """The map without some tiles; weights are copied as far as ``memory`` bytes allow, and stay views beyond it."""
        tiles: list[Tile] = []
        for tile, remains in zip(mixing.tiles, self.by_tile(~dropped), strict=True):
            for first, last in runs(remains.tolist()):
                left, right = (min(self.side * end, tile.cols.stop - tile.cols.start) for end in (first, last))
                cols = slice(tile.cols.start + left, tile.cols.start + right)
                part = replace(tile, cols=cols, weights=None, slopes=None)
                weights = slopes = None
                if tile.weights is not None and tile.slopes is not None:
                    weights = tile.weights[..., left:right]
                    slopes = weights if mixing.plain else tile.slopes[..., left:right]
                memory -= part.size * mixing.query.element_size()
                if memory >= 0:
                    if weights is None or slopes is None:
                        weights, slopes = mixing.weights_of(part)
                    weights = weights.contiguous()
                    slopes = weights if mixing.plain else slopes.contiguous()
                tiles.append(replace(part, weights=weights, slopes=slopes))
        return replace(mixing, tiles=tuple(tiles))

    def _bounds(self, index: Tensor, exact: bool) -> Tensor:
        """The three bounds of some tiles of one map."""
        _, rows, columns = self.places[:, index]
        side = int(self.places[1:].max()) + 1
        by_row = torch.zeros(3, side, dtype=torch.float64).index_add_(1, rows, self.sizes[:, index])
        by_column = torch.zeros(3, side, dtype=torch.float64).index_add_(1, columns, self.sizes[:, index])
        largest = by_row.amax(1)
        norms = (largest * by_column.amax(1)).sqrt()
        if exact and side <= _LARGEST_MATRIX:
            matrix = torch.zeros(3, side, side, dtype=torch.float64)
            matrix[:, rows, columns] = self.sizes[:, index]
            norms = torch.minimum(norms, torch.linalg.matrix_norm(matrix, 2))
        return torch.stack([largest[0], norms[1], norms[2]])


def runs(there: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Where what is there begins and ends, one run after the other.

    >>> list(runs([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    first = 0
    for is_there, run in groupby(there):
        last = first + len(list(run))
        if is_there:
            yield first, last
        first = last
