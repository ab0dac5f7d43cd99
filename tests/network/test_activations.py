"""Activations by name: their constants found again by a search, and recognition by what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.network.activations import ACTIVATIONS, KnownActivation, activation


@pytest.mark.parametrize("entry", ACTIVATIONS.values(), ids=lambda entry: entry.name)
def test_activation_constant_equals_the_numerical_supremum(entry: KnownActivation) -> None:
    grid = torch.arange(-400_000, 400_001, dtype=torch.float64) / 10_000
    kinks = torch.tensor([-3.0, 0.0, 3.0, 6.0], dtype=torch.float64)
    t = torch.cat([grid, kinks - 1e-9, kinks + 1e-9]).requires_grad_()
    (slope,) = torch.autograd.grad(entry.function(t).sum(), t)
    found = float(slope.abs().max())
    assert found <= entry.lipschitz * (1 + 1e-12)
    assert found == pytest.approx(entry.lipschitz, abs=1e-6)


def test_activations_have_their_known_constants() -> None:
    known = {"gelu": 1.12890, "gelu_tanh": 1.12899, "silu": 1.09984, "quick_gelu": 1.09984, "sigmoid": 0.25}
    for name, constant in known.items():
        assert activation(name).lipschitz == pytest.approx(constant, abs=5e-6)


def test_activations_are_recognised_by_what_they_compute() -> None:
    from transformers.activations import ACT2FN

    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu"}
    for theirs, ours in names.items():
        assert activation(ACT2FN[theirs]).name == ours
    assert activation(nn.SiLU()).name == "silu"
    assert activation(nn.functional.relu).name == "relu"


@pytest.mark.parametrize("unknown", ["relu7", torch.square, nn.LeakyReLU(3.0), nn.PReLU()])
def test_unknown_activations_are_refused(unknown: Any) -> None:
    with pytest.raises(hs.InvalidInput, match="activation"):
        activation(unknown)
