"""The point of a Jacobian: queries, keys and values of every head, prepared in double precision.

Projection, stages and centring happen once per input and cost little beside the products, so they are done in float64
and rounded at the end: an inner product of length d then brings one rounding of the result instead of d of its terms.
Keys and values are given about a centre wherever the derivative does not depend on it (softmax sees no constant on all
keys and its derivative none on all values): tokens at 10⁶ ± 1 keep all the digits of the ± 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.stages import Chain
from howsmooth.jacobians.product_error import per_map
from howsmooth.numerics.roundoff import spread_of_sum


@dataclass(frozen=True)
class EvaluationPoint:
    """Queries, keys and values after their stages, ``(maps, n, width)``.

    Attributes:
        chains: the derivatives of the stages of queries, keys and values.
        errors: for queries, keys and values, a bound on the error of a token of each map before its last rounding to
            the dtype, ``(maps,)``.
        sizes: for queries, keys and values, the largest norm of the derivative of the stages, ``(maps,)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    chains: tuple[Chain, ...]
    errors: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]

    @classmethod
    def at(cls, attention: AttentionMap, x: Tensor, dtype: torch.dtype, errors: bool = True) -> EvaluationPoint:
        """The point of ``x``, ``(batch, n, d)``, for products in ``dtype``; without ``errors`` they are not bounded."""
        wide = dtype if x.device.type == "mps" else torch.float64
        moved = torch.cat([x, x[:, :1]], dim=-2).to(wide)  # one array for the tokens, and their centre behind them
        tokens, last = moved[:, :-1], moved[:, -1:]
        last.copy_(tokens.mean(-2, keepdim=True))
        tokens.sub_(last)
        raw = [projected.flatten(0, 1) for projected in attention.project_about(moved)]
        through = [Chain.through(stages, t) for stages, t in zip(attention.stages(*raw[:2]), raw, strict=True)]
        staged = [t for t, _ in through]
        sizes = [_largest_size(chain, t) for t, chain in through] if errors else []
        bounds = _errors(attention, tokens, last, raw, staged, sizes) if errors else ()
        query, key, value = staged
        if attention.weighting == "softmax":
            value = value - value.mean(-2, keepdim=True)
            key = key if attention.softcap is not None else key - key.mean(-2, keepdim=True)
        chains = tuple(chain.to(dtype) for _, chain in through)
        return cls(query, key, value, chains, bounds, tuple(sizes))


def _errors(
    attention: AttentionMap, moved: Tensor, centre: Tensor, raw: list[Tensor], staged: list[Tensor], sizes: list[Tensor]
) -> tuple[Tensor, ...]:
    """Bounds on the errors of the staged tokens: of the projections, through the stages, and of the stages."""
    eps = torch.finfo(moved.dtype).eps
    reach, offset = (_longest(t).repeat_interleave(attention.heads) for t in (moved, centre))
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    biases = (attention.query_bias, attention.key_bias, attention.value_bias)
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


def _largest_size(chain: Chain, tokens: Tensor) -> Tensor:
    size = torch.as_tensor(chain.size(), dtype=torch.float64, device=tokens.device)
    return size.expand(*tokens.shape[:2], 1).amax((-2, -1))
