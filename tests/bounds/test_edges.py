"""The whole catalogue at the edges: zero, tiny and huge weights, one token, width one, signs, absurd lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import GradientStepAttention, LipschitzNormAttention, Rotary, UnitNorm
from howsmooth.bounds import CATALOGUE, setting
from howsmooth.bounds.question_setting import Setting
from howsmooth.testing import dense_jacobian

SIZES = (0.0, 1e-300, -1e-160, 1e200)
PROJECTIONS = ("query", "key", "value", "output")
KINDS = ("plain", "causal", "rotary", "softcap", "qk_norm", "biased", "sigmoid", "cosine", "l2", "lipschitz_norm")


def draw(width: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(width, width, dtype=torch.float64, generator=generator) for _ in PROJECTIONS]


def build(kind: str, weights: list[Tensor], heads: int = 1) -> nn.Module:
    """One attention of a kind from query, key, value and output weights."""
    width = len(weights[0])
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "causal": {"mask": "causal"},
        "rotary": {"rotary": Rotary.standard(2 * (width // heads // 2))} if width // heads > 1 else {},
        "softcap": {"softcap": 2.0},
        "qk_norm": {"qk_norm": "rms"},
        "biased": {f"{name}_bias": torch.ones(width, dtype=torch.float64) for name in ("query", "key", "value")},
    }
    if kind == "l2":
        return hs.L2SelfAttention(weights[0], weights[2], weights[3], heads=heads)
    if kind == "lipschitz_norm":
        return LipschitzNormAttention(*weights, heads=heads)
    if kind == "sigmoid":
        return hs.SigmoidAttention(*weights, heads=heads)
    if kind == "cosine":
        return hs.CosineAttention(*weights, heads=heads)
    return hs.SelfAttention(*weights, heads=heads, **options[kind])


def settings(attention: nn.Module, width: int) -> Iterator[Setting]:
    """Sets for every length, and inputs: one token, equal tokens, zeros, tokens of size one and far out."""
    for n, radius in itertools.product((1, 2, 10, math.inf), (1e-3, 1.0, 1e3)):
        yield setting(attention, n=n, over=hs.sets.Ball(radius))
    x = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for point in (x[:1], x[:1].expand(3, -1), torch.zeros(3, width, dtype=torch.float64), x, 1e6 * x):
        yield setting(attention, over=hs.sets.Around(point, 0.1))


def check(where: Setting) -> int:
    """Every bound that applies is a number, upper bounds not negative, lower bounds finite and below upper ones."""
    used = 0
    for bound, per_head in itertools.product(CATALOGUE.values(), (False, True)):
        if bound.refusal(where, per_head) is None:
            found = bound.at(where, per_head)
            assert not bool(found.isnan().any()), bound.name
            assert bool((found >= 0).all()), bound.name
            assert bound.side == "upper" or bool(found.isfinite().all()), bound.name
            used += 1
    return used


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_is_a_number_whatever_the_weights(kind: str) -> None:
    used = 0
    for turn, (place, size) in enumerate(itertools.product(range(len(PROJECTIONS)), SIZES)):
        width = 1 + turn % 2
        weights = draw(width)
        weights[place] = weights[place] * size
        if kind == "l2" and size == 1e200 and place == 0:
            continue  # the square of these weights overflows in the map itself
        attention = build(kind, weights)
        used += sum(check(where) for where in list(settings(attention, width))[turn % 5 :: 5])
    assert used > 0


def test_zero_output_gives_the_bound_zero() -> None:
    *inner, output = draw(4)
    for kind in ("plain", "sigmoid", "cosine"):
        attention = build(kind, [*inner, 0 * output], heads=2)
        for where in (
            setting(attention, n=8, over=hs.sets.Ball(200.0)),
            setting(attention, over=torch.ones(3, 4, dtype=torch.float64)),
        ):
            for bound in CATALOGUE.values():
                if bound.refusal(where) is None and bound.combine == "heads":
                    assert float(bound.at(where)) == 0.0, bound.name


def test_tiny_and_huge_heads_scale_with_their_values() -> None:
    """Squares of bounds below 1e-154 vanish and above 1e154 overflow: blocks must not be made of them."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    query, key, value, output = draw(4)
    for kind, name in (("plain", "howsmooth.sqrt_n"), ("sigmoid", "ramapuram2024.local"), ("cosine", "qi2023.cosine")):
        plain = build(kind, [query, key, value, output], heads=2)
        where = {"over": x} if name.endswith("local") else {"n": 5, "over": hs.sets.Ball(2.0)}
        exact = float(hs.bounds.get(name)(plain, **where))
        for size in (2.0**-700, 2.0**700):
            weights = [query, key, value, size * output] if kind == "cosine" else [query, key, size * value, output]
            scaled = build(kind, weights, heads=2)
            assert float(hs.bounds.get(name)(scaled, **where)) == pytest.approx(size * exact, rel=1e-9, abs=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_signs_of_scales_and_gains_change_no_bound(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = draw(4, seed)
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    gain = torch.randn(4, dtype=torch.float64, generator=generator)
    for sign in (1.0, -1.0):
        norms = (UnitNorm(1.0, length=sign * 3.0, gain=gain), UnitNorm(1.0, length=sign * 2.0))
        turned = Rotary(torch.ones(2, dtype=torch.float64), amplitude=sign * 1.5)
        for attention in (
            hs.CosineAttention(*weights, value_scale=2 * sign, temperature=3 * sign, eps=0.1),
            hs.SelfAttention(*weights, qk_norm=norms, scale=sign),
            hs.SelfAttention(*weights, scale=sign, rotary=turned),
            hs.SelfAttention(*weights, scale=sign, softcap=2.0),
            hs.SigmoidAttention(*weights, scale=sign),
        ):
            exact = dense_jacobian(attention, x)
            sigma = float(torch.linalg.matrix_norm(exact, 2))
            where = setting(attention, over=hs.sets.Around(x, 0.1))
            for bound in CATALOGUE.values():
                if bound.refusal(where) is None and bound.side == "upper" and bound.norm == 2:
                    assert float(bound.at(where)) >= sigma, bound.name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "causal"])
def test_numbers_of_tokens_beyond_every_integer_of_the_machine_are_numbers(kind: str) -> None:
    attention = build(kind, draw(2))
    assert check(setting(attention, n=10**24, over=hs.sets.Ball(1.0))) > 0
    check(setting(attention, n=10**400, over=hs.sets.Ball(1.0)))  # as good as infinite
    first, second = (hs.bounds.table(attention, n=n, over=hs.sets.Ball(1.0)) for n in (10**24, 1e24))
    assert [row.value for row in first] == [row.value for row in second]


def test_layers_with_negative_scales_have_positive_bounds() -> None:
    layer = hs.nn.CosineAttention(8, 2, value_scale=-1.0)
    assert layer.lipschitz_bound(16) > 0


def test_gradient_steps_have_bounds_for_points_of_every_size() -> None:
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.5]], dtype=torch.float64)
    for size in (0.0, 1e-200, 1.0, 1e200):
        attention = GradientStepAttention(size * torch.eye(2, dtype=torch.float64), points, step=1.0)
        assert check(setting(attention)) > 0
