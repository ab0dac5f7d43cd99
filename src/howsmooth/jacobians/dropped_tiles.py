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

**One pass.** One pass over the logits gives the weights and the sizes of their tiles. In every tile the weights are
taken relative to the largest logit of their own row there, :math:`w_{ij} = e^{s_{ij} - m_i}`, and summed with what is
wanted of keys and values, :math:`\sum_j w_{ij}(v_j, |v_j|^2, 1, |k_j|^2, |v_jW_O|^2)`. When a band of queries is
complete, one factor :math:`e^{m_i - \mathrm{top}_i}/\mathrm{sum}_i` for each row of each tile makes weights of P of
them, and is at the same time the largest weight p_i of that row. Squares of weights are nowhere needed: :math:`P_{ij}^2
\le p_iP_{ij}`. Sums of the keys themselves, half of the work, are taken only of tiles that weigh something; of the
others a bound is known, :math:`|\sum_j P_{ij}k_j| \le (\sum_j P_{ij}\sum_j P_{ij}|k_j|^2)^{1/2}`
(`MomentSums.keys_apart`).

With :math:`W_O^T = QR` the lengths of v W_O are those of v Rᵀ, and

.. math:: \sum_j P_{ij}|(v_j - o_i)W_O|^2 = \sum_j P_{ij}|v_jW_O|^2 - 2\,o_iR^TR\cdot\sum_j P_{ij}v_j
          + |o_iW_O|^2\sum_j P_{ij},

to which the rounding of its three parts is added.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from howsmooth.jacobians.product_error import Moments, MomentSums
from howsmooth.jacobians.softmax_products import EvaluationPoint, Mixing
from howsmooth.jacobians.tiles import TILE_COLS, Tile, tiles_between

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

            def error_of(count: int, m: int = m, order: Tensor = order) -> float:
                return float((norms[:, m] * self._bounds(order[:count], exact=False)).sum())

            dropped[order[: _largest_count(error_of, len(order), limit)]] = True
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

            count = _largest_count(error_of, len(order), budget)
            dropped[here[order[:count]]] = True
            errors[m] = error_of(count)
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
                part = tile.columns(left, right)
                memory -= part.size * mixing.query.element_size()
                if memory >= 0:
                    weights, slopes = mixing.weights_of(part)
                    part = replace(part, weights=weights, slopes=slopes).changed(torch.Tensor.contiguous)
                tiles.append(part)
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


def _largest_count(error_of: Callable[[int], float], count: int, limit: float) -> int:
    """The largest number up to ``count`` whose error, which grows with it, is within the limit; 0 always is."""
    return bisect_right(range(1, count + 1), limit, key=error_of)


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


_WEIGHTY = 1 / 16
"""Share of some row that a tile has at least when its keys are summed."""


@torch.no_grad()
def sized_mixing(point: EvaluationPoint, memory: int) -> tuple[Mixing, TileSizes]:
    """As `Mixing.at`, with the sizes of all tiles that can be dropped."""
    mixing = Mixing.unevaluated(point)
    sums = _TileSums(mixing, point.attention.output_weight)
    tiles: list[Tile] = []
    count, n, _ = mixing.query.shape
    width = max(1, TILE_COLS // sums.side) * sums.side
    for band in tiles_between(count, n, mixing.logits.terms, 1, sums.side, width, grid=sums.side):
        arrays = 1 if mixing.plain else 2
        stored = arrays * point.dtype.itemsize * sum(tile.size for tile in band) <= memory
        weights, factors = sums.add(band, stored)
        if stored:
            band = [sums.scaled(*each) for each in zip(band, weights, factors, strict=True)]
            memory -= sum(tile.nbytes for tile in band)
        tiles += band
    return mixing.evaluated(tiles, sums.seen.output(), sums.seen.moments()), sums.tile_sizes()


def sharp_moments(mixing: Mixing) -> Moments:
    """The moments of all weights once more, with their squares instead of a bound on them."""
    seen = MomentSums(mixing.key, mixing.value, centred=mixing.softmax)
    for tile in mixing.tiles:
        seen.add(tile, mixing.weights_of(tile)[0])
    return seen.moments()


class _TileSums:
    """Sums of one pass over the logits, band by band."""

    def __init__(self, mixing: Mixing, output_weight: Tensor):
        self.mixing = mixing
        self.side = fine_side(mixing.query.shape[1])
        self.seen = MomentSums(mixing.key, mixing.value, centred=mixing.softmax)
        self.width = mixing.value.shape[-1]
        triangle = torch.linalg.qr(output_weight.double().mT).R
        triangle = triangle.repeat(len(mixing.value) // len(triangle), 1, 1)
        size = torch.linalg.matrix_norm(triangle)
        self.triangle = triangle / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
        longest = (self.seen.longest_value * size[:, None, None], self.seen.longest_key)
        self.units = torch.stack([each[:, 0, 0].double() for each in longest])
        through = (self.seen.summands[..., : self.width].double() @ self.triangle.mT).square().sum(-1, keepdim=True)
        values, keys, squares = self.seen.summands.tensor_split([self.width + 2, -1], dim=-1)
        self.summands = self._in_parts(torch.cat([values, squares, through.to(mixing.value)], dim=-1))
        self.keys = self._in_parts(keys)
        self.query = mixing.query.double().square().sum(-1)
        eps = torch.finfo(mixing.value.dtype).eps
        self.rounding = (4 * mixing.value.shape[1] ** 0.5 + 2 * self.width) * eps
        self.places: list[Tensor] = []
        self.sizes: list[Tensor] = []
        self.counts: list[int] = []

    def add(self, band: list[Tile], stored: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Take in the tiles of a band, whose weights will be ``stored`` or may lie where those of the next will.

        Returns for each its weights up to a factor for every row of every part, ``(rows, parts, side)``, and these
        factors, ``(rows, parts)``.
        """
        if not band:
            return [], []
        m, rows = band[0].maps.start, band[0].rows
        parts = [tile.cols.start // self.side for tile in band]
        counts = [-(-(tile.cols.stop - tile.cols.start) // self.side) for tile in band]
        weights = self._memory([(rows.stop - rows.start, count, self.side) for count in counts], stored)
        tops = torch.cat([self._relative(tile, out) for tile, out in zip(band, weights, strict=True)], dim=1)
        shape = (sum(counts), len(tops), self.summands.shape[-1])
        sums = self.mixing.work.buffer("sums", shape, self.summands)
        for out, part, weight in zip(sums.split(counts), parts, weights, strict=True):
            torch.bmm(weight.transpose(0, 1), self.summands[m, part : part + len(out)], out=out)
        if self.mixing.softmax:
            top = tops.amax(1, keepdim=True).to(sums)  # as it is stored, for weights that are recomputed
            top = top.masked_fill_(top == float("-inf"), 0.0)
            factor = (tops - top).exp()
            total = (factor * sums[..., self.width + 1].mT).sum(1, keepdim=True)
            factor = factor / total.masked_fill_(total == 0, 1.0)
            self.mixing.tops[m, rows], self.mixing.sums[m, rows] = top, total.to(sums)
            largest = factor
        else:
            factor, largest = torch.ones_like(tops), tops
        # Products of small weights, nearly all below the least normal number, are only added up: storing them is slow.
        shares = torch.stack([factor, factor * largest], dim=1).to(sums)
        whole, lone = torch.bmm(shares, sums.transpose(0, 1)).unbind(1)
        self.seen.sums[m, rows, : self.width + 2] = whole[:, : self.width + 2]
        self.seen.sums[m, rows, -1] = whole[:, self.width + 2]
        self.seen.lone[m, rows] = lone[:, : self.width + 2]
        factors = list(factor.to(sums).split(counts, dim=1))
        for tile, weight, each in zip(band, weights, factors, strict=True):
            columns = torch.bmm(each.mT[:, None], weight.transpose(0, 1)).flatten()
            self.seen.columns[m, tile.cols] += columns[: tile.cols.stop - tile.cols.start]
        squares = sums[..., self.width :].double() * factor.mT[..., None]
        if self.mixing.softmax:
            self._sum_keys(m, rows, parts, weights, factors, squares)
        self._measure(m, rows, parts[0], sums[..., : self.width], squares, factor.mT, largest.mT)
        self.counts += counts
        return weights, factors

    def scaled(self, tile: Tile, weights: Tensor, factor: Tensor) -> Tile:
        """A tile with its weights; uses up those that `add` returned."""
        width = tile.cols.stop - tile.cols.start
        whole = weights.mul_(factor[..., None]).flatten(1)[None, :, :width]
        slopes = whole if self.mixing.softmax else whole - whole.square()
        if self.mixing.logits.softcap is not None:
            slopes = slopes * self.mixing.logits.slope_of(tile).to(whole)
        return replace(tile, weights=whole, slopes=slopes)

    def tile_sizes(self) -> TileSizes:
        """The sizes of all tiles seen so far."""
        return TileSizes(
            torch.cat(self.places, dim=1), torch.cat(self.sizes, dim=1).cpu(), self.side, tuple(self.counts)
        )

    def _memory(self, shapes: list[tuple[int, int, int]], stored: bool) -> list[Tensor]:
        """Memory for the weights of a band."""
        if stored:
            return [self.summands.new_empty(shape) for shape in shapes]
        sizes = [math.prod(shape) for shape in shapes]
        flat = self.mixing.work.buffer("band", (sum(sizes),), self.summands)
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def _relative(self, tile: Tile, out: Tensor) -> Tensor:
        """Put the weights of a tile, up to a factor of its rows, into ``out``; the largest of each row and part.

        For softmax these are exp(s − m) and the logits m themselves, else the weights and the largest of them.
        """
        logits = self.mixing.logits.of(tile, self.mixing.work)[0]
        if logits.shape[1] < out[0].numel():
            logits = torch.nn.functional.pad(logits, (0, out[0].numel() - logits.shape[1]), value=float("-inf"))
        logits = logits.unflatten(1, (-1, self.side))
        if not self.mixing.softmax:
            out.copy_(logits.sigmoid_())
            return out.amax(-1).double()
        top = logits.amax(-1)
        torch.sub(logits, top.masked_fill(top == float("-inf"), 0.0)[..., None], out=logits)
        out.copy_(logits).exp_()
        return top

    def _in_parts(self, tokens: Tensor) -> Tensor:
        """Tokens as ``(maps, parts, side, ·)``, with zeros behind the last."""
        return torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[1] % self.side)).unflatten(1, (-1, self.side))

    def _sum_keys(
        self, m: int, rows: slice, parts: list[int], weights: list[Tensor], factors: list[Tensor], squares: Tensor
    ) -> None:
        """Sum the keys of weighty tiles, and bound what is missing of the sum."""
        _, mass, key, _ = squares.unbind(-1)
        weighty = mass.amax(1) >= _WEIGHTY
        missing = [torch.where(weighty[:, None], 0.0, t).sum(0) for t in (mass, key)]
        self.seen.keys_apart[m, rows, 0] = (missing[0] * missing[1]).sqrt()
        total = self.seen.sums[m, rows, self.width + 2 : -1]
        for part, weight, factor, chosen in zip(
            parts, weights, factors, weighty.split([each.shape[1] for each in factors]), strict=True
        ):
            index = chosen.nonzero().flatten()
            if len(index):
                seen = torch.bmm(
                    weight.transpose(0, 1).index_select(0, index), self.keys[m].index_select(0, part + index)
                )
                total += torch.einsum("irk,ri->rk", seen, factor[:, index])

    def _measure(
        self, m: int, rows: slice, first: int, mean: Tensor, squares: Tensor, factor: Tensor, largest: Tensor
    ) -> None:
        """The sizes of a band.

        Args:
            first: part of the band.
            mean: sums with v, up to the ``factor``, ``(parts, rows, width)``.
            squares: Σ_j P_ij (|v_j|², 1, |k_j|², |v_jW_O|²), ``(parts, rows, 4)``.
            factor: of every row of every part, ``(parts, rows)``; ``largest``: its largest weight.
        """
        square, mass, key, through = squares.unbind(-1)
        if self.mixing.softmax:
            seen = mass.sum(0)[:, None]
            output = self.seen.sums[m, rows, : self.width].double() / seen.masked_fill(seen == 0, 1.0)
        else:
            output = torch.zeros_like(self.seen.sums[m, rows, : self.width], dtype=torch.float64)
        turned = output @ self.triangle[m].mT
        towards = (turned @ self.triangle[m]).to(mean)
        product = torch.mul(mean, towards, out=self.mixing.work.buffer("product", tuple(mean.shape), mean))
        middle = product.sum(-1).double() * factor
        length = turned.square().sum(-1)
        far = length * mass
        sizes = through + far + 2 * (square * mass).sqrt() * towards.double().norm(dim=-1)
        apart = (through - 2 * middle + far).clamp_min(0.0) + self.rounding * sizes
        in_query = (key * apart).amax(1).sqrt() * self.units[0, m] * self.units[1, m]
        in_key = (self.query[m, rows] * largest * apart).sum(1).sqrt() * self.units[0, m]
        in_value = (largest * mass).sum(1).sqrt()
        self.sizes.append(torch.stack([in_query, in_key, in_value]))
        places = torch.tensor([[m], [rows.start // self.side], [0]]).expand(3, len(mean)).clone()
        places[2] = torch.arange(first, first + len(mean))
        self.places.append(places)
