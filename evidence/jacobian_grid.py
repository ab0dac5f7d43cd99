"""Closed-form Jacobian products against the dense float64 autograd Jacobian, on the whole grid of attention maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence import attention_cases as cases
from evidence.tables import table
from howsmooth.attention import AttentionMap
from howsmooth.jacobians import JacobianOperator, attention_jacobian

TITLE = "Closed-form Jacobians against autograd"


@dataclass
class Agreement:
    """The worst relative errors over the maps of one kind and mask, in the Frobenius norm of the Jacobian."""

    maps: int = 0
    matvec: float = 0.0
    rmatvec: float = 0.0
    adjoint: float = 0.0


def autograd_jacobian(attention: AttentionMap, x: Tensor) -> Tensor:
    """The dense Jacobian of the readable forward pass, row by row in reverse mode."""
    return torch.func.jacrev(attention)(x).reshape(-1, x.numel())


def by_rows(operator: JacobianOperator) -> Tensor:
    """The dense matrix from ``rmatvec`` alone."""
    rows = JacobianOperator.rows(operator, torch.arange(operator.out_size))  # not the short cut some operators have
    return rows.reshape(operator.out_size, operator.in_size)


def by_columns(operator: JacobianOperator) -> Tensor:
    """The dense matrix from ``matvec`` alone."""
    columns = JacobianOperator.columns(operator, torch.arange(operator.in_size))
    return columns.reshape(operator.in_size, operator.out_size).T


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖_F / ‖expected‖_F."""
    return float((found - expected).norm() / expected.norm())


def compare(maps: Iterable[tuple[str, AttentionMap]]) -> Agreement:
    """Both products of every map, compared with autograd and with each other."""
    x, worst = cases.tokens(), Agreement()
    for _, attention in maps:
        expected = autograd_jacobian(attention, x)
        operator = attention_jacobian(attention, x)
        columns, rows = by_columns(operator), by_rows(operator)
        worst.maps += 1
        worst.matvec = max(worst.matvec, relative_error(columns, expected))
        worst.rmatvec = max(worst.rmatvec, relative_error(rows, expected))
        worst.adjoint = max(worst.adjoint, relative_error(columns, rows))
    return worst


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    rows, total = [], 0
    for kind in cases.KINDS:
        for mask in cases.MASKS:
            progress(f"{kind}, {mask}")
            found = compare(cases.grid(kind, mask))
            total += found.maps
            rows.append([kind, mask, found.maps, f"{found.matvec:.1e}", f"{found.rmatvec:.1e}", f"{found.adjoint:.1e}"])
    return [
        f"{total} attention maps: four kinds × nine masks × heads (one, four, grouped, multi-query) × positions "
        "(none, rotary, partial interleaved rotary, ALiBi, relative) × biases × q/k normalisation, soft-cap and scale. "
        "Each entry is the worst relative error over its maps, in the Frobenius norm: of the matrix built from "
        f"`matvec`, of the one built from `rmatvec`, and between the two. n = {cases.N}, float64, seeds 0 and 1.",
        table(["kind", "mask", "maps", "matvec", "rmatvec", "matvec against rmatvec"], rows),
    ]
