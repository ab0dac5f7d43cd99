"""Closed-form Jacobian products against the dense float64 autograd Jacobian, on the whole grid of attention maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from evidence import attention_cases as cases
from evidence.tables import table
from howsmooth._util.common import relative_error
from howsmooth.attention import AttentionMap
from howsmooth.jacobians import attention_jacobian
from howsmooth.testing import by_columns, by_rows, dense_jacobian

TITLE = "Closed-form Jacobians against autograd"


@dataclass
class Agreement:
    """The worst relative errors over the maps of one kind and mask, in the Frobenius norm of the Jacobian."""

    maps: int = 0
    matvec: float = 0.0
    rmatvec: float = 0.0
    adjoint: float = 0.0


def compare(maps: Iterable[tuple[str, AttentionMap]]) -> Agreement:
    """Both products of every map, compared with autograd and with each other."""
    x, worst = cases.tokens(), Agreement()
    for _, attention in maps:
        expected = dense_jacobian(attention, x)
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
