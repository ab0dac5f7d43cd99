"""Parabolas and lines lie on the right side of ReLU, and barely so."""

from __future__ import annotations

import pytest
import torch

from howsmooth.certificates.classifier.relu_relaxation import HiddenBounds, HiddenMoments, ReluRelaxation


def hidden(lower: float, upper: float, rest: float = 0.0) -> HiddenBounds:
    """One hidden value z = z⁰ + δ + R over |δ| ≤ r, with z in [lower, upper]."""

    def one(x: float) -> torch.Tensor:
        return torch.tensor([x], dtype=torch.float64)

    start, reach = (lower + upper) / 2, (upper - lower) / 2 - rest
    return HiddenBounds(one(start), one(1.0)[None], one(lower), one(upper), one(rest), one(reach))


def relaxed_value(
    weight: float, box: HiddenBounds, line: float, size: float | None, move: torch.Tensor, rest: torch.Tensor
) -> torch.Tensor:
    found = ReluRelaxation.of(
        torch.tensor([weight], dtype=torch.float64),
        box,
        torch.tensor([line], dtype=torch.float64),
        None if size is None else HiddenMoments(box.start, torch.full_like(box.start, size**2)),
    )
    z = box.start + move + rest
    return found.constant + found.coefficients * z + found.slopes * move + found.squares * move.square()


@pytest.mark.parametrize("weight", [-2.0, 3.0])
@pytest.mark.parametrize("size", [None, 0.0, 0.3, 0.8, 5.0])
@pytest.mark.parametrize(("lower", "upper"), [(-1.0, 1.0), (-0.1, 2.0), (-3.0, 0.2), (0.5, 1.0), (-2.0, -1.0)])
@pytest.mark.parametrize("rest", [0.0, 0.04])
def test_relaxation_is_never_above_the_network(
    weight: float, size: float | None, lower: float, upper: float, rest: float
) -> None:
    box = hidden(lower, upper, rest)
    moves = torch.linspace(-float(box.reach), float(box.reach), 201, dtype=torch.float64)
    for left in torch.linspace(-rest, rest, 3, dtype=torch.float64):
        for line in (0.0, 0.3, 1.0):
            found = relaxed_value(weight, box, line, size, moves, left)
            assert bool((found <= weight * torch.relu(box.start + moves + left) + 1e-12).all())


def test_the_parabola_leaves_less_than_half_the_gap_of_the_chord() -> None:
    box, nothing = hidden(-1.0, 1.0), torch.zeros(1, dtype=torch.float64)
    assert float(relaxed_value(-1.0, box, 0.0, None, nothing, nothing)) == pytest.approx(-0.5)
    assert float(relaxed_value(-1.0, box, 0.0, 0.8, nothing, nothing)) == pytest.approx(-0.2)


def test_a_neuron_wrongly_taken_as_stable_is_caught() -> None:
    box = hidden(-1.0, 1.0)
    wrong = HiddenBounds(box.start, box.slope, torch.zeros_like(box.lower), box.upper, box.rest, box.reach)
    moves = torch.linspace(-1, 1, 21, dtype=torch.float64)
    found = relaxed_value(1.0, wrong, 0.0, None, moves, torch.zeros(1, dtype=torch.float64))
    assert bool((found <= torch.relu(moves) + 1e-12).all())  # relu(z) ≥ z: harmless from below …
    found = relaxed_value(-1.0, wrong, 0.0, None, moves, torch.zeros(1, dtype=torch.float64))
    assert bool((found > -torch.relu(moves) + 1e-6).any())  # … but not from above


def test_a_smaller_parabola_touches_relu_where_it_is_wanted() -> None:
    box, half = hidden(-1.0, 1.0), torch.full((1,), 0.5, dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    assert float(relaxed_value(-1.0, box, 0.0, 0.5, half, nothing)) == pytest.approx(-0.5)
    assert float(relaxed_value(-1.0, box, 0.0, 0.5, -half, nothing)) == pytest.approx(0.0)


def test_bending_pays_in_the_middle_only() -> None:
    box, weight = hidden(-1.0, 1.0, rest=0.1), torch.tensor([-1.0], dtype=torch.float64)
    for near, bent in ((0.0, True), (1.0, False)):
        at = torch.full((1,), near, dtype=torch.float64)
        assert bool(ReluRelaxation.of(weight, box, weight, HiddenMoments(at, at.square())).squares != 0) == bent
