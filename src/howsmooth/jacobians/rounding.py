r"""How far rounding can move an attention Jacobian: `JacobianOperator.noise`.

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
- *tokens*: q, k, v rounded to the dtype (part of *products*) and their errors before that (`Point.errors`);
- *underflow*: every operation may lose the smallest normal number.

All of it times a bound on ‖W_o‖. For a block of heads the errors are stacked before W_o, hence add in squares.

.. [1] N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002, chapter 3.
.. [2] N. J. Higham, T. Mary, *A new approach to probabilistic rounding error analysis*, SIAM J. Sci. Comput. 41 (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth.attention.base import AttentionMap

if TYPE_CHECKING:
    from howsmooth.jacobians.mixing import Mixing
    from howsmooth.jacobians.point import Point


@dataclass(frozen=True)
class Noise:
    """Bounds on the error of the score path and of the value path, for each map of `Mixing`, ``(maps,)``."""

    score: Tensor
    value: Tensor

    @classmethod
    def of(
        cls, attention: AttentionMap, point: Point, mixing: Mixing, by_head: bool, norms: Sequence[Tensor] | None = None
    ) -> Noise:
        """The bounds for every head, its share of the output projection included.

        ``norms`` are N_q, N_k, N_v, when the tangents do not come from x.
        """
        dtype = mixing.query.dtype
        width, value_width = mixing.query.shape[2], mixing.value.shape[2]
        heads = 1 if by_head else attention.heads
        products = spread_of_sum(3 * (2 * width + value_width + mixing.chain + 16) // 2)
        forward = attention.in_features + heads * value_width
        ends = spread_of_sum(max(forward, attention.out_features + heads * (2 * width + value_width))) / 4
        eps = torch.finfo(dtype).eps
        norms = input_norms(attention, point, dtype) if norms is None else norms
        apart, whole = _sizes(mixing)
        weights = _weight_errors(mixing, point)
        score = (weights + eps * ends) * (norms[0] * apart[0] + 2 * norms[1] * apart[1])
        score = score + eps * products * (norms[0] * whole[0] + norms[1] * whole[1])
        score = score + _token_errors(mixing, point, norms)
        value = (weights + eps * (ends + products)) * norms[2] * apart[2]
        lost = _underflow(mixing, attention.in_features, norms)
        output = attention.output_weight.to(dtype)
        out = per_map(schatten_8(output), score, attention) if by_head else schatten_8(output.flatten(0, 1))
        return cls(out * (score + lost), out * (value + lost))

    def select(self, index: Tensor) -> Noise:
        """The bounds of some maps."""
        return Noise(self.score[index], self.value[index])

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


def _weight_errors(mixing: Mixing, point: Point) -> Tensor:
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


def _token_errors(mixing: Mixing, point: Point, norms: Sequence[Tensor]) -> Tensor:
    """What the errors of q, k and v before their last rounding do to the score path."""
    assert mixing.moments is not None
    seen, root = mixing.moments, mixing.moments.sink.sqrt()
    query_error, key_error, value_error = point.errors
    through_query = key_error * seen.value_spread.amax(-1) + value_error * seen.key.amax(-1)
    through_key = query_error * seen.value_spread.amax(-1) + 2 * value_error * _lengths(mixing.query).amax(-1)
    return norms[0] * through_query + norms[1] * through_key * root


def _underflow(mixing: Mixing, in_features: int, norms: Sequence[Tensor]) -> Tensor:
    n, width = mixing.query.shape[1], mixing.query.shape[2] + mixing.value.shape[2]
    query, key, value = (_lengths(t).amax(-1) for t in (mixing.query, mixing.key, mixing.value))
    operations = math.sqrt(n * width) * (n + width + in_features)
    return torch.finfo(mixing.query.dtype).tiny * operations * (1 + value) * (1 + key + query) * (1 + sum(norms))


def input_norms(attention: AttentionMap, point: Point, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """N_q, N_k, N_v of every map: the projections and the stages after them, ``(maps,)``."""
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    pairs = zip(weights, point.sizes, strict=True)
    return tuple(per_map(schatten_8(weight.to(dtype)), size, attention) * size for weight, size in pairs)


def spread_of_sum(terms: int) -> float:
    """Rounding of a sum of this many products, √terms·u, in units of eps = 2u."""
    return math.sqrt(terms) / 2


def per_map(per_head: Tensor, maps: Tensor, attention: AttentionMap) -> Tensor:
    """A number per head (or per key–value head) as one per map of ``maps``, heads running fastest."""
    return per_head.repeat_interleave(attention.heads // len(per_head)).repeat(len(maps) // attention.heads)


def schatten_8(weight: Tensor) -> Tensor:
    """The Schatten 8-norm (Σ σ⁸)^⅛ = ‖(WWᵀ)²‖_F^¼, in float64: two products, and above ‖W‖₂ by at most rank^⅛."""
    scale = weight.abs().amax((-2, -1), keepdim=True)
    scale = scale.masked_fill(scale == 0, 1.0)
    scaled = weight / scale
    gram = scaled @ scaled.mT if weight.shape[-2] <= weight.shape[-1] else scaled.mT @ scaled
    return torch.linalg.matrix_norm((gram @ gram).double()).pow(0.25) * scale[..., 0, 0].double()


def _lengths(tokens: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tokens.double(), dim=-1)
