"""The evidence on networks, in small: sentence classifiers, interval arithmetic, networks that are hard to read."""

from __future__ import annotations

import pytest
import torch

from evidence.certified_sentences import word
from evidence.deep_networks import draw_network
from evidence.interval_bounds import interval_radius, through
from evidence.read_networks import COUNT, FOREIGN, READ, SHARED, draw, page, tried
from evidence.sentences import HEADS, classifier
from howsmooth.certificates.read_module import read_classifier

CAUGHT = (2, 6, 49, 50, 88, 89)
"""Seeds of networks in which a change of class lies inside the radius of a careless reader."""


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
        root, x = read_classifier(case.network, case.x).root, case.x
        width = 0.3 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
        centre, off = through(root, (x, width))
        for _ in range(10):
            there = case.x + width * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
            assert bool(((case.network(there) - centre[0]).abs() <= off[0] + 1e-12).all())
        assert interval_radius(root, x, case.label, 0) > 0


@pytest.mark.slow
def test_a_network_is_certified_and_keeps_its_class_or_is_refused_and_a_careless_reader_is_caught() -> None:
    found = [tried(seed) for seed in CAUGHT]
    for one in found:
        assert (one.radius is None) == one.case.refused, one.refusal
        assert one.radius is None or (one.radius > 0 and one.inside > 0)
    assert {one.radius is None for one in found} == {True, False}
    assert all(one.careless_radius > 0 >= one.careless_inside for one in found)
    assert f"| anything | {len(CAUGHT)} |" in page(found)[1]


@pytest.mark.slow
def test_the_drawn_networks_hold_everything_on_the_list() -> None:
    drawn = {name for seed in range(COUNT) for name in draw(seed).made_of}
    assert drawn == {*READ, *FOREIGN, SHARED, "another pool"}
