"""Eigenvalues that a Cholesky factorisation proves, where its rounding is as bad as the theorem allows for."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from howsmooth.certificates.point.proved_eigenvalue import cholesky_bound

N, GUESS = 64, 2.0


def one_by_one(matrix: Tensor, check_errors: bool = True) -> SimpleNamespace:
    """Cholesky's factorisation by the textbook: every product is subtracted by itself, and rounded by itself."""
    work = matrix.clone()
    for k in range(len(work)):
        if not work[k, k] > 0:
            return SimpleNamespace(info=k + 1)
        column = work[k + 1 :, k] / work[k, k].sqrt()
        work[k + 1 :, k + 1 :] -= torch.outer(column, column)
    return SimpleNamespace(info=0)


def lossy(level: float) -> tuple[Tensor, Fraction]:
    """A Gram matrix G with a norm a little above ``level``, and that norm less the level, in units of the level.

    G = c + b eᵀ + e bᵀ with one number b_j for every other token: ‖G‖ = c + |b|. In the factorisation of level − G
    all squares of the small b_j are lost, one by one, against the last entry on the diagonal.
    """
    inner = 1 + 2.0**-10
    small = torch.full((N - 2,), (0.95 * 2.0**-53 * inner) ** 0.5 * inner**0.5, dtype=torch.float64)
    row = torch.cat([small, torch.tensor([inner * (1 - 2.0**-53 * 2)], dtype=torch.float64)])
    gram = (level - inner) * torch.eye(N, dtype=torch.float64)
    gram[-1, :-1] = gram[:-1, -1] = row
    squares = sum(Fraction(b) ** 2 for b in row.tolist())
    above = (squares - Fraction(inner) ** 2) / (2 * Fraction(inner) + 1)  # at most |b| − inner
    return gram, above / Fraction(level)


def test_a_norm_that_rounding_hides_from_the_factorisation_is_still_below_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = GUESS * (1 + 1e-3)
    gram, above = lossy(level)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", one_by_one)
    bound = cholesky_bound(gram, GUESS)
    assert bound is not None
    assert bound < level * (1 + 1e-9)  # it is proved at the first level that is tried
    assert float(above) > 4 * 2.0**-53  # further above it than the rounding of the level itself
    assert Fraction(level) * (1 + above) <= Fraction(bound)
