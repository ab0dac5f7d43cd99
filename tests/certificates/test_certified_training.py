"""Training with certified margins raises what is certified."""

from __future__ import annotations

import pytest
import torch

from evidence.certified_training import Contractive, Digits, fit_certified, outcome, plain_network
from howsmooth.certificates import SequenceClassifier, certified_margins


def toy(count: int = 24) -> Digits:
    """Two classes told apart by how bright their first patch is."""
    g = torch.Generator().manual_seed(0)
    patches = torch.rand(count, 4, 16, generator=g, dtype=torch.float64)
    labels = torch.arange(count) % 2
    patches[:, 0] += labels[:, None]
    return Digits(patches, labels, patches, labels)


def worst_margin(net: SequenceClassifier, data: Digits) -> float:
    """The mean, over inputs, of the least certified margin."""
    found = []
    with torch.no_grad():
        for x, label in zip(data.patches, data.labels.tolist(), strict=True):
            margins = certified_margins(net, x, label, 0.05)
            found.append(float(margins[torch.arange(len(margins)) != label].min()))
    return sum(found) / len(found)


@pytest.mark.slow
def test_certified_margins_rise_when_they_are_in_the_loss() -> None:
    data, net = toy(6), plain_network()
    before = worst_margin(net, data)
    fit_certified(net, data, steps=15, batch=4, radius=0.05)
    assert worst_margin(net, data) > before + 0.2
    assert 0 <= outcome("after", net, data, 2, radius=0.05).certified <= 1


def test_the_global_bound_of_contractive_layers_holds_between_inputs() -> None:
    net = Contractive().double().eval()
    g = torch.Generator().manual_seed(1)
    one, other = torch.rand(2, 20, 4, 16, generator=g, dtype=torch.float64)
    with torch.no_grad():
        steep = torch.linalg.matrix_norm(net.patch.weight, 2) * 1.9**2 / 2
        gap = (net(one) - net(other))[:, 0] - (net(one) - net(other))[:, 1]
        allowed = steep * (net.classes.weight[0] - net.classes.weight[1]).norm() * (one - other).flatten(1).norm(dim=1)
    assert bool((gap.abs() <= allowed).all())
