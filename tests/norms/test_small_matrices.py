"""The norm of small matrices against a singular value decomposition, and at the ends of what can be computed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import vmap

from howsmooth.bounds.layer_constants import linear_constant
from howsmooth.norms.small_matrices import spectral


@pytest.mark.parametrize("shape", [(5, 3, 7), (4, 7, 3), (2, 3, 1, 6), (6, 6)])
@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_value_equals_the_largest_singular_value(shape: tuple[int, ...], size: float) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    expected = torch.linalg.svdvals(matrices)[..., 0] * size
    torch.testing.assert_close(spectral(matrices * size), expected, rtol=1e-14, atol=0)


def test_rounding_of_a_known_spectrum_is_a_few_units_in_the_last_place() -> None:
    basis = torch.linalg.qr(torch.randn(200, 40, 40, dtype=torch.float64)).Q
    matrices = basis * torch.logspace(0, -18, 40, dtype=torch.float64) @ basis.flip(0).mT
    assert float((spectral(matrices) - 1).abs().max()) < 40 * 2.0**-52


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (2, 0, 3)])
def test_an_empty_matrix_has_norm_zero(shape: tuple[int, ...]) -> None:
    assert spectral(torch.zeros(shape)).tolist() == torch.zeros(shape[:-2]).tolist()
    assert linear_constant(torch.zeros(shape[-2:])) == 0


def test_one_bad_matrix_of_many_spoils_no_other() -> None:
    matrices = torch.ones(5, 2, 3, dtype=torch.float64)
    matrices[1, 0, 0], matrices[2, 1, 1], matrices[3, 0, 2] = math.nan, math.inf, -math.inf
    matrices[4] = 0
    expected = [6**0.5, math.nan, math.inf, math.inf, 0.0]
    assert spectral(matrices).tolist() == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_the_derivative_is_the_outer_product_of_the_singular_vectors() -> None:
    matrices = torch.randn(4, 3, 5, dtype=torch.float64)
    matrices[2] = 0
    (gradient,) = torch.autograd.grad(spectral(matrices.requires_grad_()).sum(), matrices)
    left, _, right = torch.linalg.svd(matrices.detach(), full_matrices=False)
    expected = left[..., :1] * right[..., :1, :]
    expected[2] = 0
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_it_may_be_taken_inside_torch_func() -> None:
    matrices = torch.randn(4, 3, 5)
    torch.testing.assert_close(vmap(spectral)(matrices), spectral(matrices))
