"""`operator_norm`: one entry for every norm, exact for small Jacobians and from products alone for large ones."""

from __future__ import annotations

import math
from collections.abc import Callable

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
from howsmooth.norms.truncated_norm import deflated_norm, too_much_left_out

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
    if kind == "token":
        return token_norm(op, rtol, confidence, seed, exact_limit)
    small = min(op.in_size, op.out_size) <= dense_limit
    if small and 8 * op.batch_size * op.in_size * op.out_size <= _DENSE_BYTES and start is None:
        return dense_norm(op, kind, k, rtol)
    if kind == 2 and k == 1 and start is None and stop_at is None and too_much_left_out(op, rtol):
        options = {"max_steps": max_steps, "basis_limit": basis_limit, "progress": progress}
        return deflated_norm(op, rtol, confidence, seed, **options)
    if kind == 2:
        return golub_kahan(op, k, rtol, confidence, seed, max_steps, basis_limit, start, progress, stop_at)
    exact = {1: one_norm, math.inf: inf_norm, "fro": frobenius_norm}[kind]
    return exact(op, rtol=rtol, confidence=confidence, seed=seed, exact_limit=exact_limit)
