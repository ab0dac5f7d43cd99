"""Jacobians that move numbers and mix tokens, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from howsmooth.jacobians import JacobianOperator
from howsmooth.jacobians.linear_moves import MixJacobian, MoveJacobian
from howsmooth.testing import dense_jacobian

N, D = 4, 3


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INDICES = {
    "permuted": torch.arange(N * D).flip(0).reshape(N, D),
    "repeated": torch.arange(6).reshape(2, 3).repeat(3, 1),
    "one number": torch.full((2, 5), 7),
    "absent": torch.tensor([[-1, 3, -1], [11, -1, 0]]),
    "nothing": torch.full((2, 2), -1),
    "a first token": torch.arange(D)[None],
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_moved_numbers_equal_a_dense_matrix(name: str, scaled: bool) -> None:
    index, x = INDICES[name], tokens(N, D)
    factor = tokens(*index.shape, seed=1) if scaled else None

    def function(x: Tensor) -> Tensor:
        y = torch.where(index < 0, 0, x.flatten()[index.clamp_min(0)])
        return y if factor is None else y * factor

    check(MoveJacobian(x, index, factor), dense_jacobian(function, x))


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_mixed_tokens_equal_a_dense_matrix(rows: int) -> None:
    matrix, x = tokens(rows, N, seed=2), tokens(N, D)
    check(MixJacobian(x, matrix), dense_jacobian(lambda x: matrix @ x, x))


def check(J: JacobianOperator, exact: Tensor) -> None:
    torch.testing.assert_close(J.dense(), exact, rtol=1e-14, atol=0)
    torch.testing.assert_close(J.adjoint.dense(), exact.mT, rtol=1e-14, atol=0)
    v, u = tokens(*J.in_shape, seed=3), tokens(*J.out_shape, seed=4)
    assert float((J.matvec(v) * u).sum()) == pytest.approx(float((v * J.rmatvec(u)).sum()), rel=1e-12, abs=1e-12)
    size, norm = float(J.size()), float(torch.linalg.matrix_norm(exact, 2))
    assert norm * (1 - 1e-12) <= size
    if isinstance(J, MoveJacobian):
        assert size == pytest.approx(norm, abs=1e-12)
    rounded = J.rounded(torch.float32)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.dense().double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["moves", "mixes"])
def test_a_batch_and_its_parts_are_the_same_map(kind: str) -> None:
    x = tokens(5, N, D)
    J: JacobianOperator = (
        MoveJacobian(x, INDICES["absent"], tokens(2, 3)) if kind == "moves" else MixJacobian(x, tokens(2, N))
    )
    v = tokens(5, N, D, seed=5)
    single = type(J)(x[0], *([INDICES["absent"], tokens(2, 3)] if kind == "moves" else [tokens(2, N)]))
    for item, pushed in zip(v, J.matvec(v), strict=True):
        torch.testing.assert_close(pushed, single.matvec(item))
    u = tokens(5, *J.out_shape, seed=6)
    torch.testing.assert_close(J.rmatvec(u)[2], single.rmatvec(u[2]))
    assert torch.as_tensor(J.size()).shape == (5,)
    part = J.subset(torch.tensor([4, 0]))
    assert part is not None
    assert part.batch_shape == (2,)
    torch.testing.assert_close(part.matvec(v[[4, 0]]), J.matvec(v)[[4, 0]])
