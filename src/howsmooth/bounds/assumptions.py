"""The assumptions theorems make about attention, as code."""

from __future__ import annotations

import math

from torch import Tensor

from howsmooth.attention import Rotary
from howsmooth.bounds.catalogue import Assumption
from howsmooth.bounds.point_error import known_rounding
from howsmooth.bounds.question_setting import Setting


def _linear_queries_and_keys(where: Setting) -> bool:
    stages = [*where.map.query_stages, *where.map.key_stages, *where.map.value_stages]
    return all(stage.linear for stage in stages)


def no_bias(*biases: Tensor | None) -> bool:
    """Whether none of the biases adds anything."""
    return not any(bias is not None and bool(bias.any()) for bias in biases)


def _no_rotary(where: Setting) -> bool:
    return not any(isinstance(stage, Rotary) for stage in where.map.query_stages)


CAUSAL = Assumption("the mask is causal, with nothing added to the logits", lambda where: where.map.terms.is_causal)
UNMASKED_OR_CAUSAL = Assumption(
    "tokens see either all others or the past, with nothing added to the logits",
    lambda where: where.map.terms.is_causal or where.map.terms.is_nothing,
)
NO_PLACES = Assumption(
    "logits depend on the tokens alone, not on their places (no mask, no position bias, no rotary positions)",
    lambda where: where.map.terms.is_nothing and _no_rotary(where),
)
NO_ROTARY = Assumption("queries and keys are not turned by rotary positions", _no_rotary)
NO_QUERY_BIAS = Assumption("queries have no bias", lambda where: no_bias(where.map.query_bias))
NO_SOFTCAP = Assumption("logits are not soft-capped", lambda where: where.map.softcap is None)
LINEAR = Assumption(
    "queries, keys and values are linear in the tokens (no q/k normalisation)", _linear_queries_and_keys
)
PLAIN = (LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP)
"""Logits x_jᵀAx_i and whatever a mask adds: what papers mean by attention."""
LINEAR_VALUES = Assumption(
    "values are linear in the tokens", lambda where: all(stage.scale is not None for stage in where.map.value_stages)
)
KNOWN_ROUNDING = Assumption(
    "what rounding does in every stage of queries, keys and values is known", lambda where: known_rounding(where.map)
)
SEES_ITSELF = Assumption(
    "every token sees itself",
    lambda where: where.n is None or math.isinf(where.n) or where.map.terms.sees_itself(int(where.n), where.map.heads),
)
AT_LEAST_TWO = Assumption("there are at least two tokens", lambda where: where.n is None or where.n >= 2)
FINITE = Assumption("n is finite", lambda where: where.n is not None and math.isfinite(where.n))
BALL = Assumption(
    "tokens fill a ball around the origin", lambda where: where.tokens is not None and where.tokens.is_ball
)
