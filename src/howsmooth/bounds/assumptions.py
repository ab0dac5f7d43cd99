"""The assumptions theorems make about attention, as code."""

from __future__ import annotations

import math

from howsmooth.attention import Rotary
from howsmooth.attention.stages import Scale
from howsmooth.bounds.catalogue import Assumption
from howsmooth.bounds.settings import Setting
from howsmooth.bounds.visibility import hides, is_causal, sees_itself


def _linear_queries_and_keys(where: Setting) -> bool:
    stages = [*where.map.query_stages, *where.map.key_stages, *where.map.value_stages]
    return all(isinstance(stage, Scale | Rotary) for stage in stages)


def _no_query_bias(where: Setting) -> bool:
    bias = where.map.query_bias
    return bias is None or not bool(bias.any())


def _no_rotary(where: Setting) -> bool:
    return not any(isinstance(stage, Rotary) for stage in where.map.query_stages)


UNMASKED = Assumption("no token is hidden by a mask", lambda where: not hides(where.map))
CAUSAL = Assumption("the mask is causal, with nothing added to the logits", lambda where: is_causal(where.map))
UNMASKED_OR_CAUSAL = Assumption(
    "tokens see either all others or the past, with nothing added to the logits",
    lambda where: is_causal(where.map) or not list(where.map.logit_terms()),
)
NO_PLACES = Assumption(
    "logits depend on the tokens alone, not on their places (no mask, no position bias, no rotary positions)",
    lambda where: not list(where.map.logit_terms()) and _no_rotary(where),
)
NO_ROTARY = Assumption("queries and keys are not turned by rotary positions", _no_rotary)
NO_QUERY_BIAS = Assumption("queries have no bias", _no_query_bias)
NO_SOFTCAP = Assumption("logits are not soft-capped", lambda where: where.map.softcap is None)
LINEAR = Assumption(
    "queries, keys and values are linear in the tokens (no q/k normalisation)", _linear_queries_and_keys
)
LINEAR_VALUES = Assumption(
    "values are linear in the tokens", lambda where: all(isinstance(stage, Scale) for stage in where.map.value_stages)
)
SEES_ITSELF = Assumption(
    "every token sees itself",
    lambda where: where.n is None or math.isinf(where.n) or sees_itself(where.map, int(where.n)),
)
AT_LEAST_TWO = Assumption("there are at least two tokens", lambda where: where.n is None or where.n >= 2)
AT_LEAST_THREE = Assumption("there are at least three tokens", lambda where: where.n is None or where.n >= 3)
FINITE = Assumption("n is finite", lambda where: where.n is not None and math.isfinite(where.n))
BALL = Assumption(
    "tokens fill a ball around the origin", lambda where: where.tokens is not None and where.tokens.is_ball
)
