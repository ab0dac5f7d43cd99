r"""Attention weights evaluated once, with the sizes of their tiles (`howsmooth.jacobians.dropped_tiles.tile_bounds`).

One pass over the logits gives all of it. In every tile the weights are taken relative to the largest logit of their
own row there, :math:`w_{ij} = e^{s_{ij} - m_i}`, and summed with what is wanted of keys and values,
:math:`\sum_j w_{ij}(v_j, |v_j|^2, 1, |k_j|^2, |v_jW_O|^2)`. When a band of queries is complete, one factor
:math:`e^{m_i - \mathrm{top}_i}/\mathrm{sum}_i` for each row of each tile makes weights of P of them, and is at the same
time the largest weight p_i of that row. Squares of weights are nowhere needed: :math:`P_{ij}^2 \le p_iP_{ij}`. Sums of
the keys themselves, half of the work, are taken only of tiles that weigh something; of the others a bound is known,
:math:`|\sum_j P_{ij}k_j| \le (\sum_j P_{ij}\sum_j P_{ij}|k_j|^2)^{1/2}` (`MomentSums.keys_apart`).

With :math:`W_O^T = QR` the lengths of v W_O are those of v Rᵀ, and

.. math:: \sum_j P_{ij}|(v_j - o_i)W_O|^2 = \sum_j P_{ij}|v_jW_O|^2 - 2\,o_iR^TR\cdot\sum_j P_{ij}v_j
          + |o_iW_O|^2\sum_j P_{ij},

to which the rounding of its three parts is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.jacobians.dropped_tiles.tile_bounds import TileSizes, fine_side
from howsmooth.jacobians.evaluation_point import EvaluationPoint
from howsmooth.jacobians.key_value_moments import Moments, MomentSums
from howsmooth.jacobians.softmax_products import Mixing
from howsmooth.jacobians.tiles import TILE_COLS, Tile

_WEIGHTY = 1 / 16
"""Share of some row that a tile has at least when its keys are summed."""


@torch.no_grad()
def sized_mixing(
    attention: AttentionMap, point: EvaluationPoint, dtype: torch.dtype, memory: int
) -> tuple[Mixing, TileSizes]:
    """As `Mixing.at`, with the sizes of all tiles that can be dropped."""
    mixing = Mixing.unevaluated(attention, point, dtype)
    sums = _TileSums(mixing, attention.output_weight)
    tiles: list[Tile] = []
    for band in _bands(mixing, sums.side):
        arrays = 1 if mixing.plain else 2
        stored = arrays * dtype.itemsize * sum(tile.size for tile in band) <= memory
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
        seen.add(tile.queries, tile.keys, mixing.weights_of(tile)[0])
    return seen.moments()


def _bands(mixing: Mixing, side: int) -> Iterator[list[Tile]]:
    """The tiles of each block of ``side`` queries, hidden ones left out; their edges are multiples of ``side``."""
    count, n, _ = mixing.query.shape
    width = max(1, TILE_COLS // side) * side
    for m in range(count):
        for start in range(0, n, side):
            stop = min(start + side, n)
            low, high = mixing.logits.terms.key_range(start, stop, n)
            low, high = low // side * side, min(-(-high // side) * side, n)
            yield [
                Tile(slice(m, m + 1), slice(start, stop), slice(left, min(left + width, high)))
                for left in range(low, high, width)
            ]


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
