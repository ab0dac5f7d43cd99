"""The evidence on networks, in small: sentence classifiers and interval arithmetic."""

from __future__ import annotations

import torch

from evidence.certified_sentences import word
from evidence.deep_networks import draw_network
from evidence.interval_bounds import interval_radius, through
from evidence.sentences import HEADS, classifier
from howsmooth.certify.parts import read_network


def test_a_word_of_a_sentence_is_certified_beyond_intervals_and_short_of_the_attack() -> None:
    net = classifier(words=20, norm="standard", depth=2, width=4 * HEADS).double().eval().requires_grad_(False)
    ids = torch.tensor([3, 8, 1, 12])
    found = word(net, net.embed(ids), int(net(ids).argmax()), token=1, steps=40)
    assert 0 < found.intervals < found.proved < found.attacked
    assert found.inside > 0


def test_intervals_hold_what_the_network_does() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(6):
        case = draw_network(seed)
        parts, x = read_network(case.network, len(case.x)), case.network.placed(case.x)
        width = 0.3 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
        centre, off = through(parts, (x, width))
        for _ in range(10):
            there = case.x + width * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
            assert bool(((case.network(there) - centre[0]).abs() <= off[0] + 1e-12).all())
        assert interval_radius(parts, x, case.label, 0) > 0
