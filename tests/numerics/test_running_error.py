"""Bounds on rounding against the same computation in float64, and in 40 digits."""

from __future__ import annotations

import copy
import math

import mpmath
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import nn as layers
from howsmooth.nn.invertible.branches import (
    NONEXPANSIVE_ACTIVATIONS,
    AttentionBranch,
    Branch,
    ComposedBranch,
    ScaledBranch,
)
from howsmooth.nn.invertible.transformer import ActNorm
from howsmooth.numerics.running_error import UnknownRounding, evaluation_error


def branches() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "l2": AttentionBranch(layers.L2Attention(6, 2, bias=True)),
        "l2 causal": AttentionBranch(layers.L2Attention(6, 2, bias=True), "causal"),
        "l2 window": AttentionBranch(layers.L2Attention(6, 2), hs.SlidingWindow(2)),
        "l2 array": AttentionBranch(layers.L2Attention(6, 2), torch.ones(7, 7, dtype=torch.bool).tril()),
        "contractive": AttentionBranch(layers.ContractiveL2Attention(6, 2)),
        "contractive inf": AttentionBranch(layers.ContractiveL2Attention(6, 2, norm="inf")),
        "cosine": AttentionBranch(layers.CosineAttention(6, 2, bias=True)),
        "lipschitz-norm": AttentionBranch(layers.LipschitzNormAttention(6, 2)),
        "gradient-step": AttentionBranch(layers.GradientStepAttention(6, 2, context_size=5)),
        "map": AttentionBranch(hs.L2SelfAttention(*torch.randn(3, 6, 6) / 3, heads=2)),
        "composed": ComposedBranch(layers.ContractiveMLP(6, 8), ScaledBranch(layers.L2Attention(6, 2), 0.3)),
    }
    return made | {name: layers.ContractiveMLP(6, 12, activation=name) for name in NONEXPANSIVE_ACTIVATIONS}


@pytest.mark.parametrize("name", list(branches()))
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_float32_results_are_within_the_bound_of_float64_ones(name: str, size: float) -> None:
    branch = branches()[name].eval()
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.mul_(1 + 3 * torch.rand(()))
    x = size * torch.randn(4, 7, 6) + size * torch.randn(4, 1, 6)
    bound = evaluation_error(branch, x)
    with torch.no_grad():
        off = (branch(x) - copy.deepcopy(branch).double()(x.double())).abs()
        size_of_result = branch(x).abs().max()
    assert bool((off <= bound).all())
    assert float(bound.max()) <= 1e-2 * float(size_of_result) * max(1.0, size)  # and says something


def test_bound_covers_cancellation_of_the_logits() -> None:
    """Tokens far from each other and large weights, in float64, against 40 digits."""
    for weight in (1.0, 1e3, 1e6, 1e7, 3e7):
        layer = layers.L2Attention(1, 1).double().eval()
        with torch.no_grad():
            for linear, value in ((layer.qk_proj, weight), (layer.v_proj, 1.0), (layer.out_proj, 1.0)):
                linear.weight.fill_(value)
            x = torch.tensor([[[1.0], [1 + 1 / weight], [-1.0], [-1 + 0.7 / weight]]], dtype=torch.float64)
            found = layer(x)[0].flatten()
        with mpmath.workdps(40):
            points, w = [mpmath.mpf(float(each)) for each in x.flatten()], mpmath.mpf(weight)
            for i, a in enumerate(points):
                shares = [mpmath.exp(-((w * (a - b)) ** 2)) for b in points]
                exact = w * w * mpmath.fdot(shares, points) / mpmath.fsum(shares)
                off = abs(mpmath.mpf(float(found[i])) - exact)
                assert off <= float(evaluation_error(AttentionBranch(layer), x).flatten()[i])


def test_sums_and_products_in_any_order_are_covered() -> None:
    a, b = torch.randn(30, 400), torch.randn(400, 20)
    for f in (lambda a: a @ b, lambda a: (a[:, :, None] * b).sum(1), lambda a: (b.T @ a.T).T, lambda a: a.mean(1)):
        off = (f(a) - f(a.double()).float() if f(a).dim() == 1 else f(a).double() - a.double() @ b.double()).abs()
        assert bool((off <= evaluation_error(f, a)).all())


def test_operations_without_a_rule_are_said_to_be_unknown() -> None:
    x = torch.randn(2, 3)
    for f in (torch.round, torch.special.erf, lambda x: torch.linalg.svd(x)[0], lambda x: x.clone().add_(1.0)):
        with pytest.raises(UnknownRounding):
            evaluation_error(f, x)


def test_decisions_that_rounding_could_turn_are_unknown_and_others_are_not() -> None:
    kink = float(torch.tensor(0.3) * 3.1)

    def kinked(x: Tensor) -> Tensor:
        y = x * 3.1
        return torch.where(y > kink, y, 0.0)

    assert evaluation_error(kinked, torch.tensor([2.0, -1.0])).shape == (2,)
    with pytest.raises(UnknownRounding):
        evaluation_error(kinked, torch.tensor([0.3]))


def test_what_softplus_leaves_out_above_its_threshold_is_counted() -> None:
    x = torch.tensor([20.5, 3.0], dtype=torch.float64)
    exact = [float(mpmath.log1p(mpmath.exp(float(each)))) for each in x]
    off = (nn.functional.softplus(x) - torch.tensor(exact, dtype=torch.float64)).abs()
    bound = evaluation_error(nn.functional.softplus, x)
    assert float(off[0]) > 1e-9
    assert bool((off <= bound).all())
    assert float(bound[1]) < 1e-13


class Rounded(nn.Module):
    """A branch whose rounding is not analysed."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * torch.special.erf(x)

    def lipschitz_bound(self, n: int) -> float:
        return 1 / math.pi**0.5


def test_inverse_of_a_branch_with_unknown_rounding_is_not_by_theorem() -> None:
    block = layers.InvertibleResidual(Rounded())
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found = block.inverse(block(x))
    assert not found.by_theorem
    torch.testing.assert_close(found.x, x, rtol=0, atol=1e-11)


def test_shift_of_actnorm_that_cancels_is_counted() -> None:
    norm = ActNorm(1).double().eval()
    nn.init.constant_(norm.shift, 1e9)
    nn.init.constant_(norm.log_scale, 0.3)
    x = torch.rand(5, 1, dtype=torch.float64)
    with torch.no_grad():
        off = (norm.inverse(norm(x)) - x).abs()
    assert float(off.max()) > 1e-9
    assert bool((off <= 2 * norm.inverse_rounding(norm(x).detach())).all())


def test_bound_of_a_whole_branch_is_a_branchs_own() -> None:
    branch: Branch = ScaledBranch(layers.L2Attention(4, 2), 1e-3).eval()
    x = torch.randn(1, 5, 4)
    small, large = evaluation_error(branch, x), evaluation_error(branch.branch, x)
    assert float(small.max()) < 2e-3 * float(large.max())
