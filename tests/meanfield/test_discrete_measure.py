"""Measures: what they hold, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from howsmooth import InvalidInput
from howsmooth.meanfield import Measure

TWO = torch.tensor([[3.0, 4.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("atoms", "weights", "positions", "message"),
    [
        (TWO, [0.5, 0.4], None, "sum to 0.9"),
        (TWO, [0.5, 0.5 + 2e-9], None, "must sum to one"),
        (TWO, [1.5, -0.5], None, "no negative weights, but one of these is -0.5"),
        (TWO, [math.nan, 1.0], None, "weights of a measure holds 1 NaN"),
        (TWO, [math.inf, 1.0], None, "weights of a measure holds 1 NaN or infinite"),
        (TWO, [1.0], None, "one weight for each of its 2 atoms"),
        (TWO, [[0.5, 0.5]], None, "weights must be a torch.Tensor or a sequence"),
        (TWO[0], [0.5, 0.5], None, r"atoms of shape \(m, d\)"),
        (torch.zeros(0, 2), [], None, "at least one"),
        (torch.tensor([[math.nan], [0.0]]), [0.5, 0.5], None, "atoms holds 1 NaN"),
        (TWO, [0.5, 0.5], [0.5], "one position for each of its 2 atoms"),
        (TWO, [0.5, 0.5], [0.5, 2.0], r"lie in \[0, 1\]"),
        (TWO, [0.5, 0.5], [0.5, math.nan], "positions of a measure holds 1 NaN"),
    ],
)
def test_bad_measures_are_refused_in_one_sentence(
    atoms: torch.Tensor, weights: list[float], positions: list[float] | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Measure(atoms, weights, positions)
    assert "\n" not in str(caught.value)


def test_weights_that_nearly_sum_to_one_are_kept_as_given() -> None:
    assert Measure(TWO, [0.5, 0.5 + 5e-10]).weights.tolist() == [0.5, 0.5 + 5e-10]


def test_atoms_without_mass_are_dropped_with_their_positions() -> None:
    measure = Measure(TWO, [0.0, 1.0], [0.25, 0.5])
    assert measure.atoms.tolist() == [[1.0, 0.0]]
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.5]


def test_everything_is_float64() -> None:
    measure = Measure(TWO.int(), torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
    assert measure.positions is not None
    assert {part.dtype for part in (measure.atoms, measure.weights, measure.positions)} == {torch.float64}


def test_tokens_stand_at_i_over_n() -> None:
    measure = Measure.of_tokens(torch.zeros(4, 1))
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert Measure.empirical(torch.zeros(4, 1)).positions is None
    with pytest.raises(InvalidInput, match="at least one"):
        Measure.of_tokens(torch.zeros(0, 1))


def test_support_radius_is_the_largest_norm() -> None:
    assert Measure(TWO, [1e-9, 1 - 1e-9]).support_radius == 5.0


def test_expansion_repeats_atoms_and_positions() -> None:
    measure = Measure(TWO, [1 / 3, 2 / 3], [0.5, 1.0]).expand(6)
    assert measure.atoms[:, 0].tolist() == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(InvalidInput, match="not multiples of 1/5"):
        Measure(TWO, [1 / 3, 2 / 3]).expand(5)


def test_splitting_keeps_mass_and_mean() -> None:
    measure = Measure(TWO, [0.25, 0.75], [0.5, 1.0])
    halves = measure.split(1, torch.tensor([0.0, 2.0]))
    assert halves.atoms.tolist() == [[3.0, 4.0], [1.0, 2.0], [1.0, -2.0]]
    assert halves.weights.tolist() == [0.25, 0.375, 0.375]
    assert halves.positions is not None
    assert halves.positions.tolist() == [0.5, 1.0, 1.0]
    assert measure.weights.tolist() == [0.25, 0.75]


def test_moving_needs_a_displacement_for_each_atom() -> None:
    assert Measure(TWO, [0.5, 0.5]).moved(torch.ones(2, 2)).atoms.tolist() == [[4.0, 5.0], [2.0, 1.0]]
    with pytest.raises(InvalidInput, match="cannot move"):
        Measure(TWO, [0.5, 0.5]).moved(torch.ones(2))
