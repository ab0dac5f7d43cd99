"""Ratios of distances of measures after and before attention."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.meanfield.discrete_measure import Measure
from howsmooth.meanfield.distances import distance
from howsmooth.meanfield.measure_attention import push

Pair = tuple[Measure, Measure]


@validated
def ratio(attention: nn.Module, mu: Measure, nu: Measure) -> float:
    """W₂(F(μ), F(ν)) / W₂(μ, ν), or the same in d₂ when the measures have positions.

    Every such ratio is a lower bound of the constant of F on any set of measures that holds both.

    >>> import torch, howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), 3 * torch.eye(1))  # F(μ) sits at 3 · the mean
    >>> round(ratio(head, Measure.empirical(torch.zeros(2, 1)), Measure.empirical(torch.ones(3, 1))), 12)
    3.0
    """
    apart = distance(mu, nu)
    if not 0 < apart < math.inf:
        why = "are the same" if apart == 0 else "have different masses at some position, which makes d₂ infinite"
        raise InvalidInput(f"the two measures {why}: a ratio needs two at a finite distance.")
    return distance(push(attention, mu), push(attention, nu)) / apart


@validated
def largest_ratio(attention: nn.Module, pairs: Iterable[Pair]) -> tuple[float, Pair]:
    """The largest `ratio` of the pairs, and the pair that has it."""
    ratios, listed = [], list[object](pairs)
    for pair in listed:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInput(f"the largest ratio takes pairs of measures, got {type(pair).__name__}.")
        ratios.append((ratio(attention, *pair), (pair[0], pair[1])))
    if not ratios:
        raise InvalidInput("the largest ratio of no pairs does not exist: give at least one pair of measures.")
    return max(ratios, key=lambda entry: entry[0])
