"""Gradient-step attention: a gradient step indeed, one block per row, and clear refusals."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from howsmooth.attention.gradient_step_map import GradientStepAttention
from howsmooth.testing import dense_jacobian


def _attention(seed: int, step: float = 0.7) -> GradientStepAttention:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    return GradientStepAttention(matrix, torch.randn(5, 2, dtype=torch.float64, generator=generator), step)


def test_it_is_a_step_down_the_gradient_of_log_sum_exp() -> None:
    attention, x = _attention(0), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    potential = torch.logsumexp(x @ attention.matrix @ attention.context.T, dim=-1).sum()
    (gradient,) = torch.autograd.grad(potential, x)
    torch.testing.assert_close(attention(x), x - 0.7 * gradient, rtol=1e-14, atol=1e-14)


def test_the_jacobian_of_a_row_is_one_minus_step_times_covariance() -> None:
    attention, x = _attention(1), torch.randn(4, 3, dtype=torch.float64)
    dense = torch.func.jacrev(attention)(x)  # (4, 3, 4, 3)
    for i in range(4):
        p = torch.softmax(x[i] @ attention.points.T, dim=-1)
        covariance = torch.cov(attention.points.T, aweights=p, correction=0)
        expected = torch.zeros(3, 4, 3, dtype=torch.float64)
        expected[:, i] = torch.eye(3, dtype=torch.float64) - 0.7 * covariance
        torch.testing.assert_close(dense[i], expected, rtol=1e-12, atol=1e-13)


def test_measured_value_equals_dense_svd() -> None:
    attention, x = _attention(2, step=9.0), torch.randn(4, 3, dtype=torch.float64)
    dense = dense_jacobian(attention, x)
    assert float(hs.measure(attention, x, rtol=1e-6)) == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=1e-6
    )


def test_batches_are_items_side_by_side() -> None:
    attention, x = _attention(3), torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(attention(x), torch.stack([attention(item) for item in x]), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("step", [-0.1, float("nan"), float("inf")])
def test_a_step_must_be_finite_and_not_negative(step: float) -> None:
    with pytest.raises(hs.InvalidInput, match="the step must be finite and not negative"):
        _attention(4, step)


@pytest.mark.parametrize("shapes", [((3, 2), (5, 3)), ((3, 2), (0, 2)), ((3,), (5, 3))])
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(hs.InvalidInput, match="needs a matrix"):
        GradientStepAttention(torch.ones(shapes[0]), torch.ones(shapes[1]), 1.0)


def test_it_says_what_it_is() -> None:
    attention = _attention(5)
    assert (attention.kind, attention.in_features, attention.out_features) == ("gradient_step", 3, 3)
    assert "3 → 3, keys=5, step=0.7" in repr(attention)
