"""Contractive L2 attention: its constant is at most c at evaluation, follows the weights, and knows n and the mask."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.ascent import ROUNDING
from howsmooth.attention.masks import as_mask
from howsmooth.bounds import Bound, l2_bounds
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn import ContractiveL2Attention, L2Attention
from howsmooth.nn.layers.attention_layer import CallMasks
from howsmooth.nn.layers.l2_layers import average_2
from howsmooth.norms.small_matrices import spectral

N, D, H = 9, 8, 2
VARIANTS: dict[str, dict[str, Any]] = {"2": {}, "inf": {"norm": "inf"}, "kim": {"norm": "inf", "bound": "kim2021"}}
variants = pytest.mark.parametrize("variant", VARIANTS)


def make(variant: str = "2", **options: Any) -> ContractiveL2Attention:
    return ContractiveL2Attention(D, H, **VARIANTS[variant], **options).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def scale_weights(layer: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(factor)


def test_block_bound_lies_between_the_lower_bound_and_the_sum_over_heads() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        weights = [torch.randn(D, D, dtype=torch.float64) * torch.rand(()).mul(3).exp() for _ in range(3)]
        attention = hs.L2SelfAttention(*weights, heads=4)
        parts = attention.query_weight, attention.plain_value, attention.output_weight
        block = float(l2_bounds.block_lip_2(*parts, l2_bounds.average_lip_2(N)))
        assert (
            block <= float(hs.bounds.get("howsmooth.l2_lip_2")(attention, n=N)) * 1.05
        )  # Frobenius, not spectral, balance
        one_head = hs.L2SelfAttention(*(w[:2] for w in weights[:2]), weights[2][:, :2])
        assert float(hs.bounds.get("howsmooth.l2_lower_2")(one_head, n=N)) <= block


def test_block_bound_with_one_head_is_the_bound_of_the_catalogue() -> None:
    layer = L2Attention(D, 1).double()
    query, value, output = (weight.detach() for weight in layer.weights_by_head())
    expected = l2_bounds.l2_lip_2(query, value, N, "full", output)
    torch.testing.assert_close(l2_bounds.block_lip_2(query, value, output, l2_bounds.average_lip_2(N)), expected[0])


def test_block_bound_does_not_grow_with_heads_that_do_nothing() -> None:
    query, value, output = torch.randn(3, 2, 3, D, dtype=torch.float64).unbind(0)
    silent = torch.zeros(1, 3, D, dtype=torch.float64)
    more = (torch.cat([part, silent]) for part in (query, value, output))
    expected = l2_bounds.block_lip_2(query, value, output, 1.0)
    torch.testing.assert_close(l2_bounds.block_lip_2(*more, 1.0), expected, rtol=1e-6, atol=0)


@variants
def test_constant_is_the_coefficient_whatever_the_weights(variant: str) -> None:
    layer = make(variant, coefficient=0.7)
    for factor in (1e-4, 1.0, 30.0):
        scale_weights(layer, factor)
        for mask in (None, "causal", hs.SlidingWindow(3)):
            bound = float(layer.lipschitz_bound(N, norm=layer.norm, mask=mask))
            assert bound <= 0.7 * (1 + ROUNDING)
            assert variant == "kim" or bound == pytest.approx(0.7, rel=1e-9)


@pytest.mark.slow
@variants
def test_worst_measured_constant_stays_below_the_coefficient(variant: str) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        layer = make(variant)
        scale_weights(layer, 3.0)
        for size in (0.1, 1.0, 10.0):
            jacobian = torch.func.jacrev(lambda x: layer(x)[0])(size * tokens(N)).detach()  # noqa: B023
            assert float(torch.linalg.matrix_norm(jacobian.reshape(N * D, -1), layer.norm)) <= 0.9


@variants
@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.slow
def test_bound_holds_for_every_number_of_padded_tokens_in_both_norms(variant: str, norm: float) -> None:
    """Items are divided by the bound for their own length, and bounds do not grow alike."""
    layer = make(variant)
    for mask in (None, "causal"):
        bounds = torch.stack([L2Attention.lipschitz_bound(layer, n, None, norm, mask) for n in range(1, 200)])
        for n in (1, 2, 9, 70, 199):
            assert float(layer.lipschitz_bound(n, norm=norm, mask=mask)) >= float(bounds[:n].max()) * (1 - ROUNDING)


def test_division_by_the_two_norm_damps_much_less() -> None:
    """At n = 288, width 512, 8 heads and Glorot weights."""
    torch.manual_seed(0)
    two = ContractiveL2Attention(512, 8).eval()
    inf = ContractiveL2Attention(512, 8, norm="inf").eval()
    kim = ContractiveL2Attention(512, 8, norm="inf", bound="kim2021").eval()
    for layer in (inf, kim):
        layer.load_state_dict(two.state_dict(), strict=False)
    x = torch.randn(288, 512)
    sizes = [float(layer(x)[0].detach().norm()) for layer in (two, inf, kim)]
    assert sizes[0] > 50 * sizes[1] > 50 * 100 * sizes[2]


@variants
def test_output_is_l2_attention_times_one_number(variant: str) -> None:
    layer, x = make(variant), tokens(N)
    plain = L2Attention(D, H).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    ratio = layer(x)[0] / plain(x)[0]
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    weights = [weight.detach() for weight in plain.weights_by_head()]
    bound = {
        "2": lambda: l2_bounds.block_lip_2(*weights, l2_bounds.average_lip_2(N)),
        "inf": lambda: l2_bounds.l2_lip_inf(*weights, N),
        "kim": lambda: l2_bounds.lip_inf(*weights, N),
    }[variant]()
    torch.testing.assert_close(ratio[0, 0], 0.9 / bound)


def test_exact_norms_follow_weights_changed_in_any_way() -> None:
    layer, x = make(), tokens(N)
    for change in (
        lambda: scale_weights(layer, 2.0),
        lambda: layer.qk_proj.weight.data.mul_(3.0),
        lambda: layer.out_proj.weight.data.copy_(torch.randn(D, D)),
        lambda: layer.load_state_dict(ContractiveL2Attention(D, H).double().state_dict()),
        lambda: setattr(layer, "v_proj", nn.Linear(D, D, bias=False).double()),
    ):
        layer(x)
        change()
        fresh = copy.deepcopy(layer)
        torch.testing.assert_close(layer(x)[0], fresh(x)[0])
        assert 0.8 < float(layer.lipschitz_bound(N)) <= 0.9 * (1 + ROUNDING)


@pytest.mark.slow
def test_estimate_in_training_is_never_above_the_norm_and_follows_it() -> None:
    """A layer wider than the subspace of the estimate, trained fast on noise, the hardest case that was found."""
    torch.manual_seed(0)
    layer = ContractiveL2Attention(48, 4).double()
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.003)
    x, target = torch.randn(2, 4, N, 48, dtype=torch.float64)
    ratios = []
    for _ in range(100):
        optimiser.zero_grad()
        (layer(x)[0] - target).square().mean().backward()
        optimiser.step()
        ratios.append(float(layer.lipschitz_bound(N)) / 0.9)
    assert min(ratios) >= 0.99  # an estimate above the norm would make the layer flatter than c
    assert max(ratios) < 1.01
    assert float(layer.eval().lipschitz_bound(N)) <= 0.9 * (1 + ROUNDING)


def steepest(width: int, heads: int, rate: float, steps: int, sign: float) -> float:
    """How far above c, as a share of it, the layer comes in training, by the exact norms of what it divides by."""
    layer = ContractiveL2Attention(width, heads)
    optimiser = torch.optim.Adam(layer.parameters(), rate)
    over = 0.0
    for _ in range(steps):
        x = torch.randn(2, 16, width)
        out = layer(x)[0]
        over = max(over, float(layer.lipschitz_bound(16)) / 0.9 - 1)
        loss = out.square().mean() if sign < 0 else (out - torch.tanh(3 * x.mean(1, keepdim=True))).square().mean()
        optimiser.zero_grad()
        (sign * loss).backward()
        optimiser.step()
    return over


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "sign"), [(1e-3, 1.0), (1e-2, 1.0), (1e-2, -1.0)])
def test_layer_in_training_is_at_most_a_thousandth_steeper_than_c(rate: float, sign: float) -> None:
    assert steepest(96, 8, rate, 25, sign) < 1e-3


def test_weights_set_from_outside_are_met_by_the_first_call_in_training() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        layer = ContractiveL2Attention(48, 4)
        with torch.no_grad():
            for linear in (layer.qk_proj, layer.v_proj, layer.out_proj):
                linear.weight.normal_(std=0.5)
        stale = float(layer.lipschitz_bound(N))
        layer(torch.randn(N, 48))
        assert stale > 0.9 * 1.05  # the estimates knew nothing of the new weights
        assert float(layer.lipschitz_bound(N)) < 0.9 * 1.005


def test_training_and_evaluation_agree_once_the_vectors_have_settled() -> None:
    layer, x = make(), tokens(N)
    layer.train().follow_weights()
    for _ in range(300):
        training = layer(x)[0]
    torch.testing.assert_close(training, layer.eval()(x)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@variants
def test_gradient_in_the_weights_goes_through_the_division(variant: str, training: bool) -> None:
    """Scaling all of W^V changes nothing, so the gradient along it is zero; any other one passes gradcheck."""
    layer, x = make(variant), tokens(N)
    for _ in range(300):
        layer.train()(x)
    layer.train(training)
    (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), layer.v_proj.weight)
    weight = layer.v_proj.weight.detach()
    assert abs(float((gradient * weight).sum())) < 1e-6 * float(gradient.norm() * weight.norm())
    step = 1e-6 * torch.randn_like(weight)
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(layer).eval()
        with torch.no_grad():
            moved.v_proj.weight.add_(sign * step)
        values.append(float(moved(x)[0].detach().square().sum()))
    assert (values[0] - values[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-4)


def test_vectors_are_saved_and_loaded() -> None:
    layer, other, x = make().train(), make().train(), tokens(N)
    layer(x)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])


def test_zero_weights_give_zero() -> None:
    for variant in VARIANTS:
        layer = make(variant)
        scale_weights(layer, 0.0)
        assert not layer(tokens(N))[0].any()
        assert not layer.train()(tokens(N))[0].any()


def test_average_constant_knows_the_mask() -> None:
    window = hs.SlidingWindow(4)
    constants = [average_2(CallMasks(100, as_mask(mask))) for mask in (None, hs.Causal(), window)]
    expected = [
        l2_bounds.average_lip_2(100),
        l2_bounds.average_lip_2(100, "ordered"),
        l2_bounds.average_lip_2(4, "ordered"),
    ]
    assert constants == expected
    dense = CallMasks.of((1, 4, 1), torch.ones(4, 4).tril(-1).bool(), False, None)
    assert average_2(dense) == l2_bounds.average_lip_2(4, "any")


def test_fixed_number_of_tokens_makes_outputs_independent_of_the_length() -> None:
    layer, x = make(max_tokens=N), tokens(N)
    short, long = layer(x[:4], is_causal=True)[0], layer(x, is_causal=True)[0]
    torch.testing.assert_close(short, long[:4])
    bounds = [float(layer.lipschitz_bound(n, mask="causal")) for n in range(1, N + 1)]
    assert all(a <= b for a, b in pairwise(bounds))
    assert bounds[-1] == pytest.approx(0.9)
    with pytest.raises(InvalidInput, match=f"at most {N} tokens"):
        layer(tokens(N + 1))
    with pytest.raises(InvalidInput, match=f"at most {N} tokens"):
        layer.lipschitz_bound(N + 1)


def test_map_needs_the_number_of_tokens() -> None:
    with pytest.raises(InvalidInput, match="depends on n"):
        make().map()
    assert make(max_tokens=5).map().heads == H


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"coefficient": 0.0}, "coefficient"),
        ({"coefficient": math.nan}, "coefficient"),
        ({"norm": 1}, "norm 2 or 'inf'"),
        ({"bound": "kim2021"}, "never smaller"),
        ({"bound": "guess"}, "bound must be"),
        ({"dropout": 0.1}, "dropout"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_options_that_break_the_promise_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        ContractiveL2Attention(D, H, **options)


def test_weights_that_are_not_finite_are_refused_at_evaluation() -> None:
    layer = make()
    with torch.no_grad():
        layer.qk_proj.weight[0, 0] = math.nan
    with pytest.raises(InvalidInput, match="NaN"):
        layer(tokens(N))
    with pytest.raises(InvalidInput, match="NaN"):
        layer.lipschitz_bound(N)


def test_spectral_norms_that_the_layer_uses_are_those_of_the_stacked_heads() -> None:
    layer = make()
    tied, mixing = (
        norm(matrix) for norm, matrix in zip((layer.tied_norm, layer.mixing_norm), _stacked(layer), strict=True)
    )
    for found, matrix in zip((tied, mixing), _stacked(layer), strict=True):
        torch.testing.assert_close(found, spectral(matrix))


def _stacked(layer: ContractiveL2Attention) -> tuple[Tensor, Tensor]:
    weights = [weight.detach() for weight in layer.weights_by_head()]
    return l2_bounds.balanced(weights[0], l2_bounds.mixing_matrix(*weights))


@pytest.mark.parametrize("norm", [2, "inf"])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_the_bound_of_a_contractive_layer_evaluates_no_theorem_for_its_refusal(
    norm: Any, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ContractiveL2Attention(8, 2, norm=norm).eval()
    evaluated: list[str] = []
    at = Bound.at
    monkeypatch.setattr(Bound, "at", lambda bound, *args: evaluated.append(bound.name) or at(bound, *args))
    assert float(layer.lipschitz_bound(12, norm=norm, mask=mask)) == pytest.approx(0.9, rel=1e-5)
    assert evaluated == []
    with pytest.raises(DoesNotApply, match="every token sees itself"):
        layer.lipschitz_bound(3, norm=norm, mask=~torch.eye(3, dtype=torch.bool))
