"""`operator_norm`: one entry for every norm, exact for small Jacobians and from products alone for large ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

from torch import Tensor

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.dense import dense_norm
from howsmooth.norms.entry_norms import inf_norm, one_norm
from howsmooth.norms.frobenius import frobenius_norm
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.largest_token import token_norm
from howsmooth.norms.measurement import Measurement, NormKind

_DENSE_BYTES = 2**29
_NAMES: dict[NormKind, NormKind] = {2: 2, "2": 2, 1: 1, "1": 1, math.inf: math.inf, "inf": math.inf, "fro": "fro"}
_NAMES |= {"token": "token"}


@validated
def operator_norm(
    op: JacobianOperator,
    norm: NormKind = 2,
    k: int = 1,
    rtol: float = 1e-3,
    confidence: float = 0.99,
    seed: int = 0,
    dense_limit: int = 256,
    exact_limit: int = 4096,
    start: Tensor | None = None,
    max_steps: int = 1000,
    basis_limit: int | None = None,
    progress: Callable[[int, float], None] | None = None,
    stop_at: Tensor | float | None = None,
) -> Measurement:
    """A norm of every map of ``op``: 2 (with the k largest singular triplets), 1, ``math.inf``, ``"fro"`` or
    ``"token"`` (tokens measured by the largest of their lengths, see `token_norm`).

    With min(in_size, out_size) ≤ ``dense_limit``, and the matrices within half a GiB, the answer comes from the
    matrices and is exact; otherwise from products alone: `golub_kahan`, `one_norm`, `inf_norm`, `frobenius_norm`,
    which say what the further options mean.

    >>> import torch
    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> op = MatrixOperator(torch.diag(torch.linspace(1, 2, 300, dtype=torch.float64)))
    >>> operator_norm(op).method, operator_norm(op, dense_limit=300).method, operator_norm(op, norm="inf").method
    ('golub-kahan', 'dense', 'entries')
    """
    if norm not in _NAMES:
        raise InvalidInput(f"norm={norm!r} is not known: choose 2, 1, inf, 'fro' or 'token'.")
    kind = _NAMES[norm]
    if kind != 2 and (k != 1 or start is not None or stop_at is not None):
        raise InvalidInput(f"k, start and stop_at belong to the 2-norm: leave them out for norm={norm!r}.")
    solver = {"max_steps": max_steps, "basis_limit": basis_limit, "progress": progress}
    common: dict[str, Any] = {"rtol": rtol, "confidence": confidence, "seed": seed, "exact_limit": exact_limit}
    return norm_of(op, kind, k=k, dense_limit=dense_limit, start=start, stop_at=stop_at, solver=solver, **common)


@singledispatch
def norm_of(
    op: JacobianOperator,
    norm: NormKind,
    *,
    k: int,
    dense_limit: int,
    start: Tensor | None,
    stop_at: Tensor | float | None,
    solver: dict[str, Any],
    exact_limit: int,
    **common: Any,
) -> Measurement:
    """`operator_norm` by type of operator; ``common``: rtol, confidence, seed; ``solver``: options of `golub_kahan`."""
    if norm == "token":
        return token_norm(op, exact_limit=exact_limit, **common)
    if is_small(op, dense_limit) and start is None:
        return dense_norm(op, norm, k, common["rtol"])
    if norm == 2:
        return golub_kahan(op, k, start=start, stop_at=stop_at, **common, **solver)
    exact = {1: one_norm, math.inf: inf_norm, "fro": frobenius_norm}[norm]
    return exact(op, exact_limit=exact_limit, **common)


def is_small(op: JacobianOperator, dense_limit: int) -> bool:
    """Whether the matrices themselves are the cheapest way to a norm."""
    entries = op.batch_size * op.in_size * op.out_size
    return min(op.in_size, op.out_size) <= dense_limit and 8 * entries <= _DENSE_BYTES
