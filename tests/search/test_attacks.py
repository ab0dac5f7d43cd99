"""Attacks find the distances that are known, and stay inside their balls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.search import minimal_norm_attack, projected_attack


def plane(x: Tensor) -> Tensor:
    """Two classes on either side of a plane at distance |3x₀ + 4x₁ − 1|/5."""
    side = 3 * x[:, 0] + 4 * x[:, 1] - 1
    return torch.stack([side, -side], -1)


def test_minimal_norm_finds_the_distance_to_a_plane() -> None:
    x = torch.randn(20, 2, dtype=torch.float64)
    labels = plane(x).argmax(-1)
    found = minimal_norm_attack(plane, x, labels)
    true = (3 * x[:, 0] + 4 * x[:, 1] - 1).abs() / 5
    assert bool((found.distance >= true * (1 - 1e-9)).all())
    torch.testing.assert_close(found.distance, true, rtol=0.02, atol=1e-3)
    assert bool((plane(found.point).argmax(-1) != labels).all())


def test_projected_gradient_changes_a_class_just_outside_and_not_inside() -> None:
    x, labels = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([1])
    for radius, changed in ((0.199, False), (0.201, True)):
        found = projected_attack(plane, x, labels, radius)
        assert bool(found.margin <= 0) == changed
        assert float((found.point - x).norm()) <= radius * (1 + 1e-12)
        assert bool(found.distance.isfinite()) == changed


def test_a_constant_network_cannot_be_attacked() -> None:
    x = torch.zeros(2, 3)
    found = minimal_norm_attack(
        lambda x: torch.stack([1 + 0 * x[:, 0], 0 * x[:, 0]], -1), x, torch.tensor([0, 0]), steps=5
    )
    assert bool(found.distance.isinf().all())


def test_labels_must_fit_the_batch() -> None:
    with pytest.raises(InvalidInput, match="whole number for each"):
        minimal_norm_attack(plane, torch.zeros(2, 2), torch.tensor([1]))
