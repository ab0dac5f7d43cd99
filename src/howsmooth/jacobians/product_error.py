r"""Bounds on the rounding errors of products with an attention Jacobian: ``product`` of `Accuracy`.

A relative allowance of a few eps says nothing where a map is a small difference of large numbers: values far from the
origin whose differences alone matter, an output projection nearly orthogonal to the values. So the intermediate numbers
are bounded as well. With unit roundoff u = eps/2 a sum of m products, taken one after the other, is off by at most
m·u·max_t |partial sum t|, and by √m·u·max_t |partial sum t| in mean square when roundings are independent of mean zero
[1]_, [2]_. The second is used (`spread_of_sum`): products of attention are sums of thousands of terms, and the first
would be pessimistic by factors of hundreds. A sum over keys of vectors has partial sums of the same form, so their
norms are bounded by those of the whole with absolute values inside. Tokens are summed tile by tile: b tiles of t terms
whose sums are at most S_1, …, S_b with absolute values inside, S = ΣS_i, are off by
(tΣS_i² + bS²)^½·u ≤ √(t + b)·u·S in mean square, so that m grows far more slowly than n (`Mixing.chain`).

For one head let A_i = |dq_i|, B_j = |dk_j|, C_j = |dv_j| be the lengths of the tangents of one token, N_q, N_k, N_v
bounds on the maps from x to them, and o_i = Σ_j P_ij v_j. Cauchy–Schwarz under P_i, or the Frobenius norm of
P_ij|q_i||v_j − o_i|, whichever is less, gives for the three parts of dO

    |Σ_j P_ij (dq_i·(k_j − k̄_i)) (v_j − o_i)| ≤ A_i · E_i[|k − k̄_i|²]^½ E_i[|v − o_i|²]^½,
    ‖Σ_j P_ij (q_i·dk_j) (v_j − o_i)‖ ≤ ‖B‖ · min(max_i |q_i| E_i[|v − o_i|²]^½ s^½, ‖P_ij|q_i||v_j − o_i|‖_F),
    ‖Σ_j P_ij dv_j‖ ≤ ‖C‖ · min(s^½, ‖P‖_F),        s = max_j Σ_i P_ij.

These are the sizes ``apart``. The products really subtract Σ T_ij v_j and o_i Σ T_ij, whose sizes are the same with
k_j, v_j, o_i in place of their differences: the sizes ``whole``. Then, to first order,

- *weights*: logits are off by e_ij ≤ eps'·(√k/2 + 4)|q_i||k_j| plus the errors of q and k, with eps' of the dtype they
  were evaluated in, and additive biases by their own rounding; P_ij is off by a factor within exp(±2e_ij) and 4 eps,
  and the parts by that share of ``apart`` (twice for the second: o_i moves too);
- *products*: √(3m/2)·u of ``whole``, with m = 2k + v + t + b + 16 terms (row sums are taken in pairs);
- *ends*: the projections before and after, √m·u/4 of ``apart`` with their own number of terms m. The quarter is set by
  trial, not derived: partial sums along the features of a token stay far below the product of norms, and the largest
  error seen on hard maps was about half of what this allows;
- *tokens*: q, k, v rounded to the dtype (part of *products*) and their errors before that (`EvaluationPoint.errors`);
- *underflow*: every operation may lose the smallest normal number.

All of it times a bound on ‖W_o‖. For a block of heads the errors are stacked before W_o, hence add in squares. As they
are linear in A, B, C of their head, and the tangents of all heads are at most ‖W_q‖, ‖W_k‖, ‖W_v‖ together, W_q being
that of all heads, Σ_p ‖W_p‖ max_h (…) is a bound as well: for twelve heads of random weights half as much.

The mean square and the quarter make this a model of rounding and no worst case: `Guarantee.MODELLED`. Norms of weights
with more than 128 rows and columns are true with probability 1 − 10⁻⁶ besides (`spectral_bound`).

.. [1] N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002, chapter 3.
.. [2] N. J. Higham, T. Mary, *A new approach to probabilistic rounding error analysis*, SIAM J. Sci. Comput. 41 (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.jacobians.tiles import Tile
from howsmooth.numerics.roundoff import spread_of_sum
from howsmooth.numerics.spectral_norms import spectral_bound

if TYPE_CHECKING:
    from howsmooth.jacobians.softmax_products import EvaluationPoint, Mixing


_N = TypeVar("_N", "Moments", "PathErrors")


@dataclass(frozen=True)
class PathErrors:
    """Bounds on the error of the score path and of the value path, for each map of `Mixing`, ``(maps,)``."""

    score: Tensor
    value: Tensor

    def along(self, path: str) -> Tensor:
        """The bound for one path, or for both together."""
        return {"score": self.score, "value": self.value}.get(path, self.score + self.value)


def _sizes(mixing: Mixing) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The sizes ``apart`` and ``whole``: norms of the three parts of dO as maps of dq, dk and dv, ``(maps,)`` each."""
    assert mixing.moments is not None
    seen, query, root = mixing.moments, _lengths(mixing.query), mixing.moments.sink.sqrt()

    def of_keys(rows: Tensor, lone: Tensor) -> Tensor:
        return torch.minimum((query * rows).amax(-1) * root, torch.linalg.vector_norm(query * lone, dim=-1))

    key = seen.key_spread if mixing.logits.softcap is None else seen.key  # under a soft-cap slopes do not sum to zero
    value = torch.minimum(root, torch.linalg.vector_norm(seen.lone, dim=-1))
    return (
        ((key * seen.value_spread).amax(-1), of_keys(seen.value_spread, seen.lone_spread), value),
        ((seen.key * seen.value).amax(-1), of_keys(seen.value, seen.lone_value), value),
    )


def _weight_errors(mixing: Mixing, point: EvaluationPoint) -> Tensor:
    """The largest relative error of a weight or slope of every map, ``(maps,)``."""
    eps = mixing.logits.eps
    query, key = (_lengths(t).amax(-1) for t in (mixing.query, mixing.key))
    query_error, key_error, _ = point.errors
    logit = eps * (spread_of_sum(mixing.query.shape[-1]) + 4) * query * key
    logit = logit + query_error * key + query * key_error + query_error * key_error
    if not mixing.logits.terms.hides_only:
        # |bias| ≤ |top| + |s − top| + |q·k|; weights with s further below the top than this are less than eps².
        logit = logit + 3 * eps * (mixing.tops.double().abs().amax((-2, -1)) + 2 * math.log(1 / eps))
    relative = torch.expm1(2 * logit) + 4 * torch.finfo(mixing.query.dtype).eps
    if mixing.logits.softcap is not None:
        relative = relative + logit / mixing.logits.softcap
    return relative * (1 + relative)


def _token_errors(mixing: Mixing, point: EvaluationPoint) -> tuple[Tensor, Tensor]:
    """The effect of the errors of q, k and v before their last rounding on the score path, as a map of dq and dk."""
    assert mixing.moments is not None
    seen, root = mixing.moments, mixing.moments.sink.sqrt()
    query_error, key_error, value_error = point.errors
    through_query = key_error * seen.value_spread.amax(-1) + value_error * seen.key.amax(-1)
    through_key = query_error * seen.value_spread.amax(-1) + 2 * value_error * _lengths(mixing.query).amax(-1)
    return through_query, through_key * root


def _at_most(per_head: Tensor, limit: Tensor) -> Tensor:
    """Numbers of heads, scaled down where they are more than ``limit`` together."""
    parts = per_head.reshape(len(limit), -1)
    together = torch.linalg.vector_norm(parts, dim=1)
    return (parts * (limit / together.clamp_min(torch.finfo(together.dtype).tiny)).clamp_max(1.0)[:, None]).flatten()


def _underflow(mixing: Mixing, in_features: int, norms: Sequence[Tensor]) -> Tensor:
    n, width = mixing.query.shape[1], mixing.query.shape[2] + mixing.value.shape[2]
    query, key, value = (_lengths(t).amax(-1) for t in (mixing.query, mixing.key, mixing.value))
    operations = math.sqrt(n * width) * (n + width + in_features)
    return torch.finfo(mixing.query.dtype).tiny * operations * (1 + value) * (1 + key + query) * (1 + sum(norms))


@dataclass(frozen=True)
class Rounding:
    """The source of bounds on the rounding of products at a point.

    Bounds on the norms of the weights are computed on first use.
    """

    point: EvaluationPoint

    @property
    def attention(self) -> AttentionMap:
        """The map."""
        return self.point.attention

    @property
    def _weights(self) -> list[Tensor]:
        return [weight.to(self.point.dtype) for weight in self.attention.input_weights]

    @cached_property
    def _output(self) -> Tensor:
        return spectral_bound(self.attention.output_weight.to(self.point.dtype).flatten(0, 1))

    @cached_property
    def _output_of_heads(self) -> Tensor:
        return spectral_bound(self.attention.output_weight.to(self.point.dtype))

    @cached_property
    def _inputs(self) -> tuple[Tensor, ...]:
        """N_q, N_k, N_v of every map: the projections and the stages after them, ``(maps,)``."""
        pairs = zip(map(spectral_bound, self._weights), self.point.sizes, strict=True)
        return tuple(per_map(norm, size, self.attention) * size for norm, size in pairs)

    @cached_property
    def _stacked_inputs(self) -> list[Tensor]:
        """Bounds on the maps from x to dq, dk, dv of all heads together, one for each batch item."""
        heads = self.attention.heads
        return [
            math.sqrt(heads // len(weight))  # shared keys and values count once for every head that has them
            * spectral_bound(weight.flatten(0, 1))
            * size.unflatten(0, (-1, heads)).amax(1)
            for weight, size in zip(self._weights, self.point.sizes, strict=True)
        ]

    def path_errors(
        self, mixing: Mixing, by_head: bool, norms: Sequence[Tensor] | None = None, together: bool = False
    ) -> PathErrors:
        """The bounds for every head, its share of the output projection included.

        ``norms`` are N_q, N_k, N_v, when the tangents do not come from x. ``together`` takes the heads of a block as
        one, where that is less, for the price of a few products with its weights.
        """
        attention, point, eps = self.attention, self.point, torch.finfo(self.point.dtype).eps
        width, value_width = mixing.query.shape[2], mixing.value.shape[2]
        heads = 1 if by_head else attention.heads
        products = spread_of_sum(3 * (2 * width + value_width + mixing.chain + 16) // 2)
        forward = attention.in_features + heads * value_width
        ends = spread_of_sum(max(forward, attention.out_features + heads * (2 * width + value_width))) / 4
        norms = self._inputs if norms is None else norms
        apart, whole = _sizes(mixing)
        weights, tokens = _weight_errors(mixing, point), _token_errors(mixing, point)
        query = (weights + eps * ends) * apart[0] + eps * products * whole[0] + tokens[0]
        key = 2 * (weights + eps * ends) * apart[1] + eps * products * whole[1] + tokens[1]
        value = (weights + eps * (ends + products)) * apart[2]
        underflow = _underflow(mixing, attention.in_features, norms)
        out = per_map(self._output_of_heads, underflow, attention) if by_head else self._output
        scores, values = norms[0] * query + norms[1] * key, norms[2] * value
        if together and not by_head and attention.heads > 1:
            stacked = self._stacked_inputs
            largest = [t.unflatten(0, (-1, attention.heads)).amax(1) for t in (query, key, value)]
            scores = _at_most(scores, stacked[0] * largest[0] + stacked[1] * largest[1])
            values = _at_most(values, stacked[2] * largest[2])
        return PathErrors(out * (scores + underflow), out * (values + underflow))


def select_maps(numbers: _N, index: Tensor) -> _N:
    """The `Moments` or `PathErrors` of some maps."""
    return replace(numbers, **{name: tensor[index] for name, tensor in vars(numbers).items()})


def per_map(per_head: Tensor, maps: Tensor, attention: AttentionMap) -> Tensor:
    """A number per head (or per key–value head) as one per map of ``maps``, heads running fastest."""
    return per_head.repeat_interleave(attention.heads // len(per_head)).repeat(len(maps) // attention.heads)


def _lengths(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens.double(), dim=-1)


_AT_ONCE = 2**11
"""Queries whose moments are taken at once."""


@dataclass(frozen=True)
class Moments:
    """Moments of keys and values under the weights P_i of every query i, ``(maps, n)`` in float64.

    Means are taken about a centre: of all tokens, or of those that the query sees (``spread``). Weights that are not
    normalised have a derivative without a centre; there the two are the same. Spreads are never too small: the rounding
    of the difference is added.

    Attributes:
        key, key_spread: (Σ_j P_ij |k_j|²)^½, and the same of k_j − Σ_l P_il k_l.
        value, value_spread: likewise.
        lone_value, lone_spread: (Σ_j P_ij² (|v_j| + |o_i|)²)^½ and (Σ_j P_ij² |v_j − o_i|²)^½ with o_i = Σ_l P_il v_l:
            the length of the row i of a matrix whose rows ``value`` bounds by Cauchy–Schwarz.
        lone: (Σ_j P_ij²)^½.
        sink: max_j Σ_i P_ij, ``(maps,)``.
    """

    key: Tensor
    key_spread: Tensor
    value: Tensor
    value_spread: Tensor
    lone_value: Tensor
    lone_spread: Tensor
    lone: Tensor
    sink: Tensor


class MomentSums:
    """The sums Σ_j P_ij (v_j, |v_j|², 1, k_j, |k_j|²) and Σ_j P_ij² (v_j, |v_j|², 1), gathered tile by tile.

    Tokens are divided by the longest of their map, so that squares neither overflow nor underflow.

    Attributes:
        keys_apart: a bound on the length of the part missing from Σ_j P_ij k_j, ``(maps, n, 1)``: where not all keys
            were summed, but to a vector h, and l is the rest, Σ_j P_ij |k_j − h|² = Σ_j P_ij |k_j|² − |h|² − 2h·l
            bounds the square of the spread, which is least about the mean.
    """

    def __init__(self, key: Tensor, value: Tensor, centred: bool):
        self.centred, self.width = centred, value.shape[-1]
        self.longest_key, self.longest_value = _longest(key), _longest(value)
        values, keys = value / self.longest_value, key / self.longest_key
        squares = [torch.linalg.vector_norm(t, dim=-1, keepdim=True).square() for t in (values, keys)]
        self.summands = torch.cat([values, squares[0], torch.ones_like(squares[0]), keys, squares[1]], dim=-1)
        self.sums = torch.zeros_like(self.summands)
        self.lone = torch.zeros_like(self.summands[..., : self.width + 2])
        self.columns = torch.zeros_like(value[..., 0])
        self.keys_apart = torch.zeros_like(value[..., :1], dtype=torch.float64)

    def add(self, tile: Tile, weights: Tensor) -> None:
        """Take in the weights of one tile."""
        summands = self.summands[tile.keys]
        self.sums[tile.queries].baddbmm_(weights, summands)
        self.columns[tile.keys].add_(weights.sum(-2))
        self.lone[tile.queries].baddbmm_(weights.square(), summands[..., : self.width + 2])

    def output(self) -> Tensor:
        """O_i = Σ_j P_ij v_j, divided by Σ_j P_ij as it came out where that should be one; 0 where nothing is seen."""
        value, total = self.sums[..., : self.width], self.sums[..., self.width + 1, None]
        return value / (total.masked_fill(total == 0, 1.0) if self.centred else 1.0) * self.longest_value

    def moments(self) -> Moments:
        """The moments from the sums; of some queries at a time, because their sums take four times the memory here."""
        n = self.sums.shape[1]
        parts = [self._moments(slice(start, start + _AT_ONCE)) for start in range(0, n, _AT_ONCE)]
        every = [*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)), self.columns.amax(-1).double()]
        return Moments(*every)

    def _moments(self, rows: slice) -> tuple[Tensor, ...]:
        """The moments of some queries, in the order of `Moments`."""
        split = [self.width, 1, 1, self.summands.shape[-1] - self.width - 3, 1]
        value, value_square, total, key, key_square = self.sums[:, rows].double().split(split, dim=-1)
        lone, lone_square, lone_total = self.lone[:, rows].double().split(split[:3], dim=-1)
        rounding = 4 * self.sums.shape[1] ** 0.5 * torch.finfo(self.sums.dtype).eps
        total = total.masked_fill(total == 0, 1.0)

        def about(square: Tensor, centre: Tensor) -> Tensor:
            apart = torch.minimum((square - centre).clamp_min(0.0) + rounding * square, square)
            return apart if self.centred else square

        def root(square: Tensor, longest: Tensor | float = 1.0) -> Tensor:
            return (square.sqrt() * longest).squeeze(-1)

        centre = value / total if self.centred else torch.zeros_like(value)
        far = centre.square().sum(-1, keepdim=True) * lone_total
        both = (lone_square.sqrt() + far.sqrt()).square()
        between = lone_square - 2 * (centre * lone).sum(-1, keepdim=True) + far
        along = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
        longest_key, longest_value = self.longest_key.double(), self.longest_value.double()
        return (
            root(key_square, longest_key),
            root(about(key_square, along * (along - 2 * self.keys_apart[:, rows]) / total), longest_key),
            root(value_square, longest_value),
            root(about(value_square, value.square().sum(-1, keepdim=True) / total), longest_value),
            root(both, longest_value),
            root(torch.minimum(between.clamp_min(0.0) + rounding * both, both), longest_value),
            root(lone_total),
        )


class OutputSums:
    """The sums Σ_j P_ij (v_j, 1) alone, for an operator that needs no moments."""

    def __init__(self, value: Tensor, centred: bool):
        self.centred = centred
        self.summands = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        self.sums = torch.zeros_like(self.summands)

    def add(self, tile: Tile, weights: Tensor) -> None:
        """Take in the weights of one tile."""
        self.sums[tile.queries].baddbmm_(weights, self.summands[tile.keys])

    def output(self) -> Tensor:
        """As `MomentSums.output`."""
        value, total = self.sums[..., :-1], self.sums[..., -1:]
        return value / total.masked_fill(total == 0, 1.0) if self.centred else value.contiguous()

    def moments(self) -> None:
        """There are none."""
        return


def _longest(tokens: Tensor) -> Tensor:
    """The longest token of every map, ``(maps, 1, 1)``; 1 when all are zero."""
    largest = tokens.abs().amax((-2, -1), keepdim=True)
    scaled = tokens / largest.masked_fill(largest == 0, 1.0)
    longest = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).amax(-2, keepdim=True) * largest
    return longest.masked_fill(longest == 0, 1.0)
