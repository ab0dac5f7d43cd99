"""Every step of the perturbation of a row beside its true effect on weights, means and covariances."""

from __future__ import annotations

import pytest

from evidence.ball_terms import PERTURBATION, QUICK, closest
from evidence.juries import ROUNDING
from evidence.moved_heads import Search

SHARES = {
    "query shift": 0.98,
    "keys' shift": 0.98,
    "log E e^β": 0.97,
    "high, query shift": 0.98,
    "low, query shift": 0.98,
    "mean, query shift": 0.98,
    "step 0: factor, drift known": 0.98,
    "step 0: mixture": 0.98,
    "step 0: factor": 0.98,
    "step 0: loads": 0.98,
    "step 1: mixture": 0.98,
    "step 1: factor": 0.97,
    "step 1: loads": 0.97,
    "step 2: mixture": 0.98,
    "step 2: factor": 0.97,
    "step 2: loads": 0.97,
    "step 3: mixture": 0.98,
    "step 3: factor": 0.97,
    "step 3: loads": 0.97,
}
"""How close the truth comes to each term, at least: a term that falls below this share of itself is caught."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PERTURBATION)
def test_no_moved_input_passes_a_term_and_the_closest_comes_near_it(name: str) -> None:
    assert SHARES[name] <= closest(PERTURBATION[name]) <= 1 + ROUNDING


def test_terms_hold_where_tokens_are_far_apart_or_equal() -> None:
    assert all(closest(term, QUICK, Search(4, 3)) <= 1 + ROUNDING for term in PERTURBATION.values())
