"""Every part of the proof for heads together beside its own true change."""

from __future__ import annotations

import pytest

from evidence.ball_terms import BLOCK, QUICK, closest
from evidence.juries import ROUNDING
from evidence.moved_heads import Search

SHARES = {
    "queries": 0.97,
    "values and keys": 0.97,
    "values and keys but the first": 0.95,
    "moved queries": 0.97,
    "one token": 0.97,
    "change": 0.97,
}
"""How close the truth comes to each term, at least: a term that falls below this share of itself is caught."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCK)
def test_no_moved_input_passes_a_term_and_the_closest_comes_near_it(name: str) -> None:
    assert SHARES[name] <= closest(BLOCK[name]) <= 1 + ROUNDING


def test_terms_hold_where_tokens_are_far_apart_or_equal() -> None:
    assert all(closest(term, QUICK, Search(4, 3)) <= 1 + ROUNDING for term in BLOCK.values())
