"""Certified constants with derivatives: their values are the certificates', their slopes those of differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.certificates import certified_constants

MAPS: dict[str, Callable[..., hs.AttentionMap]] = {
    "plain": lambda *w: hs.SelfAttention(*w, heads=2),
    "causal": lambda *w: hs.SelfAttention(*w, heads=2, mask="causal"),
    "rotary": lambda *w: hs.SelfAttention(*w, heads=2, mask="causal", rotary=hs.Rotary.standard(4)),
    "soft-cap": lambda *w: hs.SelfAttention(*w, heads=2, softcap=2.0),
    "sigmoid": lambda *w: hs.SigmoidAttention(*w, heads=2),
}


def case(seed: int = 0, n: int = 5) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    weights = [0.5 * torch.randn(8, 8, generator=g).double() for _ in range(4)]
    return weights, torch.randn(n, 8, generator=g).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("radius", [0.0, 0.02])
def test_slopes_are_those_of_differences_in_the_tokens_and_in_every_weight(name: str, radius: float) -> None:
    weights, x = case()
    given = [t.requires_grad_() for t in (x, *weights)]

    def total(moved: list[Tensor]) -> Tensor:
        return certified_constants(MAPS[name](*moved[1:]), moved[0], radius=radius).sum()

    slopes = torch.autograd.grad(total(given), given)
    for index, slope in enumerate(slopes):
        direction, step = torch.randn_like(slope), 1e-5
        ends = []
        for sign in (1, -1):
            moved = [t.detach() + (sign * step * direction if i == index else 0) for i, t in enumerate(given)]
            if radius:
                ends.append(float(total(moved)))
            else:  # proved ends come in steps of their own allowance; the value they enclose does not
                ends.append(float(hs.measure_heads(MAPS[name](*moved[1:]), moved[0], rtol=1e-9).value.sum()))
        difference = (ends[0] - ends[1]) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(difference, rel=2e-2, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_values_are_those_of_the_certificate(name: str) -> None:
    weights, x = case(1)
    for radius, tokens in ((0.0, None), (0.05, None), (0.05, [1])):
        proof = hs.certify(MAPS[name](*weights), hs.sets.Around(x, radius, moving=tokens), per_head=True)
        torch.testing.assert_close(certified_constants(MAPS[name](*weights), x, radius, tokens), proof.upper)


@pytest.mark.slow
def test_descending_a_few_steps_lowers_what_is_proved_and_what_is_found() -> None:
    """The bound as a penalty on the logits' weights, whose scale it sees and the output does not."""
    weights, x = case(2)
    weights = [t.requires_grad_() for t in weights]
    optimiser = torch.optim.Adam(weights[:2], lr=0.02)
    before = hs.certify(hs.SelfAttention(*weights, heads=2), hs.sets.Around(x, 0.05)).upper
    for _ in range(15):
        optimiser.zero_grad()
        certified_constants(hs.SelfAttention(*weights, heads=2), x, radius=0.05).sum().backward()
        optimiser.step()
    assert float(hs.certify(hs.SelfAttention(*weights, heads=2), hs.sets.Around(x, 0.05)).upper) < 0.8 * float(before)


@pytest.mark.parametrize(
    ("radius", "x"), [(-1.0, torch.ones(2, 8)), (float("nan"), torch.ones(2, 8)), (0.1, torch.ones(8))]
)
def test_what_is_no_ball_or_no_input_is_refused(radius: float, x: Tensor) -> None:
    with pytest.raises(hs.HowsmoothError):
        certified_constants(hs.SelfAttention.random(8), x, radius=radius)
