"""Matrices with a prescribed spectrum: the oracle of the norm tests knows its singular values by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.jacobians.operator import JacobianOperator, MatrixOperator

_RANKS = torch.arange(1000, dtype=torch.float64)


def _linear(r: int) -> Tensor:
    return torch.linspace(1, 1 / r, r, dtype=torch.float64)


def _top_cluster(r: int) -> Tensor:
    """Five values 1e-3 apart on top of a linear tail that starts 1e-3 below them."""
    values = (1 - 0.005) * _linear(r)
    values[:5] = 1 - 1e-3 * _RANKS[:5]
    return values.sort(descending=True).values


def _low_rank(r: int) -> Tensor:
    return torch.where(_RANKS[:r] < max(2, r // 10), _linear(r), 0.0)


def _outlier(r: int) -> Tensor:
    return torch.cat([torch.ones(1, dtype=torch.float64), 0.3 * _linear(r - 1)])


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "geometric": lambda r: 0.9 ** _RANKS[:r],
    "linear": _linear,
    "two values 1e-3 apart": lambda r: torch.cat([1 - 1e-3 * _RANKS[:2], 0.9 * _linear(r - 2)]),
    "cluster 1e-3 apart": _top_cluster,
    "all within 1e-3": lambda r: 1 - 1e-3 * torch.linspace(0, 1, r, dtype=torch.float64),
    "triple top": lambda r: torch.cat([torch.ones(3, dtype=torch.float64), 0.95 * _linear(r - 3)]),
    "low rank": _low_rank,
    "outlier": _outlier,
}


def orthogonal(count: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """``count`` matrices (rows, columns) with orthonormal columns, Haar distributed."""
    q, r = torch.linalg.qr(torch.randn(count, rows, columns, generator=generator, dtype=torch.float64))
    return q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)


def with_spectrum(values: Tensor, count: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """``count`` matrices (rows, columns) with these singular values and random singular vectors."""
    left = orthogonal(count, rows, len(values), generator)
    right = orthogonal(count, columns, len(values), generator)
    return (left * values) @ right.mT


@dataclass
class Family:
    """A batch of operators and their true singular values (maps, r), known in float64 for the matrices as stored."""

    name: str
    op: JacobianOperator
    sigma: Tensor


def families(sizes: list[tuple[int, int]], count: int, dtype: torch.dtype, seed: int) -> Iterator[Family]:
    """Every spectrum at every size, ``count`` maps each, and random matrices."""
    generator = torch.Generator().manual_seed(seed)
    for rows, columns in sizes:
        for name, spectrum in SPECTRA.items():
            values = 3.7 * spectrum(min(rows, columns))
            matrix = with_spectrum(values, count, rows, columns, generator).to(dtype)
            # Rounding the entries to float32 moves the singular values; for float64 the construction is exact enough.
            exact = dtype == torch.float64
            sigma = values.expand(count, -1) if exact else torch.linalg.svdvals(matrix.double())
            yield Family(f"{name} {rows}×{columns}", MatrixOperator(matrix), sigma)
        matrix = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64).to(dtype)
        yield Family(f"gaussian {rows}×{columns}", MatrixOperator(matrix), torch.linalg.svdvals(matrix.double()))
