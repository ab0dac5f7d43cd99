"""The largest eigenvalue of a Gram matrix, proved in floating point.

A Cholesky factorisation of A = λI − G that runs to completion proves ‖G‖ ≤ λ + 2γ_{N+2} tr A (Rump 2006, *Verification
of positive definiteness*, BIT 46; Higham 2002, Theorem 10.3). Deflation by an orthonormal U proves
‖G‖ ≤ ½(μ + c) + (¼(μ − c)² + ρ²)^½ from μ = ‖UᵀGU‖, ρ = ‖GU − UUᵀGU‖ and c = ‖(I − UUᵀ)G(I − UUᵀ)‖_F.

Proof: docs/theory/certificates-point.md, section "The largest eigenvalue".
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.point_bounds import top
from howsmooth.numerics.roundoff import gamma

_RAISES = (1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.25, 1.0)
_STEPS = 150
_SETTLED = 1e-3


def top_eigenvalue(gram: Tensor) -> tuple[float, Tensor]:
    """A Ritz value and its unit vector, by Lanczos with full orthogonalisation; the value is ≤ ‖G‖ up to rounding."""
    v = torch.randn(len(gram), dtype=gram.dtype, generator=torch.Generator().manual_seed(0))
    basis, products = (v / v.norm())[:, None], gram.new_empty(len(gram), 0)
    while True:
        last = gram @ basis[:, -1]
        products = torch.cat([products, last[:, None]], 1)
        small = basis.mT @ products
        values, vectors = torch.linalg.eigh((small + small.mT) / 2)
        value, leading = float(values[-1]), vectors[:, -1]
        residual = float((products @ leading - value * (basis @ leading)).norm())
        rest = last - basis @ (basis.mT @ last)
        rest = rest - basis @ (basis.mT @ rest)
        small_rest = float(rest.norm()) <= 1e-12 * abs(value)
        if residual <= _SETTLED * value or small_rest or basis.shape[1] == min(_STEPS, len(gram)):
            vector = basis @ leading
            return value, vector / vector.norm()
        basis = torch.cat([basis, (rest / rest.norm())[:, None]], 1)


def cholesky_bound(gram: Tensor, guess: float) -> float | None:
    """A number that ‖G‖ does not exceed, a little above the guess; None where none near it can be proved.

    >>> round(cholesky_bound(torch.diag(torch.tensor([1.0, 4.0]).double()), 4.0), 3)
    4.004
    """
    work = torch.empty_like(gram)
    for raised in _RAISES:
        level = guess * (1 + raised)
        torch.neg(gram, out=work)
        work.diagonal().add_(level)
        trace = float(work.diagonal().sum())
        if int(torch.linalg.cholesky_ex(work, check_errors=False).info) == 0:
            return level + 2 * gamma(len(gram) + 2) * trace + gamma(4) * level
    return None


def top_bounds(rows: Tensor, guesses: Tensor) -> Tensor:
    """Numbers that the norms of RᵀR do not exceed, ``(b, m, d) → (b,)``, a little above guesses that are not too low.

    Where nothing near the guess is proved, the eigenvalues, which are computed to within γ times the trace.

    >>> top_bounds(torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]]).double(), torch.tensor([25.0, 0.5]).double())
    tensor([25.0250,  1.0000], dtype=torch.float64)
    """
    m, d = rows.shape[-2:]
    grams, size = rows @ rows.mT if m < d else rows.mT @ rows, min(m, d)
    levels, open_ = torch.full_like(guesses, torch.inf), torch.ones_like(guesses, dtype=torch.bool)
    for raised in _RAISES[:2]:
        trial = guesses[open_] * (1 + raised)
        work = torch.diag_embed(trial[:, None].expand(-1, size)) - grams[open_]
        proved = torch.linalg.cholesky_ex(work, check_errors=False).info == 0
        levels[open_] = torch.where(proved, trial, torch.inf)
        open_ = levels == torch.inf
    levels[open_] = top(grams[open_])
    return levels * (1 + gamma(4)) + gamma(16 * (m + d)) * (rows.square().sum((-2, -1)) + size * levels)


def deflated_bound(squares: float, basis: Tensor, products: Tensor, off: float = 0.0) -> float:
    """The bound of the module from ‖G‖_F², an orthonormal U and GU, all of a G known to within ``off`` in ‖·‖_F.

    >>> g = torch.diag(torch.tensor([4.0, 1.0, 0.5]).double())
    >>> deflated_bound(float(g.square().sum()), torch.eye(3, 1).double(), g[:, :1])
    4.000...
    """
    small = basis.mT @ products
    rest = products - basis @ small
    size = squares**0.5 + off
    # U is orthonormal to within this, and products with it are rounded: a change of G of this size covers both.
    error = gamma(16 * basis.numel()) * (size + float(products.norm())) + off
    mu = float(torch.linalg.matrix_norm(small, 2)) + error
    rho = float(torch.linalg.matrix_norm(rest, 2)) + error
    remaining = size**2 * (1 + gamma(64)) - float(small.square().sum()) - 2 * float(rest.square().sum())
    c = (max(remaining, 0.0) + 8 * error * (size + error)) ** 0.5
    return (0.5 * (mu + c) + (0.25 * (mu - c) ** 2 + rho**2) ** 0.5) * (1 + gamma(8))
