"""Wrong arguments of public functions on measures: one sentence each, never an error from inside."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress

import pytest
import torch

import howsmooth as hs
from howsmooth import meanfield
from howsmooth.errors import HowsmoothError
from howsmooth.meanfield import Measure, distances, measure_attention

ODD = (
    None,
    "x",
    -1,
    0,
    1.5,
    math.nan,
    10**30,
    [],
    [1, 2],
    {},
    object(),
    torch.zeros(0),
    torch.ones(3),
    torch.ones(2, 2),
    torch.ones(2, 3, 4),
    torch.full((2, 2), math.nan),
    torch.ones(2, 2, dtype=torch.complex64),
    torch.ones(2, 2).to_sparse(),
    torch.ones(2, 2, device="meta"),
    torch.tensor([1, 2]),
)
HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
MU = Measure(torch.eye(2), [0.25, 0.75])
CALLS = {
    "measure": lambda odd, other: Measure(odd, other),
    "measure's weights": lambda odd, other: Measure(torch.eye(2), odd, other),
    "empirical": lambda odd, other: Measure.empirical(odd),
    "of_tokens": lambda odd, other: Measure.of_tokens(odd),
    "expand": lambda odd, other: MU.expand(odd),
    "moved": lambda odd, other: MU.moved(odd),
    "split": lambda odd, other: MU.split(odd, other),
    "field": lambda odd, other: meanfield.field(odd, other),
    "field at points": lambda odd, other: meanfield.field(HEAD, MU)(odd, other),
    "push": lambda odd, other: meanfield.push(HEAD, odd),
    "weighted": lambda odd, other: measure_attention.weighted(HEAD, MU, odd, other),
    "local_constant": lambda odd, other: meanfield.local_constant(odd, other),
    "local_constant's measure": lambda odd, other: meanfield.local_constant(HEAD, odd),
    "wasserstein": lambda odd, other: distances.wasserstein(MU, odd, other),
    "order": lambda odd, other: distances.wasserstein(MU, MU, odd),
    "conditional": lambda odd, other: meanfield.conditional(odd, other),
    "distance": lambda odd, other: meanfield.distance(odd, MU),
    "ratio": lambda odd, other: meanfield.ratio(HEAD, odd, other),
    "largest_ratio": lambda odd, other: meanfield.largest_ratio(HEAD, odd),
    "two_atom": lambda odd, other: meanfield.two_atom(odd, other),
    "two_atom_measure": lambda odd, other: meanfield.two_atom_measure(odd, 1.0, other),
    "log mass": lambda odd, other: measure_attention.LogMass(odd),
    "past": lambda odd, other: measure_attention.Past(odd),
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_in_one_sentence(name: str) -> None:
    for odd, other in itertools.product(ODD, ODD[::4]):
        with suppress(HowsmoothError):  # a value or a sentence of our own; any other error fails
            CALLS[name](odd, other)  # type: ignore[no-untyped-call]


def test_two_atoms_far_beyond_float64_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="beyond float64"):
        meanfield.two_atom(1.0, 30.0)
