"""Every term of the proof for a head on a ball beside the true change of its own part."""

from __future__ import annotations

import pytest

from evidence.ball_terms import HEAD, QUICK, closest
from evidence.juries import ROUNDING
from evidence.moved_heads import Search

SHARES = {
    "high": 0.98,
    "low": 0.98,
    "change of weights": 0.98,
    "largest P(1 − P)": 0.98,
    "change of P(1 − P)": 0.98,
    "drift": 0.97,
    "key drift": 0.97,
    "still spread": 0.98,
    "still lean": 0.98,
    "spread": 0.97,
    "lean": 0.97,
    "query blocks": 0.97,
    "value blocks": 0.98,
    "key blocks": 0.97,
    "key blocks, moved queries": 0.97,
    "mean of all others": 0.97,
    "directed change": 0.97,
    "path of the keys": 0.97,
    "path of the keys but the first": 0.89,
    "path of the keys, values still": 0.41,
    "path of the keys but the first, values still": 0.94,
    "move of the means": 0.96,
    "values and keys": 0.97,
    "values and keys but the first": 0.95,
    "path of the keys on the ball": 0.97,
    "change": 0.97,
    "rows": 0.97,
}
"""How close the truth comes to each term, at least: a term that falls below this share of itself is caught."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAD)
def test_no_moved_input_passes_a_term_and_the_closest_comes_near_it(name: str) -> None:
    assert SHARES[name] <= closest(HEAD[name]) <= 1 + ROUNDING


def test_terms_hold_where_tokens_are_far_apart_or_equal() -> None:
    assert all(closest(term, QUICK, Search(4, 3)) <= 1 + ROUNDING for term in HEAD.values())
