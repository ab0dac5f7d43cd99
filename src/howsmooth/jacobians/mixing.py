"""Where tokens meet: the derivative of O = P(q, k) v in closed form, tile by tile.

For tangents dq, dk, dv and cotangents g of every map (one head of one batch item), with S the logits, P the weights and
D = ∂P_ij/∂s_ij up to normalisation (P for softmax, P(1 − P) for sigmoid, times the slope of a soft-cap):

    JVP   T = D ∘ (dq kᵀ + q dkᵀ),  dO = T v − rowsum(T) ∘ O + P dv
    VJP   E = D ∘ (g vᵀ − rowsum(g ∘ O)),  gq = E k,  gk = Eᵀ q,  gv = Pᵀ g

where the terms with O stand only for softmax. Four n × n × width products each way and no forward pass. The n × n
arrays are cut into tiles that fit the cache; tiles that a mask hides altogether do not exist. Tiles of P are kept while
they fit the memory budget and recomputed from the largest logit and the sum of their rows beyond it, so that memory is
O(n) at any n.

Both products subtract numbers as large as |q||v|, and a row of P whose sum is off by δ leaves δ|q||v| behind. So a
weight is exp(s − top)/sum and never exp(s − logsumexp), which rounds by |s|·eps; O is divided by the sum of the row as
it came out; and keys and values are to be given about a centre, for the products are those of any other (softmax sees
no constant on all keys). What rounding still does is bounded in `howsmooth.jacobians.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.attention.base import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.attention.terms import Terms
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.moments import Moments, MomentSums, OutputSums
from howsmooth.jacobians.point import Point
from howsmooth.jacobians.skipping import LeftOut, TileSizes, TileSums
from howsmooth.jacobians.workspace import Workspace

TILE_ROWS = 1024
TILE_COLS = 1024
TILE_SIZE = 2**21
"""Most entries of a tile, over all its maps: enough for the matrix products to run at full speed, little enough for the
arrays of a tile to stay in the cache between the steps that touch them."""
BAND_SIZE = 2**23
"""Most entries of the logits of one band of queries that are held at once while the weights are first evaluated."""
FINE_TILE, FINE_TILES = 128, 128
"""Rows and columns of tiles that may be left out; twice as many where there would be more tiles than this on a side."""
MASKED_SHARE = 4
"""Under a mask tiles have fewer rows by this factor, so that less of the hidden part is computed with the diagonal."""


@dataclass(frozen=True)
class Tile:
    """One block of queries and keys for a run of maps, with its weights when they are kept."""

    maps: slice
    rows: slice
    cols: slice
    weights: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def size(self) -> int:
        return math.prod(span.stop - span.start for span in (self.maps, self.rows, self.cols))

    @property
    def queries(self) -> tuple[slice, slice]:
        return self.maps, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        return self.maps, self.cols


@dataclass(frozen=True)
class Logits:
    """S = cap(q kᵀ) + biases, tile by tile.

    Attributes:
        eps: of the dtype in which the logits of all weights were evaluated.
    """

    query: Tensor
    key: Tensor
    maps: Maps
    terms: Terms
    softcap: float | None
    eps: float

    @classmethod
    def between(cls, query: Tensor, key: Tensor, attention: AttentionMap) -> Logits:
        maps = Maps.every(len(query) // attention.heads, attention.heads, query.shape[1], query)
        return cls(query, key, maps, attention.terms, attention.softcap, torch.finfo(query.dtype).eps)

    def of(self, tile: Tile) -> Tensor:
        """The logits of a tile."""
        logits = torch.bmm(self.query[tile.queries], self.key[tile.keys].mT)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        block = self.terms.block(tile.rows, tile.cols, self.maps.select(tile.maps))
        return logits if block is None else logits.add_(block)

    def slope_of(self, tile: Tile) -> Tensor:
        """The slope 1 − tanh² of the soft-cap in a tile."""
        assert self.softcap is not None
        capped = torch.bmm(self.query[tile.queries], self.key[tile.keys].mT).div_(self.softcap).tanh_()
        return 1 - capped.square_()


@dataclass(frozen=True)
class Mixing:
    """The map (q, k, v) ↦ O at one point, ready for products with its Jacobian.

    Tensors are ``(maps, n, width)``; build with `Mixing.at`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    tops: Tensor
    sums: Tensor
    tiles: tuple[Tile, ...]
    logits: Logits
    softmax: bool
    moments: Moments | None
    work: Workspace
    exact: Logits | None = None
    sizes: TileSizes | None = None
    left_out: LeftOut | None = None

    @classmethod
    @torch.no_grad()
    def at(
        cls,
        attention: AttentionMap,
        point: Point,
        dtype: torch.dtype,
        memory: int,
        moments: bool = True,
        sized: bool = False,
    ) -> Mixing:
        """Evaluate the weights once; keep as many tiles of them as fit into ``memory`` bytes.

        Logits are evaluated in the dtype of the point, which may be wider than the ``dtype`` of the products. Without
        ``moments`` nothing is kept by which rounding could be bounded. ``sized`` tiles are small and know how much goes
        with them when they are left out (`howsmooth.jacobians.skipping`).
        """
        softmax = attention.weighting == "softmax"
        exact = Logits.between(point.query, point.key, attention)
        query, key, value = (t.to(dtype) for t in (point.query, point.key, point.value))
        seen = MomentSums(key, value, centred=softmax) if moments else OutputSums(value, centred=softmax)
        tops, sums = torch.zeros_like(query[..., :1]), torch.ones_like(query[..., :1])
        logits = Logits.between(query, key, attention)
        self = cls(query, key, value, value, tops, sums, (), logits, softmax, seen.moments(), Workspace.shared())
        kept: list[Tile] = []
        of_tiles = TileSums(query, key, value, attention.output_weight, softmax) if sized else None
        for band in self._bands(fine=sized):
            narrow = sum(tile.size for tile in band) <= BAND_SIZE  # otherwise logits are computed twice, not kept
            held = [exact.of(tile) for tile in band] if narrow else None
            if softmax and band:
                rows = band[0].queries
                self.tops[rows] = _top(held or map(exact.of, band))
                self.sums[rows] = _sum(held or map(exact.of, band), self.tops[rows])
            for tile, logit in zip(band, held or map(exact.of, band), strict=True):
                weights, slopes = self._from_logits(tile, logit, exact)
                seen.add(tile.queries, tile.keys, weights)
                if of_tiles is not None:
                    row, column = (span.start // fine_side(query.shape[1]) for span in (tile.rows, tile.cols))
                    of_tiles.add(tile.queries, tile.keys, (tile.maps.start, row, column), weights)
                size = weights.nbytes + (0 if slopes is weights else slopes.nbytes)
                if size <= memory:
                    memory -= size
                    tile = replace(tile, weights=weights, slopes=slopes)
                kept.append(tile)
            if of_tiles is not None:
                of_tiles.close()
        output = seen.output()
        if not bool(torch.isfinite(output).all()):
            raise InvalidInput(
                f"the attention logits overflow in {str(exact.query.dtype).removeprefix('torch.')}: "
                "pass float64 inputs and weights, or scale them down."
            )
        if all(tile.weights is not None for tile in kept):
            self = replace(self, logits=replace(logits, eps=torch.finfo(exact.query.dtype).eps))
        sizes = None if of_tiles is None else of_tiles.tile_sizes()
        self = replace(self, tiles=tuple(kept), output=output, moments=seen.moments())
        return replace(self, exact=exact, sizes=sizes) if sized else self

    def without(self, gone: Tensor, memory: int) -> Mixing:
        """The same without some of its ``sized`` tiles; neighbours are joined, weights kept as ``memory`` allows."""
        assert self.sizes is not None
        return replace(self._of_tiles(~gone, memory), left_out=self.sizes.left_out(gone, len(self.query)))

    def joined(self, memory: int) -> Mixing:
        """The same with all of its ``sized`` tiles, neighbours joined, weights kept as ``memory`` allows."""
        return self._of_tiles(torch.ones(len(self.tiles), dtype=torch.bool), memory)

    def _of_tiles(self, kept: Tensor, memory: int) -> Mixing:
        assert self.exact is not None
        runs: list[list[Tile]] = []
        for tile, there in zip(self.tiles, kept.tolist(), strict=True):
            if there and runs and _continues(runs[-1], tile):
                runs[-1].append(tile)
            elif there:
                runs.append([tile])
        tiles = []
        for run in runs:
            tile = replace(run[0], cols=slice(run[0].cols.start, run[-1].cols.stop), weights=None, slopes=None)
            memory -= tile.size * self.query.element_size()
            if memory >= 0:
                weights, slopes = zip(*map(self._sharp_weights, run), strict=True)
                joined = torch.cat(weights, dim=-1)
                tile = replace(tile, weights=joined, slopes=joined if self.plain else torch.cat(slopes, dim=-1))
            tiles.append(tile)
        part = replace(self, tiles=tuple(tiles), exact=None, sizes=None)
        return part if memory < 0 else replace(part, logits=replace(self.logits, eps=self.exact.eps))

    @property
    def plain(self) -> bool:
        """Whether the slopes of the weights are the weights themselves."""
        return self.softmax and self.logits.softcap is None

    @property
    def blur(self) -> float:
        """By how much rounding may move a logit, and with it the weights relatively: eps·max|q_i||k_j|."""
        longest = [torch.linalg.vector_norm(t, dim=-1).amax(-1) for t in (self.query, self.key)]
        return self.logits.eps * float((longest[0] * longest[1]).max())

    @property
    def streamed(self) -> bool:
        """Whether some weights are recomputed in every product."""
        return any(tile.weights is None for tile in self.tiles)

    def jvp(self, dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None) -> Tensor:
        """The tangent of O: of the score path when ``dvalue`` is None, of the value path when the other two are."""
        dout = torch.zeros_like(self.output)
        score = dquery is not None and dkey is not None
        if dquery is not None and dkey is not None:
            left = self.work.joined("left", dquery, self.query)
            right = self.work.joined("right", self.key, dkey).mT
            row_sums = torch.zeros_like(self.sums)
        for tile in self.tiles:
            weights, slopes = self._weights(tile)
            rows = dout[tile.queries]
            if score:
                moved = self.work.product(left[tile.queries], right[tile.maps, :, tile.cols]).mul_(slopes)
                rows.baddbmm_(moved, self.value[tile.keys])
                if self.softmax:
                    row_sums[tile.queries].add_(moved.sum(-1, keepdim=True))
            if dvalue is not None:
                rows.baddbmm_(weights, dvalue[tile.keys])
        return dout.addcmul_(row_sums, self.output, value=-1) if score and self.softmax else dout

    def vjp(self, grad: Tensor, *, score: bool = True, value: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of q, k and v; ``score=False`` or ``value=False`` leaves that path out (zeros)."""
        gquery, gkey, gvalue = (torch.zeros_like(t) for t in (self.query, self.key, self.value))
        left, right = grad, self.value
        if self.softmax:
            left = self.work.joined("left", grad, -(grad * self.output).sum(-1, keepdim=True))
            right = self.work.joined("right", self.value, torch.ones_like(self.sums))
        right = right.mT
        for tile in self.tiles:
            weights, slopes = self._weights(tile)
            if score:
                moved = self.work.product(left[tile.queries], right[tile.maps, :, tile.cols]).mul_(slopes)
                gquery[tile.queries].baddbmm_(moved, self.key[tile.keys])
                gkey[tile.keys].baddbmm_(moved.mT, self.query[tile.queries])
            if value:
                gvalue[tile.keys].baddbmm_(weights.mT, grad[tile.queries])
        return gquery, gkey, gvalue

    def select(self, index: Tensor) -> Mixing:
        """The maps at ``index`` (increasing) only; tiles that belong to one map are shared, not copied."""
        tiles = []
        for tile in self.tiles:
            inside = (index >= tile.maps.start) & (index < tile.maps.stop)
            if not bool(inside.any()):
                continue
            members = inside.nonzero().flatten()
            span = slice(int(members[0]), int(members[-1]) + 1)
            local = index[inside] - tile.maps.start
            weights, slopes = tile.weights, tile.slopes
            if weights is not None and slopes is not None and len(local) < len(weights):
                same = slopes is weights
                weights = weights[local]
                slopes = weights if same else slopes[local]
            tiles.append(replace(tile, maps=span, weights=weights, slopes=slopes))
        tensors = {name: getattr(self, name)[index] for name in ("query", "key", "value", "output", "tops", "sums")}
        maps = self.logits.maps.select(index)
        logits = replace(self.logits, query=tensors["query"], key=tensors["key"], maps=maps)
        moments = None if self.moments is None else self.moments.select(index)
        left_out = None if self.left_out is None else self.left_out.select(index)
        return replace(
            self,
            **tensors,
            tiles=tuple(tiles),
            logits=logits,
            moments=moments,
            exact=None,
            sizes=None,
            left_out=left_out,
        )

    def mixed_values(self, attention: AttentionMap, tokens: Tensor) -> Tensor:
        """Σ_j P_ij v_j at ``tokens``, ``(batch, n, d)``, the centre that values are kept about included.

        Rows of weights that sum to one leave that centre as it is; elsewhere the weights are gone through once more.
        """
        wide = tokens.to(torch.float64 if tokens.device.type != "mps" else tokens.dtype)
        whole = self.softmax and attention.terms.first_blind(tokens.shape[1], attention.heads) is None
        if whole and not attention.value_stages:
            weight, bias = attention.value_weight.to(wide), attention.value_bias
            first = (wide[:, 0] @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2])
            value = attention.per_head(first if bias is None else first + bias, dim=1).flatten(0, 1)[:, None]
            return self.output.to(value) + (value - self.value[:, :1].to(value))
        value = attention.in_dtype(wide.dtype)._heads(wide)[2].flatten(0, 1).to(self.value)
        return self.jvp(None, None, value).to(wide)

    def column_sums(self) -> Tensor:
        """Σ_i P_ij for every map and key, ``(maps, n)``: how much attention a token receives."""
        sums = torch.zeros_like(self.sums[..., 0])
        for tile in self.tiles:
            sums[tile.keys].add_(self._weights(tile)[0].sum(-2))
        return sums

    def entropy(self) -> Tensor:
        """Mean over queries of −Σ_j P_ij ln P_ij, ``(maps,)``, in nats (softmax weights)."""
        total = torch.zeros_like(self.sums[..., 0])
        for tile in self.tiles:
            total[tile.queries].add_(torch.special.entr(self._weights(tile)[0]).sum(-1))
        return total.mean(-1)

    def _bands(self, fine: bool = False) -> Iterator[list[Tile]]:
        """The tiles of each block of queries, hidden ones left out; ``fine`` ones belong to one map and are small."""
        count, n, _ = self.query.shape
        most = tile_size(self.query.device)
        side = max(1, math.isqrt(most // TILE_SIZE))
        rows = min(max(1, side * TILE_ROWS // MASKED_SHARE) if self.logits.terms else side * TILE_ROWS, n)
        rows, cols = 2 * (fine_side(n),) if fine else (rows, side * TILE_COLS)
        group = 1 if fine else max(1, most // (rows * min(cols, n)))
        for first in range(0, count, group):
            maps = slice(first, min(first + group, count))
            for start in range(0, n, rows):
                stop = min(start + rows, n)
                low, high = self.logits.terms.key_range(start, stop, n)
                edges = [low, *range((low // cols + 1) * cols if fine else low + cols, high, cols), high]
                yield [
                    Tile(maps, slice(start, stop), slice(left, right))
                    for left, right in pairwise(edges)
                    if left < right
                ]

    def _from_logits(self, tile: Tile, logits: Tensor, source: Logits) -> tuple[Tensor, Tensor]:
        """Weights and slopes of a tile; uses up ``logits``."""
        if self.softmax:
            rest = logits.sub_(self.tops[tile.queries]).to(self.query.dtype)
            slopes = weights = rest.exp_().div_(self.sums[tile.queries])
        else:
            weights = logits.sigmoid_().to(self.query.dtype)
            slopes = weights - weights.square()
        if source.softcap is not None:
            slopes = slopes * source.slope_of(tile).to(self.query.dtype)
        return weights, slopes

    def _sharp_weights(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """As `_weights`, from the logits in the dtype of the point."""
        if tile.weights is None and self.exact is not None:
            return self._from_logits(tile, self.exact.of(tile), self.exact)
        return self._weights(tile)

    def _weights(self, tile: Tile) -> tuple[Tensor, Tensor]:
        if tile.weights is None or tile.slopes is None:
            return self._from_logits(tile, self.logits.of(tile), self.logits)
        return tile.weights, tile.slopes


def fine_side(n: int) -> int:
    """Rows and columns of tiles that may be left out, for n tokens."""
    return FINE_TILE if n <= FINE_TILE * FINE_TILES else 2 * FINE_TILE


def tile_size(device: torch.device) -> int:
    """Most entries of a tile: what a cache holds on a CPU; elsewhere a sixty-fourth of the free memory in numbers.

    A tile takes about four arrays of its size, so that they stay within a quarter of what is free in float32.

    >>> tile_size(torch.device("cpu")) == TILE_SIZE
    True
    """
    if device.type in ("cpu", "meta"):
        return TILE_SIZE
    try:
        free = int(torch.get_device_module(device).mem_get_info(device)[0])
    except (AttributeError, RuntimeError, AssertionError, NotImplementedError):  # a device that does not tell
        return TILE_SIZE
    return max(TILE_SIZE, free // 64)


def _continues(run: list[Tile], tile: Tile) -> bool:
    """Whether a tile goes on where a run of tiles ends."""
    last, wide = run[-1], tile.cols.stop - run[0].cols.start > TILE_COLS
    return (last.maps, last.rows, last.cols.stop) == (tile.maps, tile.rows, tile.cols.start) and not wide


def _top(logits: Iterable[Tensor]) -> Tensor:
    """The largest logit of every row over several tiles; 0 for rows that see nothing, whose weights are exp(−∞) = 0."""
    top = torch.cat([tile.amax(-1, keepdim=True) for tile in logits], dim=-1).amax(-1, keepdim=True)
    return top.masked_fill(top == float("-inf"), 0.0)


def _sum(logits: Iterable[Tensor], top: Tensor) -> Tensor:
    """Σ exp(s − top) of every row over several tiles, in the dtype of ``top``; 1 for rows that see nothing."""
    total = torch.zeros_like(top)
    for tile in logits:
        total += (tile - top).to(top.dtype).exp_().sum(-1, keepdim=True)
    return total.masked_fill(total == 0, 1.0)
