"""Every remainder of a network, and its margins, beside what moved inputs leave."""

from __future__ import annotations

import pytest

from evidence.juries import ROUNDING
from evidence.network_terms import HEADS, MOVED, NETWORKS, PRODUCTS, SINGLE

NEAR = {
    "division, tight across": 0.97,
    "division, tight along": 0.99,
    "division through zero": 0.49,
    "relu at 0.5 by 0.6": 0.98,
    "gelu at 0 by 0.01": 0.98,
    "gelu at 2.5 by 0.01": 0.96,
    "silu at 0 by 0.01": 0.98,
    "silu at 2.5 by 0.01": 0.92,
    "gelu_tanh at 0 by 0.01": 0.98,
    "tanh at 2.5 by 0.01": 0.98,
    "sigmoid at 2.5 by 0.01": 0.98,
    "activations of two numbers": 0.98,
    "a kink behind a kink": 0.98,
    "a margin that rises": 0.98,
    "corner of a cube": 0.98,
    "edge of a cross": 0.98,
    "a square": 0.98,
    "a product of two numbers": 0.49,
    "a cube": 0.98,
    "a product that falls": 0.98,
    "products of a cube": 0.98,
    "a gate at its kink": 0.98,
    "gate by silu": 0.98,
    "gate by tanh": 0.79,
    "gate by sigmoid": 0.83,
    "a gated MLP behind a division": 0.9,
    "attention that is gated": 0.72,
    "side by side": 0.98,
    "kinks side by side": 0.98,
    "numbers repeated and scaled": 0.98,
    "numbers repeated behind a kink": 0.98,
    "tokens mixed": 0.98,
    "tokens mixed behind a kink": 0.98,
    "a spatial gate": 0.98,
    "equal tokens": 0.98,
    "equal tokens with moving queries": 0.98,
    "rare weight that grows while its value moves": 0.91,
    "large weight that falls while its value moves": 0.94,
    "rare far tokens in two directions": 0.93,
    "a query behind a kink": 0.98,
    "biases": 0.78,
}
"""How close the truth comes to some term, at least: a term that falls below this share of itself is caught."""
BALLS = {**SINGLE, **PRODUCTS, **MOVED, **HEADS, **NETWORKS}


ALONE = [label for label in NEAR if label in SINGLE]


def closest(label: str) -> float:
    """The largest truth ÷ bound of a remainder or margin, once no truth passes anything."""
    shares = BALLS[label].example(label).shares()
    assert max(shares.values()) <= 1 + ROUNDING, label
    return max(share for name, share in shares.items() if name.startswith(("remainder", "margin")))


def test_parts_by_themselves_come_near_their_bounds() -> None:
    """Divisions, activations and margins: half of a bound would be passed."""
    assert all(NEAR[label] <= closest(label) for label in ALONE)


@pytest.mark.parametrize("label", [label for label in NEAR if label not in ALONE])
def test_no_moved_input_passes_a_term_and_the_closest_comes_near_it(label: str) -> None:
    assert NEAR[label] <= closest(label)


@pytest.mark.parametrize("label", [label for label in BALLS if label not in NEAR])
def test_no_moved_input_passes_any_other_term(label: str) -> None:
    assert closest(label) <= 1 + ROUNDING


@pytest.mark.parametrize(
    ("label", "term", "near"),
    [
        ("a cube", "remainder 1, downwards", 0.98),
        ("a gate at its kink", "remainder 1, upwards", 0.98),
        ("gate by gelu", "remainder 1, upwards", 0.83),
        ("a gated MLP behind a division", "remainder 2, upwards", 0.83),
        ("a gated MLP behind a division", "margin lost, 2-norm", 0.78),
        ("attention that is gated", "remainder 1, upwards", 0.72),
        ("numbers repeated behind a kink", "remainder 1, upwards", 0.98),
        ("tokens mixed behind a kink", "margin lost, 2-norm", 0.62),
        ("products of a cube", "margin lost, inf-norm", 0.98),
    ],
)
def test_what_follows_an_other_remainder_comes_near_its_bound_too(label: str, term: str, near: float) -> None:
    """Products behind gates, and kinks behind numbers that were moved about, by themselves."""
    assert near <= BALLS[label].example(label).shares()[term] <= 1 + ROUNDING


def test_a_corner_of_a_cube_is_farther_than_its_radius() -> None:
    """Remainders of a ball in the ∞-norm are those of the Euclidean one around it."""
    shares = SINGLE["corner of a cube"].example("").shares()
    assert 0.8 < shares["margin lost, inf-norm"] <= 1
