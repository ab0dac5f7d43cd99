"""Log-determinants and their gradients against slogdet of the dense Jacobian, error bars against the truth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence import log_determinants
from howsmooth.nn import ContractiveL2Attention, CosineAttention
from howsmooth.nn.invertible.branches import (
    AttentionBranch,
    Branch,
    ComposedBranch,
    ContractiveMLP,
    ScaledBranch,
    causal_blocks,
    l2_blocks,
)
from howsmooth.nn.invertible.log_determinant import METHODS, LogDeterminant, sum_log_determinants
from howsmooth.nn.invertible.residual import InvertibleResidual


def tokens(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dense(block: InvertibleResidual, x: Tensor) -> Tensor:
    return torch.tensor([log_determinants.Case(block, item).truth() for item in x], dtype=torch.float64)


class RunningMean(nn.Module):
    """A causal map that is not attention: y_i = c·tanh(mean of x_j, j ≤ i); its matrix has norm below 2."""

    reach = "past"

    def forward(self, x: Tensor) -> Tensor:
        return 0.45 * torch.tanh(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None])

    def lipschitz_bound(self, n: int) -> float:
        return 0.9


def causal_branches() -> dict[str, Branch | nn.Module]:
    torch.manual_seed(0)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    lower[4, 1] = False
    layer = ContractiveL2Attention(4, 2, 0.9)
    wide = AttentionBranch(ContractiveL2Attention(6, 2), "causal")
    return {
        "causal": AttentionBranch(layer, "causal"),
        "window": AttentionBranch(layer, hs.SlidingWindow(2)),
        "lower triangular booleans": AttentionBranch(layer, lower),
        "inf norm": AttentionBranch(ContractiveL2Attention(4, 1, 0.9, "inf"), "causal"),
        "map": ScaledBranch(hs.L2SelfAttention(*torch.randn(3, 4, 4), heads=2, mask="causal"), 0.005),
        "cosine": ScaledBranch(AttentionBranch(CosineAttention(4, 2), "causal"), 1e-6),
        "network": ContractiveMLP(4, 8, 0.9),
        "composition": ComposedBranch(
            ContractiveMLP(4, 8, 1.0, out_width=6), wide, ContractiveMLP(6, 8, 1.0, out_width=4)
        ),
        "not attention": RunningMean(),
    }


@pytest.mark.parametrize("name", list(causal_branches()))
def test_blocks_equal_the_dense_determinant(name: str) -> None:
    block = InvertibleResidual(causal_branches()[name]).double().eval()
    x = tokens(3, 5, 4)
    found = block.log_det(x)
    assert found.method == "blocks"
    assert found.exact
    assert float(found.error_bar().max()) == 0
    torch.testing.assert_close(found.value.detach(), dense(block, x), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_evidence_of_exact_determinants_over_100_maps() -> None:
    assert max(case.off("blocks")[0] for case in log_determinants.cases(100, "causal")) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("method", ["series", "roulette"])
def test_evidence_of_error_bars_over_100_maps(method: str) -> None:
    """Inside at 99.99 %; at 90 % nine in ten are or more, but not all: the bars are little wider than they say."""
    found = [case.off(method, seed) for seed, case in enumerate(log_determinants.cases(100, None))]  # type: ignore[arg-type]
    assert all(error <= wide for error, _, wide in found)
    assert 85 <= sum(error <= narrow for error, narrow, _ in found) <= 99


@pytest.mark.parametrize("case", [name for name, case in log_determinants.HARD.items() if case[-1] == "series"])
@pytest.mark.parametrize("samples", [2, 16])
def test_error_bars_cover_what_they_say_where_samples_are_few_and_skewed(case: str, samples: int) -> None:
    """200 trials: 4 outside at 99 % or 18 at 95 % would have a probability below 1 in 50 if the bars were right."""
    covered = log_determinants.coverage(case, samples, trials=200)
    assert covered[0.99] >= 197
    assert covered[0.95] >= 183


@pytest.mark.parametrize("c", [0.999, 0.9995])
def test_roulette_says_what_its_cut_leaves_out(c: float) -> None:
    """f(x) = −c·x has the truth 4·log(1 − c); the mean of many samples is off by no more than is said."""
    block = InvertibleResidual(_Diagonal(-c)).double().eval()
    with torch.no_grad():
        found = block.log_det(tokens(1, 2, 2), "roulette", samples=256, generator=torch.Generator().manual_seed(0))
    truth = 4 * math.log(1 - c)
    assert float(found.truncation) == pytest.approx(4 * c**1001 / (1001 * (1 - c)))
    assert abs(float(found.value) - truth) <= float(found.error_bar(0.99))
    assert bool(((found.value - truth).abs() <= found.limit).all())  # type: ignore[operator]


def test_cut_of_roulette_is_nothing_to_speak_of_for_ordinary_coefficients() -> None:
    block = InvertibleResidual(_Diagonal(-0.9)).double().eval()
    with torch.no_grad():
        assert float(block.log_det(tokens(1, 2, 2), "roulette", samples=4).truncation) < 1e-40


def test_samples_that_are_all_alike_have_no_error_bar_of_zero() -> None:
    """A swap of two coordinates: v ↦ v₁v₂, which two samples agree on half of the time."""
    block = InvertibleResidual(log_determinants.Map(lambda x: 0.9 * x.flip(-1), 0.9)).double().eval()
    x = torch.zeros(50, 1, 2, dtype=torch.float64)
    with torch.no_grad():
        found = block.log_det(x, "series", samples=2, generator=torch.Generator().manual_seed(0))
    assert bool((found.standard_error == 0).any())
    assert bool(((found.value - math.log(1 - 0.81)).abs() <= found.error_bar(0.9)).all())


def test_blocks_without_a_causal_mask_are_refused_and_would_be_wrong() -> None:
    block = InvertibleResidual(ContractiveL2Attention(4, 2, 0.9)).double().eval()
    x = tokens(1, 5, 4) / 4
    with pytest.raises(hs.DoesNotApply, match="depends on later tokens"):
        block.log_det(x, "blocks")
    blocks = block.branch.diagonal_blocks(x).detach()
    wrong = torch.linalg.slogdet(torch.eye(4, dtype=torch.float64) + blocks).logabsdet.sum(1)
    assert float((wrong - dense(block, x)).abs().max()) > 1e-4


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("value_factor", [True, False])
def test_closed_form_of_l2_blocks_is_that_of_autograd(mask: str | None, value_factor: bool) -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 6, 6, dtype=torch.float64)
    attention = hs.L2SelfAttention(*weights, heads=3, mask=mask, value_factor=value_factor)
    x = tokens(2, 5, 6) / 4
    torch.testing.assert_close(l2_blocks(attention, x), causal_blocks(attention, x).detach(), rtol=0, atol=1e-11)


def test_untied_l2_attention_does_not_take_the_closed_form() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    attention = hs.L2SelfAttention(one, one, one, key=one / 2, mask="causal")
    x = tokens(1, 4, 1)
    truth = causal_blocks(attention, x).detach()
    torch.testing.assert_close(AttentionBranch(attention).diagonal_blocks(x).detach(), truth)
    assert float((l2_blocks(attention, x) - truth).abs().max()) > 1e-2


@pytest.mark.parametrize("method", ["blocks", "dense"])
@pytest.mark.parametrize("name", ["causal", "network", "composition", "not attention"])
def test_gradients_equal_those_of_the_dense_determinant(method: str, name: str) -> None:
    block = InvertibleResidual(causal_branches()[name]).double().eval()
    x = tokens(1, 4, 4).requires_grad_()
    wanted = [x, *block.parameters()]
    jacobian = torch.autograd.functional.jacobian(lambda t: block.branch(t[None])[0], x[0], create_graph=True)
    truth = torch.linalg.slogdet(torch.eye(16, dtype=torch.float64) + jacobian.reshape(16, 16)).logabsdet
    value = block.log_det(x, method).value.sum()  # type: ignore[arg-type]
    expected = torch.autograd.grad(truth, wanted, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_gradient_of_the_series_is_that_of_its_value() -> None:
    block = InvertibleResidual(ContractiveL2Attention(2, 1, 0.8)).double().eval()

    def value(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return block.log_det(x, "series", samples=3, tolerance=1e-8, generator=generator).value

    assert torch.autograd.gradcheck(value, tokens(1, 3, 2).requires_grad_())


@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("tolerance", [10.0, 0.1, 1e-3])
def test_cut_of_the_series_is_below_its_bound(norm: float, tolerance: float) -> None:
    """The same vectors with and without a cut: what is left out is at most what the result says."""
    mlp = ContractiveMLP(3, 6, 0.9, norm=norm)
    with torch.no_grad():
        for weight in mlp.linears.parameters():
            weight.mul_(5)
    block = InvertibleResidual(mlp, norm=norm).double().eval()
    x = tokens(4, 5, 3)

    def found(tolerance: float) -> LogDeterminant:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            return block.log_det(x, "series", samples=4, tolerance=tolerance, generator=generator)

    rough, fine = found(tolerance), found(1e-13)
    left_out = (rough.value - fine.value).abs()
    assert float(left_out.max()) > 1e-9
    assert bool((left_out <= rough.truncation).all())
    assert bool((rough.truncation <= tolerance).all())


def test_cut_is_never_worse_than_the_bound_from_c_alone() -> None:
    block = InvertibleResidual(ContractiveMLP(3, 6, 0.9)).double().eval()
    found = block.log_det(tokens(2, 5, 3), "series", tolerance=1e9)  # one term
    assert bool((found.truncation <= 15 * 0.9**2 / (2 * 0.1)).all())


def test_roulette_is_unbiased_where_the_first_terms_are_not() -> None:
    block = InvertibleResidual(_Diagonal(-0.9)).double().eval()  # log det = n·d·log(0.1), every sample alike
    x = tokens(1, 3, 2)
    truth = 6 * math.log(0.1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = block.log_det(x, "roulette", samples=3000, generator=generator)
        two_terms = 6 * (-0.9 - 0.9**2 / 2)
    assert abs(float(found.value) - truth) <= 4 * float(found.standard_error)
    assert abs(two_terms - truth) > 20 * float(found.standard_error)


class _Diagonal(nn.Module):
    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x

    def lipschitz_bound(self, n: int) -> float:
        return abs(self.slope)


def test_auto_takes_the_cheapest_exact_way_and_the_series_for_the_rest() -> None:
    attention = ContractiveL2Attention(4, 2, 0.5)
    with torch.no_grad():
        assert InvertibleResidual(attention, mask="causal").eval().log_det(torch.randn(5, 4)).method == "blocks"
        assert InvertibleResidual(attention).eval().log_det(torch.randn(5, 4)).method == "dense"
        found = InvertibleResidual(attention).eval().log_det(torch.randn(2, 70, 4), samples=4)
    assert found.method == "series"
    assert found.value.shape == (2,)


def test_large_causal_determinant_agrees_with_the_dense_one() -> None:
    block = InvertibleResidual(ContractiveL2Attention(8, 2, 0.9), mask="causal").double().eval()
    x = tokens(1, 40, 8)
    with torch.no_grad():
        torch.testing.assert_close(block.log_det(x).value, dense(block, x), rtol=0, atol=1e-9)


def test_totals_add_values_and_cuts_and_square_errors() -> None:
    part = LogDeterminant(torch.ones(2), torch.full((2,), 3.0), torch.ones(2), "series", 8)
    other = LogDeterminant(torch.ones(2), torch.full((2,), 4.0), torch.zeros(2), "roulette", 4)
    exact = LogDeterminant(torch.ones(2), torch.zeros(2), torch.zeros(2), "blocks")
    found = sum_log_determinants([part, other, exact])
    assert found.value.tolist() == [3, 3]
    assert found.standard_error.tolist() == [5, 5]
    assert found.truncation.tolist() == [1, 1]
    assert (found.samples, found.exact, found.method) == (4, False, "series + roulette + blocks")
    assert found.limit is None
    limited = [replace(part, limit=torch.full((2,), 7.0)), replace(other, limit=torch.full((2,), 2.0)), exact]
    assert sum_log_determinants(limited).limit.tolist() == [9, 9]  # type: ignore[union-attr]
    assert sum_log_determinants(limited).error_bar(0.9999).tolist() == [9, 9]


def test_bad_requests_are_refused() -> None:
    block = InvertibleResidual(ContractiveMLP(2, 3)).eval()
    x = torch.zeros(3, 2)
    with pytest.raises(hs.InvalidInput, match=METHODS[0]):
        block.log_det(x, "exactly")  # type: ignore[arg-type]
    with pytest.raises(hs.InvalidInput, match="samples must be at least 2"):
        block.log_det(x, "series", samples=1)
    with pytest.raises(hs.InvalidInput, match="tolerance must be positive"):
        block.log_det(x, "series", tolerance=math.nan)
    with pytest.raises(hs.InvalidInput, match="between 0 and 1"):
        block.log_det(x).error_bar(1.0)
    with pytest.raises(hs.InvalidInput, match="NaN"):
        block.log_det(x * math.nan)
    uncertified = InvertibleResidual(_Diagonal(0.5), coefficient=0.5).eval()
    with torch.no_grad():
        uncertified.branch.module.slope = 2.0  # type: ignore[union-attr]
    with pytest.raises(hs.DoesNotApply, match="no theorem"):
        uncertified.log_det(x, "dense")
