"""Spectral norms of slowly changing matrices."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.nn import weight_norms
from howsmooth.nn.weight_norms import SpectralNorm, fingerprint, top_singular_vectors


def matrix(*sizes: float, rows: int = 7, columns: int = 5) -> Tensor:
    """A matrix with prescribed singular values."""
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (rows, columns))
    return left[:, : len(sizes)] * torch.tensor(sizes, dtype=torch.float64) @ right[: len(sizes)]


def test_exact_norm_equals_the_prescribed_singular_value() -> None:
    for sizes in ((3.0, 1.0), (2.0, 2.0, 2.0), (1e-200, 1e-201), (1e150,), (0.0,)):
        found = SpectralNorm(7, 5).eval()(matrix(*sizes))
        torch.testing.assert_close(found, torch.tensor(sizes[0], dtype=torch.float64), rtol=1e-12, atol=0)


def test_estimate_is_a_lower_bound_that_converges() -> None:
    norm, m = SpectralNorm(7, 5, width=1).double().train(), matrix(3.0, 2.5, 1.0)
    found = [float(norm(m)) for _ in range(80)]
    assert found[0] < 2.99
    assert max(found) <= 3.0 * (1 + 1e-14)
    assert all(a <= b * (1 + 1e-14) for a, b in pairwise(found))
    assert found[-1] == pytest.approx(3.0, rel=1e-9)


def test_estimate_stays_where_it_is_when_told_so() -> None:
    norm, m = SpectralNorm(7, 5).double().train(), matrix(3.0, 2.5)
    before = norm.space.clone()
    norm(m, follow=False)
    assert torch.equal(norm.space, before)


def test_subspace_as_wide_as_the_matrix_is_exact_at_once() -> None:
    norm = SpectralNorm(7, 5).double().train()
    for _ in range(5):
        m = torch.randn(7, 5, dtype=torch.float64)
        torch.testing.assert_close(norm(m), torch.linalg.matrix_norm(m, 2), rtol=1e-12, atol=0)


def test_subspace_keeps_up_where_one_vector_falls_behind() -> None:
    """Training pushes singular values together; here the largest ten are equal and turn a little in every step."""
    wide, single = (SpectralNorm(60, 60, width=width).double().train() for width in (32, 1))
    left, right = (torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q for _ in range(2))
    sizes = torch.ones(60, dtype=torch.float64)
    sizes[10:] = 0.5
    turn = torch.linalg.matrix_exp(0.05 * (left - left.T))
    errors: dict[int, float] = {32: 0.0, 1: 0.0}
    for step in range(60):
        sizes[0], sizes[step % 10] = 1.0, 1.3
        left = turn @ left
        m = left * sizes @ right
        sizes[step % 10] = 1.0
        found = {32: float(wide(m)), 1: float(single(m))}
        if step >= 10:  # both have had time to arrive
            errors = {width: max(errors[width], 1 - found[width] / 1.3) for width in found}
    assert errors[32] < 0.01 < 0.1 < errors[1]


def test_nan_in_training_passes_through() -> None:
    assert SpectralNorm(2, 2).train()(torch.full((2, 2), math.nan)).isnan()


@pytest.mark.parametrize("training", [True, False])
def test_gradient_equals_that_of_the_matrix_norm(training: bool) -> None:
    norm, m = SpectralNorm(7, 5).double(), matrix(3.0, 1.0).requires_grad_()
    norm.follow(m, 200)
    (found,) = torch.autograd.grad(norm.train(training)(m), m)
    (expected,) = torch.autograd.grad(torch.linalg.matrix_norm(m, 2), m)
    torch.testing.assert_close(found, expected)


def test_two_forward_passes_before_one_backward_pass_are_fine() -> None:
    norm, m = SpectralNorm(7, 5).double().train(), matrix(3.0, 1.0).requires_grad_()
    (norm(m) + norm(2 * m)).backward()
    assert m.grad is not None
    assert m.grad.isfinite().all()


def test_same_matrix_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    svd = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: calls.append(1) or svd(*a, **k))
    weight_norms._DECOMPOSED.clear()
    m = matrix(3.0, 1.0)
    for _ in range(3):
        top_singular_vectors(m)
    assert len(calls) == 1
    m.data[0, 0] += 1e-9
    top_singular_vectors(m)
    assert len(calls) == 2


def test_memory_of_decompositions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_norms, "_REMEMBERED", 3)
    for _ in range(6):
        top_singular_vectors(torch.randn(2, 2))
    assert len(weight_norms._DECOMPOSED) == 3


def test_fingerprint_sees_permutations_signs_and_single_entries() -> None:
    m = torch.randn(6, 6)
    changed = [
        m.flip(0),
        m.flip(1),
        m.T,
        -m,
        m.clone().index_put_((torch.tensor(3), torch.tensor(4)), torch.tensor(9.0)),
    ]
    prints = {fingerprint(part) for part in (m, *changed)}
    assert len(prints) == 6
    assert fingerprint(m.clone()) == fingerprint(m)


def test_vectors_handed_out_can_be_changed_without_harm() -> None:
    m = matrix(3.0, 1.0)
    top_singular_vectors(m)[0].zero_()
    assert float(top_singular_vectors(m)[0].norm()) == pytest.approx(1.0)


def test_matrix_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        top_singular_vectors(torch.full((2, 2), math.nan))
