"""What is shipped to check an attention or a bound passes ours, and catches errors that are planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence import attention_cases as cases
from howsmooth import testing
from howsmooth.attention.stages import Scale, TokenStage
from howsmooth.bounds import CATALOGUE, Bound, Setting, get
from howsmooth.jacobians import attention_jacobian
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.testing import check_attention, check_bound, dense_jacobian


def tokens(n: int = 4, d: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Halved(hs.SelfAttention):
    """Says that all its outputs are half of what they are: its derivative is another's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Mixed(hs.SelfAttention):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if x.dim() == 2 else out - out.mean(0)


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_every_kind_of_attention_passes(kind: str, mask: str) -> None:
    check_attention(cases.build(kind, mask, 4, 2, "rotary", True, "plain"), cases.tokens()[:3])


def test_a_layer_of_torch_passes() -> None:
    check_attention(nn.MultiheadAttention(6, 2), tokens())


@pytest.mark.slow
def test_a_function_passes() -> None:
    check_attention(lambda x: (x @ x.mT).softmax(-1) @ x, tokens())


def test_float32_maps_and_tokens_are_checked_in_float64_and_left_as_they_are() -> None:
    attention = hs.SelfAttention.random(6, 2, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    check_attention(attention, tokens().float())
    check_bound("howsmooth.three_path", attention, over=tokens().float())
    after = attention.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert attention.dtype == torch.float32


def test_the_dense_jacobian_is_that_of_the_first_tensor() -> None:
    x = tokens(2, 3)
    matrix = dense_jacobian(lambda y: (y[0] * y[1], None), x)
    torch.testing.assert_close(matrix, torch.cat([torch.diag(x[1]), torch.diag(x[0])], 1))


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (Halved, "J v of Halved is not the derivative of its forward pass: relative error 1"),
        (Mixed, "an item of a batch is not what Mixed gives for it alone"),
    ],
)
def test_a_forward_pass_that_is_another_is_caught(attention: type[hs.SelfAttention], said: str) -> None:
    eye = torch.eye(6, dtype=torch.float64)
    with pytest.raises(AssertionError, match=said):
        check_attention(attention(eye, eye, eye, heads=2), tokens())


def test_a_stage_with_a_wrong_derivative_is_caught() -> None:
    class Square(TokenStage):
        def linearize(self, x: Tensor) -> tuple[Tensor, Any]:
            _, derivative = Scale(2.1).linearize(x)
            return x * 2, derivative

    attention = hs.SelfAttention.random(6, 2)
    attention.query_stages.append(Square())
    with pytest.raises(AssertionError, match="J v of SelfAttention is not the derivative"):
        check_attention(attention, tokens())


def test_a_wrong_transpose_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AttentionJacobian.rmatvec
    monkeypatch.setattr(AttentionJacobian, "rmatvec", lambda self, u: right(self, u) * (1 + 1e-7))
    with pytest.raises(AssertionError, match="Jᵀ u of SelfAttention is not the derivative"):
        check_attention(hs.SelfAttention.random(6, 2), tokens())


def test_heads_that_do_not_add_up_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(attention: hs.SelfAttention, x: Tensor, per_head: bool = False) -> AttentionJacobian:
        x = torch.cat([x[:1] * (1 + 1e-3), x[1:]]) if per_head else x
        return attention_jacobian(attention, x, per_head=per_head)

    monkeypatch.setattr(testing, "attention_jacobian", doubled)
    with pytest.raises(AssertionError, match="the Jacobians of the heads of SelfAttention do not add up"):
        check_attention(hs.SelfAttention.random(6, 2), tokens())


def test_a_mask_that_is_not_respected_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, causal = hs.SelfAttention.random(6, 2), hs.SelfAttention.random(6, 2, mask="causal")
    leaking = dense_jacobian(plain.in_dtype(torch.float64), tokens())
    with pytest.raises(AssertionError, match=r"token \d moves the output of token \d of SelfAttention"):
        testing._check_masks(causal.in_dtype(torch.float64), tokens(), leaking)
    monkeypatch.setattr(hs.SelfAttention, "weights", lambda self, x: torch.ones(2, len(x), len(x)))
    with pytest.raises(AssertionError, match="gives weight to a token that its mask hides"):
        check_attention(causal, tokens())


def test_bounds_of_other_kinds_pass() -> None:
    query, value = torch.randn(2, 4, 4, dtype=torch.float64) / 2
    l2 = hs.L2SelfAttention(query, value, heads=2, mask="causal")
    for bound in hs.bounds.catalogue.applicable(hs.bounds.setting(l2, n=4)):
        assert 0 < check_bound(bound, l2, n=4, starts=1, steps=4) <= 1
    sigmoid = hs.SigmoidAttention(query, query, value, heads=2)
    assert 0 < check_bound("howsmooth.sigmoid", sigmoid, n=4, over=hs.sets.Ball(1.0), starts=1, steps=4) <= 1
    cosine = hs.CosineAttention(query, query, value, heads=2)
    assert 0 < check_bound("qi2023.cosine", cosine, n=4, starts=1, steps=4) <= 1


@pytest.mark.slow
def test_every_bound_passes_wherever_it_applies() -> None:
    maps = [hs.SelfAttention.random(4, 2, mask=mask) for mask in (None, "causal")]
    taken = set()
    for attention in maps:
        for where in ({"over": hs.sets.Around(tokens(4, 4), 0.1)}, {"n": 4, "over": hs.sets.Ball(1.0)}):
            for bound in hs.bounds.catalogue.applicable(hs.bounds.setting(attention, **where)):  # type: ignore[arg-type]
                assert 0 <= check_bound(bound, attention, starts=1, steps=4, **where) <= 1
                taken.add(bound.scope)
    assert taken >= {"point", "neighbourhood", "ball", "mean-field W2"}


def planted(name: str, number: Callable[[Tensor, Setting], Tensor]) -> Bound:
    """A bound with another number in place of its own."""
    right = get(name)
    return replace(right, evaluate=lambda where, folded: number(right.evaluate(where, folded), where))


HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "factor", "where"),
    [
        ("howsmooth.sqrt_n", 0.4, {"n": 8, "over": hs.sets.Ball(3.0)}),
        ("howsmooth.three_path", 0.3, {"over": tokens(8, 2)}),
        ("howsmooth.three_path_ball", 0.3, {"over": hs.sets.Around(tokens(8, 2), 0.2)}),
    ],
)
def test_an_upper_bound_that_is_too_small_is_caught(name: str, factor: float, where: dict[str, Any]) -> None:
    assert factor < check_bound(name, HEAD, starts=2, steps=20, **where) <= 1
    with pytest.raises(AssertionError, match=rf"‖J‖ at an input found there is .*, above {name} which says"):
        check_bound(planted(name, lambda value, _: factor * value), HEAD, starts=2, steps=20, **where)


def test_a_lower_bound_that_is_too_large_is_caught() -> None:
    names = [bound.name for bound in CATALOGUE.values() if bound.side == "lower" and bound.norm == 2]
    where = {"n": 8, "over": hs.sets.Ball(3.0)}
    there = [name for name in names if get(name).refusal(hs.bounds.setting(HEAD, **where)) is None]  # type: ignore[arg-type]
    name = max(there, key=lambda name: float(get(name)(HEAD, **where)))
    assert check_bound(name, HEAD, **where) <= 1
    with pytest.raises(AssertionError, match=r"the lower bound is .*, above the smallest upper bound"):
        check_bound(planted(name, lambda value, _: 1e3 * value), HEAD, **where)


def test_a_bound_that_does_not_scale_with_the_map_is_caught() -> None:
    bound = planted("howsmooth.sqrt_n", lambda value, _: torch.full_like(value, 1e3))
    with pytest.raises(AssertionError, match=r"with 3 times the value matrix .* is 1000, not 3 times 1000"):
        check_bound(bound, HEAD, n=4, over=hs.sets.Ball(1.0), starts=1, steps=2)
    without_output = planted(
        "howsmooth.sqrt_n", lambda value, where: value / where.map.output_weight.norm() * (1e3 + value)
    )
    with pytest.raises(AssertionError, match="with 3 times the"):
        check_bound(without_output, HEAD, n=4, over=hs.sets.Ball(1.0), starts=1, steps=2)


def test_a_bound_that_depends_on_the_order_of_tokens_is_caught() -> None:
    bound = planted("howsmooth.three_path", lambda value, where: value * (2 + where.point[0].norm()))
    with pytest.raises(AssertionError, match="at the same tokens in another order"):
        check_bound(bound, HEAD, over=tokens(4, 2))


def test_a_refusal_is_a_refusal() -> None:
    with pytest.raises(hs.DoesNotApply):
        check_bound("howsmooth.l2_lip_2", HEAD, n=4)
    with pytest.raises(hs.InvalidInput, match="must have 2 dimensions"):
        check_attention(HEAD, tokens()[0])
    assert math.isfinite(check_bound("howsmooth.mean_field", HEAD, over=hs.sets.Ball(1.0), starts=1, steps=2))
