"""Every term of the proof for heads that are not linear beside what moved inputs do to it."""

from __future__ import annotations

import pytest

from evidence.curved_terms import BALLS
from evidence.juries import ROUNDING

NEAR = {
    ("rms 1 by 0.05", "change of the derivative of the query"): 0.88,
    ("distances 0 by 0.001", "change of the derivative of the key"): 0.98,
    ("cosine 0 by 0.001", "change of the derivative of the value"): 0.95,
    ("soft-cap, tokens far apart, keys", "slopes"): 0.98,
    ("soft-cap, tokens far apart, keys", "spread of the values"): 0.98,
    ("soft-cap, tokens far apart, keys", "bound"): 0.98,
    ("plain, tokens far apart, keys", "bound"): 0.98,
    ("sigmoid 0 by 0.001", "spread of the keys"): 0.98,
    ("norms 0 by 0.001", "moves of logits"): 0.9,
    ("queries that turn away", "change of the derivative of the query"): 0.95,
    ("keys that turn away", "bound"): 0.3,
}
"""How close the truth comes to a term, at least: one that falls below this share of itself is caught."""


def closest(label: str, name: str) -> float:
    """The largest truth ÷ bound of a term, once no truth passes any."""
    shares = BALLS[label].example(label).shares()
    assert max(shares.values()) <= 1 + ROUNDING, label
    return shares[name]


def test_second_derivatives_of_norms_and_slopes_of_caps_are_needed() -> None:
    for label, name in (
        ("rms 1 by 0.05", "change of the derivative of the query"),
        ("soft-cap, tokens far apart, keys", "bound"),
    ):
        assert NEAR[label, name] <= closest(label, name)


@pytest.mark.parametrize(("label", "name"), NEAR)
def test_no_moved_input_passes_a_term_and_the_closest_comes_near_it(label: str, name: str) -> None:
    assert NEAR[label, name] <= closest(label, name)


@pytest.mark.parametrize("label", [label for label in BALLS if label not in {label for label, _ in NEAR}])
def test_no_moved_input_passes_any_other_term(label: str) -> None:
    assert closest(label, "bound") <= 1 + ROUNDING
