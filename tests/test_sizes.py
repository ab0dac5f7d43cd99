"""Inputs and weights from 1e-300 to 1e300: numbers with ends in order, or one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.errors import HowsmoothError

SCALES = (1e-300, 1e-150, 1e-40, 1.0, 1e6, 1e10, 1e38, 1e120, 1e300)
CALLS: dict[str, Callable[[AttentionMap, Tensor], object]] = {
    "measure": hs.measure,
    "norm 1": lambda attention, x: hs.measure(attention, x, norm=1),
    "norm inf": lambda attention, x: hs.measure(attention, x, norm=math.inf),
    "norm token": lambda attention, x: hs.measure(attention, x, norm="token"),
    "heads": hs.measure_heads,
    "explain": hs.explain,
    "influence": hs.token_influence,
    "certify": hs.certify,
    "ball": lambda attention, x: hs.certify(attention, hs.sets.Around(x, 0.01 * float(x.norm()))),
    "one word": lambda attention, x: hs.certify(attention, hs.sets.Around(x, 0.01, moving=[1])),
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def maps(values: float) -> dict[str, Callable[[], AttentionMap]]:
    """One of every kind, its values in some size."""
    q, k, v = (draw(seed, 8, 8) for seed in (1, 2, 3))
    v = v * values
    return {
        "causal": lambda: hs.SelfAttention(q, k, v, heads=2, mask="causal"),
        "rotary": lambda: hs.SelfAttention(q, k, v, heads=2, rotary=hs.Rotary.standard(4)),
        "l2": lambda: hs.L2SelfAttention(q, v, heads=2),
        "sigmoid": lambda: hs.SigmoidAttention(q, k, v, heads=2),
        "cosine": lambda: hs.CosineAttention(q, k, v, heads=2),
    }


def numbers(found: object) -> Iterator[Tensor]:
    """The tensors of a result, but for a scale that may be unknown."""
    if isinstance(found, Tensor):
        yield found
    elif is_dataclass(found):
        for field in fields(found):
            if field.name != "scale":
                yield from numbers(getattr(found, field.name))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", maps(1.0))
def test_every_size_has_numbers_with_ends_in_order_or_is_refused(kind: str, call: str) -> None:
    answered = 0
    for size in SCALES:
        for values, tokens in ((1.0, size), (size, 1.0)):
            try:
                found = CALLS[call](maps(values)[kind](), tokens * draw(0, 5, 8))
            except HowsmoothError:
                continue
            answered += 1
            assert not any(bool(each.isnan().any()) for each in numbers(found)), (values, tokens)
            if hasattr(found, "lower"):
                assert bool((found.lower <= found.upper).all()), (values, tokens)
    assert answered >= 6
