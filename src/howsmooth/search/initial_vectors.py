"""Singular vectors to begin with: where the power method of a climb sets out, and what ‖J‖ is at its ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import measure
from howsmooth.search.norm_gradient import AttentionRoughness, Roughness, unit

_ALL_ROWS = 2**20
"""Entries up to which every row of a Jacobian is summed; beyond it rows are chosen by random probes."""
_SOME_ROWS, _PROBES = 32, 24
_ROUNDS = 3
_POWER_ROUNDS, _ROW_TRIES = 10, 4
ROUGH = 1e-2
"""Accuracy that is enough to set out with: the climb itself goes on improving the vectors."""


def norm_at(f: Callable[[Tensor], Any], x: Tensor, norm: float) -> Measurement:
    """‖J(x)‖ at one input in float64: what a witness reports, and what `howsmooth.measure` gives there."""
    return measure(f, x.double(), norm=norm)


def first_vectors(x: Tensor, roughness: Roughness) -> tuple[Tensor, Tensor]:
    """A lower bound on ‖J‖ at every x, ``(starts, n, d)``, and vectors that attain it, for the roughness to follow.

    For attention maps by Golub–Kahan–Lanczos, in the ∞-norm from the rows that are largest on random probes. For
    functions by the power method from random vectors, in the ∞-norm by Boyd's iteration from several.
    """
    if not isinstance(roughness, AttentionRoughness):
        tries = [_by_power(x, roughness, i) for i in range(_ROW_TRIES if roughness.norm == math.inf else 1)]
        values, vectors = map(torch.stack, zip(*tries, strict=True))
        best = values.argmax(0)
        return values.amax(0), vectors[best, torch.arange(len(x))]
    if roughness.norm == math.inf:
        if x[0].numel() * roughness.out_shape(x[0]).numel() <= _ALL_ROWS:
            sums, signs = zip(*(_largest_row(jacobian(roughness.map, one)) for one in x), strict=True)
            return torch.stack(sums), torch.stack(signs)
        return _best_row(jacobian(roughness.map, x))
    measured = measure(roughness.map, x, rtol=ROUGH)
    assert measured.right is not None
    return measured.value, measured.right


def _by_power(x: Tensor, roughness: Roughness, seed: int) -> tuple[Tensor, Tensor]:
    shape = (len(x), *roughness.out_shape(x[0]))
    vectors = unit(torch.randn(shape, generator=random_stream(seed, "vectors to begin with"), dtype=x.dtype))
    for _ in range(_POWER_ROUNDS):
        vectors = roughness.slope(x, vectors).vectors
    return roughness.slope(x, vectors).value, vectors


def _largest_row(op: JacobianOperator) -> tuple[Tensor, Tensor]:
    """‖J‖_∞ of one map, and the signs of the row that attains it."""
    rows = op.rows(torch.arange(op.out_size))
    sums = rows.abs().flatten(1).sum(1)
    return sums.amax(), rows[int(sums.argmax())].sign()


def _best_row(op: JacobianOperator) -> tuple[Tensor, Tensor]:
    """The largest sum of |J| over a row that was looked at, and the signs of that row.

    Those that are largest on probes, and then by Boyd's iteration that of the largest entry of J·(signs of the best).
    """
    generator = random_stream(0, "rows to begin with")
    seen = torch.zeros(op.batch_size, op.out_size, dtype=op.dtype)
    for _ in range(_PROBES):
        probe = torch.randn((*op.batch_shape, *op.in_shape), generator=generator, dtype=op.dtype).sign()
        seen += op.matvec(probe).square().flatten(1)
    best, signs = seen.new_zeros(op.batch_size), seen.new_zeros(*op.batch_shape, *op.in_shape)
    probed = list(seen.topk(min(_SOME_ROWS, op.out_size), dim=1).indices.unbind(1))
    for i in range(len(probed) + _ROUNDS):
        index = probed[i] if i < len(probed) else op.matvec(signs).flatten(1).abs().argmax(1)
        unit_rows = torch.zeros_like(seen).scatter_(1, index[:, None], 1.0)
        row = op.rmatvec(unit_rows.reshape(*op.batch_shape, *op.out_shape))
        sums = row.abs().flatten(1).sum(1)
        better = sums > best
        best, signs = torch.where(better, sums, best), torch.where(better[:, None, None], row.sign(), signs)
    return best, signs
