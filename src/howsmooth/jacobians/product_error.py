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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.numerics.roundoff import spread_of_sum
from howsmooth.numerics.spectral_norms import spectral_bound

if TYPE_CHECKING:
    from howsmooth.jacobians.evaluation_point import EvaluationPoint
    from howsmooth.jacobians.softmax_products import Mixing


@dataclass(frozen=True)
class PathErrors:
    """Bounds on the error of the score path and of the value path, for each map of `Mixing`, ``(maps,)``."""

    score: Tensor
    value: Tensor

    @classmethod
    def of(
        cls,
        attention: AttentionMap,
        point: EvaluationPoint,
        mixing: Mixing,
        by_head: bool,
        norms: Sequence[Tensor] | None = None,
        known: WeightNorms | None = None,
        together: bool = False,
    ) -> PathErrors:
        """The bounds for every head, its share of the output projection included.

        ``norms`` are N_q, N_k, N_v, when the tangents do not come from x; ``known`` those of the weights, if at hand.
        ``together`` takes the heads of a block as one, where that is less, for the price of a few products
        with its weights.
        """
        dtype = mixing.query.dtype
        width, value_width = mixing.query.shape[2], mixing.value.shape[2]
        heads = 1 if by_head else attention.heads
        products = spread_of_sum(3 * (2 * width + value_width + mixing.chain + 16) // 2)
        forward = attention.in_features + heads * value_width
        ends = spread_of_sum(max(forward, attention.out_features + heads * (2 * width + value_width))) / 4
        eps = torch.finfo(dtype).eps
        known = WeightNorms(attention, dtype) if known is None else known
        norms = known.of_inputs(point) if norms is None else norms
        apart, whole = _sizes(mixing)
        weights, tokens = _weight_errors(mixing, point), _token_errors(mixing, point)
        query = (weights + eps * ends) * apart[0] + eps * products * whole[0] + tokens[0]
        key = 2 * (weights + eps * ends) * apart[1] + eps * products * whole[1] + tokens[1]
        value = (weights + eps * (ends + products)) * apart[2]
        underflow = _underflow(mixing, attention.in_features, norms)
        out = per_map(known.output_of_heads, underflow, attention) if by_head else known.output
        scores, values = norms[0] * query + norms[1] * key, norms[2] * value
        if together and not by_head and attention.heads > 1:
            stacked = known.of_stacked_inputs(point)
            largest = [t.unflatten(0, (-1, attention.heads)).amax(1) for t in (query, key, value)]
            scores = _at_most(scores, stacked[0] * largest[0] + stacked[1] * largest[1])
            values = _at_most(values, stacked[2] * largest[2])
        return cls(out * (scores + underflow), out * (values + underflow))

    def select(self, index: Tensor) -> PathErrors:
        """The bounds of some maps."""
        return PathErrors(self.score[index], self.value[index])

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
class WeightNorms:
    """Bounds on the norms of the weights of an attention map, each computed on first use."""

    attention: AttentionMap
    dtype: torch.dtype

    @property
    def _inputs(self) -> list[Tensor]:
        weights = (self.attention.query_weight, self.attention.key_weight, self.attention.value_weight)
        return [weight.to(self.dtype) for weight in weights]

    @cached_property
    def output(self) -> Tensor:
        return spectral_bound(self.attention.output_weight.to(self.dtype).flatten(0, 1))

    @cached_property
    def output_of_heads(self) -> Tensor:
        return spectral_bound(self.attention.output_weight.to(self.dtype))

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [spectral_bound(weight) for weight in self._inputs]

    @cached_property
    def stacked_inputs(self) -> list[Tensor]:
        return [spectral_bound(weight.flatten(0, 1)) for weight in self._inputs]

    def of_inputs(self, point: EvaluationPoint) -> tuple[Tensor, ...]:
        """N_q, N_k, N_v of every map: the projections and the stages after them, ``(maps,)``."""
        pairs = zip(self.inputs, point.sizes, strict=True)
        return tuple(per_map(norm, size, self.attention) * size for norm, size in pairs)

    def of_stacked_inputs(self, point: EvaluationPoint) -> list[Tensor]:
        """Bounds on the maps from x to dq, dk, dv of all heads together, one for each batch item."""
        heads = self.attention.heads
        return [
            math.sqrt(heads // len(weight))  # shared keys and values count once for every head that has them
            * norm
            * size.unflatten(0, (-1, heads)).amax(1)
            for weight, norm, size in zip(self._inputs, self.stacked_inputs, point.sizes, strict=True)
        ]


def per_map(per_head: Tensor, maps: Tensor, attention: AttentionMap) -> Tensor:
    """A number per head (or per key–value head) as one per map of ``maps``, heads running fastest."""
    return per_head.repeat_interleave(attention.heads // len(per_head)).repeat(len(maps) // attention.heads)


def _lengths(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens.double(), dim=-1)
