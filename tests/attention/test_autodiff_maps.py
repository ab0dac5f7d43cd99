"""Gradient-step and LipschitzNorm attention: their definitions, their limits and how they are measured."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch

import howsmooth as hs
from howsmooth.attention.autodiff_maps import GradientStepAttention, LipschitzNormAttention
from howsmooth.jacobians.function_operator import DerivativeWarning
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


def test_measured_value_of_a_gradient_step_equals_dense_svd() -> None:
    attention, x = _attention(2, step=9.0), torch.randn(4, 3, dtype=torch.float64)
    dense = dense_jacobian(attention, x)
    assert float(hs.measure(attention, x, rtol=1e-6)) == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=1e-6
    )


def test_batches_of_gradient_steps_are_items_side_by_side() -> None:
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


def test_a_gradient_step_names_its_kind() -> None:
    attention = _attention(5)
    assert (attention.kind, attention.in_features, attention.out_features) == ("gradient_step", 3, 3)
    assert "3 → 3, keys=5, step=0.7" in repr(attention)


def _weights(seed: int, width: int = 4) -> torch.Tensor:
    return torch.randn(4, width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_forward_follows_the_definition_head_by_head() -> None:
    weights, x = _weights(0), torch.randn(5, 4, dtype=torch.float64)
    q, k, v, o = weights.numpy()
    expected = np.zeros((5, 4))
    for h in (slice(0, 2), slice(2, 4)):
        query, key, value = x.numpy() @ q[h].T, x.numpy() @ k[h].T, x.numpy() @ v[h].T
        u, kappa, omega = np.linalg.norm(query), *(max(np.linalg.norm(t, axis=1)) for t in (key, value))
        scores = query @ key.T / max(u * kappa, u * omega, kappa * omega)
        expected += scipy.special.softmax(scores, axis=1) @ value @ o.T[h]
    np.testing.assert_allclose(LipschitzNormAttention(*weights, heads=2)(x), expected, rtol=1e-13, atol=1e-14)


def test_batches_are_items_side_by_side() -> None:
    attention, x = LipschitzNormAttention(*_weights(1), heads=2), torch.randn(3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(attention(x), torch.stack([attention(item) for item in x]), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(attention.divisor(x)[1], attention.divisor(x[1]), rtol=1e-14, atol=0)


def test_scores_do_not_change_when_tokens_are_scaled() -> None:
    attention, x = LipschitzNormAttention(*_weights(2)), torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(attention(100 * x), 100 * attention(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vanishing", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_where_the_divisor_vanishes_the_output_is_the_mean_and_the_limit(vanishing: tuple[int, ...]) -> None:
    weights, x = _weights(3)[:3], torch.randn(5, 4, dtype=torch.float64)
    gone = weights.clone()
    gone[list(vanishing)] = 0
    attention = LipschitzNormAttention(*gone)
    assert attention.divisor(x) == 0
    mean = (x @ gone[2].T).mean(0).expand(5, -1)
    torch.testing.assert_close(attention(x), mean, rtol=1e-14, atol=1e-14)
    for order in ((1e-9,) * 3, (1e-9, 1e-12, 1e-15), (1e-15, 1e-12, 1e-9)):
        near = gone.clone()
        for index in vanishing:
            near[index] = order[index] * weights[index]
        torch.testing.assert_close(LipschitzNormAttention(*near)(x), mean, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_the_zero_input_is_measured_as_the_plain_mean() -> None:
    attention = LipschitzNormAttention(*_weights(4)[:3])
    with pytest.warns(DerivativeWarning, match="a kink at x"):  # the map is homogeneous and not linear
        measured = float(hs.measure(attention, torch.zeros(5, 4, dtype=torch.float64)))
    assert measured == pytest.approx(float(torch.linalg.matrix_norm(_weights(4)[2], 2)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_measured_value_equals_dense_svd(heads: int) -> None:
    attention, x = LipschitzNormAttention(*_weights(5), heads=heads), torch.randn(6, 4, dtype=torch.float64)
    dense = dense_jacobian(attention, x)
    assert float(hs.measure(attention, x, rtol=1e-6)) == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=1e-6
    )


@pytest.mark.slow
def test_the_jacobian_includes_the_divisor_s_own_derivative() -> None:
    attention, x = LipschitzNormAttention(*_weights(6)), torch.randn(4, 4, dtype=torch.float64)
    tangent, step = torch.randn(4, 4, dtype=torch.float64), 1e-6
    difference = (attention(x + step * tangent) - attention(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(hs.jacobian(attention, x).matvec(tangent), difference, rtol=1e-7, atol=1e-7)


def test_the_map_has_a_kink_where_another_token_becomes_the_largest() -> None:
    attention = LipschitzNormAttention(*torch.ones(3, 1, 1, dtype=torch.float64))

    def slope(side: float) -> torch.Tensor:
        x = torch.tensor([[1.0], [-1.0 + side], [0.3]], dtype=torch.float64)
        return dense_jacobian(attention, x)

    assert (slope(1e-9) - slope(-1e-9)).abs().max() > 1e-2
    assert (slope(1e-9) - slope(2e-9)).abs().max() < 1e-7


def test_wrong_shapes_are_refused_in_a_sentence() -> None:
    with pytest.raises(hs.InvalidInput, match="do not split into 3 heads"):
        LipschitzNormAttention(*_weights(7), heads=3)


def test_it_says_what_it_is() -> None:
    attention = LipschitzNormAttention(*_weights(8), heads=2)
    assert (attention.kind, attention.in_features, attention.out_features, attention.heads) == (
        "lipschitz_norm",
        4,
        4,
        2,
    )
    assert "4 → 4, heads=2" in repr(attention)
