"""Sums and products of operators against dense float64 matrices, and what they say of their own rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import IdentityJacobian, JacobianOperator, MatrixOperator
from howsmooth.jacobians.algebra import Product, Sum
from howsmooth.jacobians.operator import Accuracy, power_bound
from howsmooth.norms import operator_norm


class OnTokens(MatrixOperator):
    """A matrix on tokens (n, d) instead of flat vectors."""

    def __init__(self, matrix: Tensor, n: int, d: int):
        super().__init__(matrix)
        self.in_shape = self.out_shape = torch.Size([n, d])

    def matvec(self, v: Tensor) -> Tensor:
        return (self.matrix @ v.reshape(-1)).reshape(v.shape)

    def rmatvec(self, u: Tensor) -> Tensor:
        return (self.matrix.mT @ u.reshape(-1)).reshape(u.shape)

    def subset(self, index: Tensor) -> None:  # type: ignore[override]
        return None


def matrices(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def dense(op: JacobianOperator) -> Tensor:
    return op.dense().double()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_sums_and_products_equal_those_of_matrices(batch: tuple[int, ...]) -> None:
    a, b, c = matrices(3, *batch, 7, 7)
    A, B, C = map(MatrixOperator, (a, b, c))
    torch.testing.assert_close(dense(A @ B @ C), a @ b @ c)
    torch.testing.assert_close(dense(A + B + C), a + b + c)
    torch.testing.assert_close(dense(A @ (B + C)), a @ (b + c))
    torch.testing.assert_close(dense((A @ B).adjoint), (a @ b).mT)


def test_products_of_products_are_one() -> None:
    A, B, C, D = map(MatrixOperator, matrices(4, 5, 5))
    whole = (A @ B) @ (C @ D)
    assert isinstance(whole, Product)
    assert whole.parts == (A, B, C, D)


def test_a_part_of_the_batch_is_cut_out_of_every_part() -> None:
    a, b = matrices(2, 4, 6, 6)
    index = torch.tensor([1, 3])
    cut = (MatrixOperator(a) @ MatrixOperator(b) + MatrixOperator(a)).subset(index)
    assert cut is not None
    torch.testing.assert_close(dense(cut), (a @ b + a)[index])


def test_what_does_not_fit_is_refused() -> None:
    a, b = MatrixOperator(torch.ones(3, 4)), MatrixOperator(torch.ones(2, 3))
    assert (b @ a).out_shape == (2,)
    with pytest.raises(InvalidInput, match="do not follow each other"):
        a @ b
    with pytest.raises(InvalidInput, match="one shape add up"):
        a + b
    with pytest.raises(InvalidInput, match="map by map"):
        MatrixOperator(torch.ones(2, 3, 3)) + MatrixOperator(torch.ones(3, 3))
    with pytest.raises(TypeError):
        a @ 2  # type: ignore[operator]


@pytest.mark.parametrize("n", [3, 50])
def test_power_bound_is_above_the_norm_and_not_far(n: int) -> None:
    for seed in range(20):
        matrix = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        bound = float(power_bound(MatrixOperator(matrix), seed=seed))
        assert norm <= bound <= 12 * norm


def error_of_product(op: JacobianOperator, exact: Tensor) -> float:
    """The norm of the whole error, from products with unit vectors."""
    return float(torch.linalg.matrix_norm(dense(op) - exact, 2))


@pytest.mark.parametrize("offset", [1.0, 1e4])
def test_noise_covers_what_cancellation_in_a_sum_leaves(offset: float) -> None:
    """(c·1 + A) − c·1: the parts are ten thousand times their sum."""
    (a,) = matrices(1, 40, 40)
    large = offset * torch.eye(40, dtype=torch.float64)
    parts = [(large + a / 40).float(), -large.float()]
    whole = Sum([MatrixOperator(part) for part in parts])
    exact = sum(part.double() for part in parts)
    assert isinstance(exact, Tensor)
    error = error_of_product(whole, exact)
    assert error <= float(torch.as_tensor(whole.accuracy.product))
    m = operator_norm(whole, dense_limit=1)
    assert m.lower <= torch.linalg.matrix_norm(exact, 2) <= m.upper


@pytest.mark.slow
def test_without_the_noise_of_parts_an_end_would_be_wrong() -> None:
    """A negative control: what a sum of large parts states is needed."""
    wrong = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        u, v = (torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64)).Q for _ in range(2))
        small = u @ torch.diag(torch.linspace(0.1, 1, 60, dtype=torch.float64)) @ v
        large = 1e6 * torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64)).Q
        parts = [(large + small).float(), -large.float()]
        exact = torch.linalg.matrix_norm(parts[0].double() + parts[1].double(), 2)
        whole = Sum([MatrixOperator(part) for part in parts])
        m = operator_norm(whole, dense_limit=1)
        assert m.lower <= exact <= m.upper
        whole.accuracy = Accuracy()
        bare = operator_norm(whole, dense_limit=1)
        wrong += not bool(bare.lower <= exact <= bare.upper)
    assert wrong


def test_a_product_carries_the_noise_of_its_parts() -> None:
    a, b = (MatrixOperator(2 * torch.eye(3, dtype=torch.float64)) for _ in range(2))
    a.accuracy = Accuracy(product=0.5)
    bound = float(power_bound(b))
    noise = float(torch.as_tensor((a @ b).accuracy.product))
    assert 0.5 * 2 <= noise == pytest.approx(0.5 * bound, rel=1e-6)


@pytest.mark.parametrize("gamma", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_of_maps_near_the_identity_contain_the_truth(gamma: float, dtype: torch.dtype) -> None:
    """x + γ⟨a, x⟩a, which float32 cannot tell from x for the smallest γ: σ = 1 + γ."""
    n, d = 20, 40
    a = torch.randn(n * d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    a = (a / a.norm()).to(dtype)
    branch = OnTokens(gamma * a[:, None] * a, n, d)
    whole = IdentityJacobian(torch.Size([n, d]), dtype, torch.device("cpu")) + branch
    truth = 1 + gamma * float(a.double() @ a.double())
    for seed in range(5):
        m = operator_norm(whole, seed=seed)
        assert float(m.lower) <= truth <= float(m.upper)
    assert math.isfinite(float(m.upper))


def test_the_jacobian_of_a_residual_block_is_a_sum() -> None:
    attention = hs.SelfAttention.random(8, heads=2, seed=0)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention = attention.in_dtype(torch.float64)
    J = IdentityJacobian.like(x) + hs.jacobian(attention, x)
    own = torch.autograd.functional.jacobian(lambda t: t + attention(t), x).reshape(48, 48)
    torch.testing.assert_close(J.dense(), own)
    assert float(hs.norms.operator_norm(J, dense_limit=1)) == pytest.approx(
        float(torch.linalg.matrix_norm(own, 2)), rel=1e-3
    )
