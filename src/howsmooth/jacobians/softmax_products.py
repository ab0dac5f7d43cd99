"""The derivative of O = P(q, k) v in closed form, tile by tile.

For tangents dq, dk, dv and cotangents g of every map (one head of one batch item), with S the logits, P the weights and
D = ∂P_ij/∂s_ij up to normalisation (P for softmax, P(1 − P) for sigmoid, times the slope of a soft-cap):

    JVP   T = D ∘ (dq kᵀ + q dkᵀ),  dO = T v − rowsum(T) ∘ O + P dv
    VJP   E = D ∘ (g vᵀ − rowsum(g ∘ O)),  gq = E k,  gk = Eᵀ q,  gv = Pᵀ g

where the terms with O stand only for softmax. Four n × n × width products each way and no forward pass. The n × n
arrays are cut into tiles that fit the cache; tiles that a mask hides altogether do not exist. Tiles of P are stored
while they fit the memory budget and recomputed from the largest logit and the sum of their rows beyond it, so that
memory is O(n) at any n.

Both products subtract numbers as large as |q||v|, and a row of P whose sum is off by δ leaves δ|q||v| behind. So a
weight is exp(s − top)/sum and never exp(s − logsumexp), which rounds by |s|·eps; O is divided by the sum of the row as
it came out; and keys and values are to be given about a centre, for the products are those of any other (softmax sees
no constant on all keys). The remaining rounding is bounded in `howsmooth.jacobians.product_error`.

**The point** of a Jacobian holds queries, keys and values of every head, prepared in double precision. Projection,
stages and centring happen once per input and cost little beside the products, so they are done in float64 and rounded
at the end: an inner product of length d then brings one rounding of the result instead of d of its terms. Keys and
values are given about a centre wherever the derivative does not depend on it (softmax sees no constant on all keys and
its derivative none on all values): tokens at 10⁶ ± 1 keep all the digits of the ± 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.memory_layout import add_product, channels_first, zeros_in_layout
from howsmooth.attention.stages import Chain
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.product_error import Moments, MomentSums, OutputSums, per_map, select_maps
from howsmooth.jacobians.tiles import Logits, Tile, WeightMemory, Workspace, bands, fits_at_once
from howsmooth.numerics.roundoff import spread_of_sum


@dataclass(frozen=True)
class EvaluationPoint:
    """Queries, keys and values of an attention map after their stages, ``(maps, n, width)``.

    Attributes:
        dtype: that of products at the point, which may be narrower than that of its tensors.
        chains: the derivatives of the stages of queries, keys and values.
        errors: for queries, keys and values, a bound on the error of a token of each map before its last rounding to
            the dtype, ``(maps,)``.
        sizes: for queries, keys and values, the largest norm of the derivative of the stages, ``(maps,)``.
    """

    attention: AttentionMap
    dtype: torch.dtype
    query: Tensor
    key: Tensor
    value: Tensor
    chains: tuple[Chain, ...]
    errors: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]

    @classmethod
    def at(cls, attention: AttentionMap, x: Tensor, dtype: torch.dtype, errors: bool = True) -> EvaluationPoint:
        """The point of ``x``, ``(…, n, d)``, for products in ``dtype``; without ``errors`` they are not bounded."""
        x = x.detach().reshape(-1, *x.shape[-2:])
        wide = dtype if x.device.type == "mps" else torch.float64
        moved = torch.cat([x, x[:, :1]], dim=-2).to(wide)  # one array for the tokens, and their centre behind them
        tokens, last = moved[:, :-1], moved[:, -1:]
        last.copy_(tokens.mean(-2, keepdim=True))
        tokens.sub_(last)
        raw = [projected.flatten(0, 1) for projected in attention.project_about(moved)]
        through = [Chain.through(stages, t) for stages, t in zip(attention.stages(*raw[:2]), raw, strict=True)]
        staged = [t for t, _ in through]
        sizes = [largest_size(chain, t) for t, chain in through] if errors else []
        bounds = _errors(attention, tokens, last, raw, staged, sizes) if errors else ()
        query, key, value = staged
        if attention.weighting == "softmax":
            value = value - value.mean(-2, keepdim=True)
            key = key if attention.softcap is not None else key - key.mean(-2, keepdim=True)
        chains = tuple(chain.to(dtype) for _, chain in through)
        return cls(attention, dtype, query, key, value, chains, bounds, tuple(sizes))


def _errors(
    attention: AttentionMap, moved: Tensor, centre: Tensor, raw: list[Tensor], staged: list[Tensor], sizes: list[Tensor]
) -> tuple[Tensor, ...]:
    """Bounds on the errors of the staged tokens: of the projections, through the stages, and of the stages."""
    eps = torch.finfo(moved.dtype).eps
    reach, offset = (_longest(t).repeat_interleave(attention.heads) for t in (moved, centre))
    weights, biases = attention.input_weights, attention.input_biases
    meeting = torch.maximum(_longest(raw[0]), _longest(raw[1]))  # stages of queries and keys may look at both
    largest = (meeting, meeting, _longest(raw[2]))
    errors = []
    for i, free in enumerate((False, *attention.ignores_constants)):
        length = per_map(torch.linalg.matrix_norm(weights[i].double()), reach, attention)
        projected = length * (reach if free else reach + offset)
        bias = biases[i]
        if bias is not None and not free:
            projected = projected + per_map(torch.linalg.vector_norm(bias.double(), dim=-1), reach, attention)
        before = spread_of_sum(moved.shape[-1]) * projected + 4 * largest[i]
        errors.append(eps * (sizes[i] * before + 4 * _longest(staged[i])))
    return tuple(errors)


def _longest(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens, dim=-1).amax(-1).double()


def largest_size(chain: Chain, tokens: Tensor) -> Tensor:
    """The largest norm of the derivative of a chain over the tokens of every map, ``(maps,)``."""
    size = torch.as_tensor(chain.size(), dtype=torch.float64, device=tokens.device)
    return size.expand(*tokens.shape[:2], 1).amax((-2, -1))


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

    @classmethod
    @torch.no_grad()
    def at(cls, point: EvaluationPoint, memory: int, moments: bool = True) -> Mixing:
        """Evaluate the weights once; store as many tiles of them as fit into ``memory`` bytes.

        Logits are evaluated in the dtype of the point's tensors, which may be wider than that of the products; those
        of weights that are recomputed in every product too. Without ``moments`` there is no bound on rounding.
        """
        self = cls.unevaluated(point)
        softmax, key, value, logits = self.softmax, self.key, self.value, self.logits
        seen = MomentSums(key, value, centred=softmax) if moments else OutputSums(value, centred=softmax)
        tiles: list[Tile] = []
        maps, n, _ = key.shape
        every = list(bands(maps, n, logits.terms, key.device))
        numbers = sum(tile.size for band in every for tile in band)
        if numbers * value.element_size() > memory:
            memory -= self.beside
        room = WeightMemory(memory, numbers, value)
        for band in every:
            # Logits that do not fit are computed twice.
            held = [logits.of(tile) for tile in band] if fits_at_once(band) else None
            if softmax and band:
                rows = band[0].queries
                self.tops[rows] = _top(held or map(logits.of, band))
                self.sums[rows] = _sum(held or map(logits.of, band), self.tops[rows])
            for tile, logit in zip(band, held or map(logits.of, band), strict=True):
                weights, slopes = self._from_logits(tile, logit)
                seen.add(tile, weights)
                tiles.append(room.store(tile, weights, slopes))
        return self.evaluated(tiles, seen.output(), seen.moments())

    @classmethod
    def unevaluated(cls, point: EvaluationPoint) -> Mixing:
        """No tiles and outputs yet."""
        query, key, value = (t.to(point.dtype) for t in (point.query, point.key, point.value))
        tops, sums = torch.zeros_like(query[..., :1]), torch.ones_like(query[..., :1])
        logits = Logits.between(point.query, point.key, point.attention)
        softmax = point.attention.weighting == "softmax"
        return cls(query, key, value, value, tops, sums, (), logits, softmax, None, Workspace.shared())

    def evaluated(self, tiles: Sequence[Tile], output: Tensor, moments: Moments | None) -> Mixing:
        """The same with its tiles and outputs, once all weights have been evaluated."""
        if not bool(torch.isfinite(output).all()):
            raise InvalidInput("the attention logits overflow: pass float64 inputs and weights, or scale them down.")
        return replace(self, tiles=tuple(tiles), output=output, moments=moments)

    def channels_first(self) -> Mixing:
        """The same for tangents whose channels lie before their tokens (`howsmooth.attention.memory_layout`)."""
        query, key, value, output = map(channels_first, (self.query, self.key, self.value, self.output))
        return replace(self, query=query, key=key, value=value, output=output)

    def rounded(self, dtype: torch.dtype) -> Mixing:
        """The same for products in another dtype, without moments; weights stay stored where they were.

        Outputs are taken from the rounded weights: a row must not move when all its values do.
        """
        names = ("query", "key", "value", "tops", "sums")
        tensors = {name: getattr(self, name).to(dtype) for name in names}
        tiles = [tile.changed(lambda array: array.to(dtype)) for tile in self.tiles]
        logits = self.logits.rounded(dtype, stored=all(tile.weights is not None for tile in tiles))
        self = replace(self, **tensors, logits=logits)
        seen = OutputSums(self.value, centred=self.softmax)
        for tile in tiles:
            seen.add(tile, self.weights_of(tile)[0])
        return self.evaluated(tiles, seen.output(), None)

    @property
    def plain(self) -> bool:
        """Whether the slopes of the weights are the weights themselves."""
        return self.softmax and self.logits.softcap is None

    @property
    def point_error(self) -> float:
        """A bound on the error of a logit, and with it on the relative error of a weight: eps·max|q_i||k_j|."""
        longest = [torch.linalg.vector_norm(t, dim=-1).amax(-1) for t in (self.query, self.key)]
        return self.logits.eps * float((longest[0] * longest[1]).max())

    @property
    def chain(self) -> int:
        """The longest chain of additions in a sum over tokens: the terms of a tile, then one for each tile."""
        tiles = self.tiles
        by_row = Counter((tile.maps.start, tile.rows.start) for tile in tiles)
        in_row = max((tile.cols.stop - tile.cols.start for tile in tiles), default=0) + max(by_row.values(), default=0)
        bands = Counter(maps for maps, _ in by_row)
        in_column = max((tile.rows.stop - tile.rows.start for tile in tiles), default=0) + max(
            bands.values(), default=0
        )
        return max(in_row, in_column)

    @property
    def beside(self) -> int:
        """Bytes that products hold beside weights where these are recomputed: logits' own tokens, and tangents."""
        wide = 0 if self.logits.query is self.query else self.logits.query.nbytes + self.logits.key.nbytes
        return wide + 2 * (self.query.nbytes + self.key.nbytes)

    @property
    def streamed(self) -> bool:
        """Whether some weights are recomputed in every product."""
        return any(tile.weights is None for tile in self.tiles)

    def jvp(self, dscores: tuple[Tensor, Tensor] | None, dvalue: Tensor | None) -> Tensor:
        """The tangent of O along both paths, or along one: of (dq, dk) alone, or of dv alone."""
        dout = zeros_in_layout(self.output)
        row_sums = torch.zeros_like(self.sums)
        if dscores is not None:
            left = self.work.joined("left", dscores[0], self.query)
            right = self.work.joined("right", self.key, dscores[1]).mT
        for tile in self.tiles:
            weights, slopes = self.weights_of(tile)
            rows = dout[tile.queries]
            if dscores is not None:
                moved = self.work.product(left[tile.queries], right[tile.maps, :, tile.cols]).mul_(slopes)
                add_product(rows, moved, self.value[tile.keys])
                if self.softmax:
                    row_sums[tile.queries].add_(moved.sum(-1, keepdim=True))
            if dvalue is not None:
                add_product(rows, weights, dvalue[tile.keys])
        return dout.addcmul_(row_sums, self.output, value=-1) if self.softmax and dscores is not None else dout

    def vjp(self, grad: Tensor, *, score: bool = True, value: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of q, k and v; ``score=False`` or ``value=False`` leaves that path out (zeros)."""
        gquery, gkey, gvalue = (zeros_in_layout(t) for t in (self.query, self.key, self.value))
        left, right = grad, self.value
        if self.softmax:
            left = self.work.joined("left", grad, -(grad * self.output).sum(-1, keepdim=True))
            right = self.work.joined("right", self.value, torch.ones_like(self.sums))
        right = right.mT
        for tile in self.tiles:
            weights, slopes = self.weights_of(tile)
            if score:
                moved = self.work.product(left[tile.queries], right[tile.maps, :, tile.cols]).mul_(slopes)
                add_product(gquery[tile.queries], moved, self.key[tile.keys])
                add_product(gkey[tile.keys], moved.mT, self.query[tile.queries])
            if value:
                add_product(gvalue[tile.keys], weights.mT, grad[tile.queries])
        return gquery, gkey, gvalue

    def select(self, index: Tensor) -> Mixing:
        """The maps at ``index`` (increasing) only; tiles that belong to one map are shared, not copied."""
        tiles = tuple(part for tile in self.tiles if (part := tile.select(index)) is not None)
        tensors = {name: getattr(self, name)[index] for name in ("query", "key", "value", "output", "tops", "sums")}
        maps = self.logits.maps.select(index)
        logits = replace(self.logits, query=self.logits.query[index], key=self.logits.key[index], maps=maps)
        moments = None if self.moments is None else select_maps(self.moments, index)
        return replace(self, **tensors, tiles=tiles, logits=logits, moments=moments)

    def mixed_values(self, attention: AttentionMap, tokens: Tensor) -> Tensor:
        """Σ_j P_ij v_j at ``tokens``, ``(batch, n, d)``, with the centre of the stored values.

        Rows of weights that sum to one leave that centre as it is; elsewhere another pass over the weights is made.
        """
        wide = torch.float64 if tokens.device.type != "mps" else tokens.dtype
        whole = self.softmax and attention.terms.first_blind(tokens.shape[1], attention.heads) is None
        if whole and not attention.value_stages:
            weight, bias = attention.value_weight.to(wide), attention.value_bias
            first = (tokens[:, 0].to(wide) @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2])
            value = attention.per_head(first if bias is None else first + bias, dim=1).flatten(0, 1)[:, None]
            return self.output.to(value) + (value - self.value[:, :1].to(value))
        value = attention.in_dtype(wide).staged(tokens.to(wide))[2].flatten(0, 1).to(self.value)
        return self.jvp(None, value).to(wide)

    def column_sums(self) -> Tensor:
        """Σ_i P_ij for every map and key, ``(maps, n)``: how much attention a token receives."""
        sums = torch.zeros_like(self.sums[..., 0])
        for tile in self.tiles:
            sums[tile.keys].add_(self.weights_of(tile)[0].sum(-2))
        return sums

    def entropy(self) -> Tensor:
        """Mean over queries of −Σ_j P_ij ln P_ij, ``(maps,)``, in nats (softmax weights)."""
        total = torch.zeros_like(self.sums[..., 0])
        for tile in self.tiles:
            total[tile.queries].add_(torch.special.entr(self.weights_of(tile)[0]).sum(-1))
        return total.mean(-1)

    def _from_logits(self, tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and slopes of a tile; uses up ``logits``."""
        if self.softmax:
            rest = logits.sub_(self.tops[tile.queries]).to(self.query.dtype)
            slopes = weights = rest.exp_().div_(self.sums[tile.queries])
        else:
            weights = logits.sigmoid_().to(self.query.dtype)
            slopes = weights - weights.square()
        if self.logits.softcap is not None:
            slopes = slopes * self.logits.slope_of(tile).to(self.query.dtype)
        return weights, slopes

    def weights_of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Weights and slopes of a tile, stored or recomputed."""
        if tile.weights is None or tile.slopes is None:
            return self._from_logits(tile, self.logits.of(tile))
        return tile.weights, tile.slopes


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
