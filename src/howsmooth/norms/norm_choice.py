r"""`operator_norm`: one entry for every norm, exact for small Jacobians and from products alone for large ones.

**Truncated operators.** The norm of a map follows from the products of a cheaper one near it, and a few of its own.
Let J₀ = J − E be cheap, ‖E‖ ≤ ε proved (tiles of attention weights left out), and y a unit vector, found in any way:
say from J₀, then bettered by a step or two with J. With a = |Jy|², r = |JᵀJy − a y| and b ≥ ‖J(1 − yyᵀ)‖,

.. math:: a \le \|J\|^2 \le \frac{a + b^2}{2} + \sqrt{\Bigl(\frac{a - b^2}{2}\Bigr)^2 + r^2}.

*Proof.* For a unit vector z = αy + βp with p ⟂ y, |Jz|² ≤ α²a + 2|αβ| r + β²b², the form of a 2 × 2 matrix whose larger
eigenvalue is on the right. ∎

The upper end is above a by about r²/(a − b²) only. So b need not be sharp: b = b₀ + ε will do, where
b₀ ≥ ‖J₀(1 − yyᵀ)‖ comes from a rough run (`howsmooth.norms.lanczos_bound`) with a start drawn independently of
y, and ε may be a tenth of the norm or more, as long as b stays below |Jy|. By Weyl's inequality alone ε itself would be
added to both ends.

Products with y need not be exact either (`Truncated.matvec_within`). With |Jy − su| ≤ e for s = |su| and
|(computed Jᵀu) − Jᵀu| ≤ e', a lies within [(s − e)², (s + e)²] and

.. math:: r = |(1 - yy^T)J^TJy| \le s\,|(1 - yy^T)J^Tu| + be \le s\,(|(computed\ J^Tu) - sy| + e') + be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.truncated_operator import Truncated
from howsmooth.norms.counted_products import product_error, rounding_allowance, widened
from howsmooth.norms.entry_norms import dense_norm, frobenius_norm, inf_norm, one_norm
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.largest_token import token_norm
from howsmooth.norms.measurement import Measurement, NormKind

_DENSE_BYTES = 2**29
_KINDS = (2, 1, math.inf, "fro", "token")
_FROM_TEXT: dict[NormKind, NormKind] = {"2": 2, "1": 1, "inf": math.inf}
_NEAR = 1e-2
"""Relative residual of y in J₀."""
_OWN_STEPS = 3
_OF_ROOT = 0.5
"""Relative residual ρ of y in J, in √rtol: the ends are then ρ²/(2 − 2b²/a) apart, half of rtol up to b² = ¾a."""


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
    which say what the further options mean. Of a `Truncated` operator the exact maps are measured: where its error is
    at most an eighth of ``rtol``, or the norm is not the 2-norm alone, from the cheap maps with both ends moved by the
    error; otherwise by `deflated_norm`.

    >>> import torch
    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> op = MatrixOperator(torch.diag(torch.linspace(1, 2, 300, dtype=torch.float64)))
    >>> operator_norm(op).method, operator_norm(op, dense_limit=300).method, operator_norm(op, norm="inf").method
    ('golub-kahan', 'dense', 'entries')
    """
    kind = _FROM_TEXT.get(norm, norm)
    if kind not in _KINDS:
        raise InvalidInput(f"norm={norm!r} is not known: choose 2, 1, inf, 'fro' or 'token'.")
    plain = k == 1 and start is None and stop_at is None
    if kind != 2 and not plain:
        raise InvalidInput(f"k, start and stop_at belong to the 2-norm: leave them out for norm={norm!r}.")
    solver: dict[str, Any] = {"max_steps": max_steps, "basis_limit": basis_limit, "progress": progress}
    entries = 8 * op.batch_size * op.in_size * op.out_size
    small = min(op.in_size, op.out_size) <= dense_limit and entries <= _DENSE_BYTES

    def solve(op: JacobianOperator, rtol: float) -> Measurement:
        if small and start is None and kind != "token":
            return dense_norm(op, kind, k, rtol)
        if kind == 2:
            return golub_kahan(op, k, rtol, confidence, seed, start=start, stop_at=stop_at, **solver)
        from_entries = {1: one_norm, math.inf: inf_norm, "fro": frobenius_norm, "token": token_norm}[kind]
        return from_entries(op, rtol, confidence, seed, exact_limit)

    if not isinstance(op, Truncated):
        return solve(op, rtol)
    if kind == 2 and plain and not small and (op.error > rtol / 8 * op.lower).any():
        return deflated_norm(op, rtol, confidence, seed, **solver)
    # With upper ≤ (1 + r) lower of the cheap maps, both ends moved by e ≤ s·lower are (r + (2 + rtol) s) apart.
    share = float(torch.where(op.lower > 0, op.error / op.lower, math.inf).max())
    return _moved_ends(op, solve(op.cheap, max(rtol - (2 + rtol) * share, rtol / 2)), rtol)


def _moved_ends(op: Truncated, m: Measurement, rtol: float) -> Measurement:
    """The measurement of the cheap maps of a truncated operator, both ends moved by its error."""
    tokens, smaller = math.prod(op.in_shape[:-1]), min(op.in_size, op.out_size)
    factor = {2: 1, 1: op.out_size, math.inf: op.in_size, "fro": smaller, "token": tokens}[m.norm] ** 0.5
    lower, upper = (m.lower - factor * op.error).clamp_min(0.0), m.upper + factor * op.error
    converged = m.converged & (upper <= (1 + rtol) * lower) if m.confidence else m.converged
    notes = tuple(note.partition("; the norm is at least")[0] for note in m.notes)  # of the cheap maps
    return replace(m, lower=lower, upper=upper, converged=converged, notes=notes)


class Deflated(JacobianOperator):
    """J(1 − yyᵀ) for unit vectors y, one for every map, ``batch_shape + in_shape``.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> J = Deflated(MatrixOperator(torch.diag(torch.tensor([3.0, 2.0]))), torch.tensor([1.0, 0.0]))
    >>> J.matvec(torch.tensor([1.0, 1.0]))
    tensor([0., 2.])
    """

    def __init__(self, op: JacobianOperator, y: Tensor):
        self.op, self.y = op, y
        self.batch_shape, self.in_shape, self.out_shape = op.batch_shape, op.in_shape, op.out_shape
        self.dtype, self.device, self.method, self.accuracy = op.dtype, op.device, op.method, op.accuracy

    def matvec(self, v: Tensor) -> Tensor:
        return self.op.matvec(self._without(v))

    def rmatvec(self, u: Tensor) -> Tensor:
        return self._without(self.op.rmatvec(u))

    def subset(self, index: Tensor) -> JacobianOperator | None:
        op = self.op.subset(index)
        return None if op is None else Deflated(op, self.y.reshape(-1, *self.in_shape)[index])

    def _without(self, v: Tensor) -> Tensor:
        axes = tuple(range(-len(self.in_shape), 0))
        return v - (v * self.y).sum(axes, keepdim=True) * self.y


def deflated_norm(op: Truncated, rtol: float, confidence: float, seed: int, **given: Any) -> Measurement:
    """‖J‖₂ of every exact map from its cheap one; maps that this leaves open are measured with exact products."""
    started = time.perf_counter()
    start = op.start
    if start is None:
        start = torch.randn(*op.batch_shape, *op.in_shape, generator=random_stream(seed, "guess"), dtype=op.dtype)
    # Another seed: the bound needs a start that is independent of y.
    options = {**given, "start": start.to(op.device), "verify": False}
    rough = golub_kahan(op.cheap, 1, max(rtol, _NEAR), confidence, seed + 1, **options)
    assert rough.right is not None
    near = _Near.of(op, rough.right, rtol)
    largest = (1 + rtol) * near.lower
    enough = near.enough(largest) - op.error
    options = {**given, "stop_at": enough, "stop_below": enough, "verify": False}
    rest = golub_kahan(Deflated(op.cheap, near.right), 1, rtol, confidence, seed, **options)
    upper = near.upper(rest.upper + op.error)
    m = Measurement(
        value=near.value,
        lower=near.lower,
        upper=upper,
        confidence=confidence,
        norm=2,
        converged=upper <= largest,
        products=rough.products + near.products + rest.products,
        method="golub-kahan, deflated",
        dtype=op.dtype,
        seconds=time.perf_counter() - started,
        left=near.left,
        right=near.right,
        values=near.value[..., None],
        residuals=near.residual[..., None],
        rounding=op.accuracy.guarantee,
    )
    return m if m.converged.all() else _in_full(op.exact, m, rtol, confidence, seed, started, **given)


@dataclass(frozen=True)
class _Near:
    """A unit vector y, ``right``, and what is known of it, for every map.

    Attributes:
        value: |Jy| up to ``dropped`` and rounding.
        lower, high: both ends of |Jy|.
        residual: how far Jᵀu is from |Jy| y, and J y from |Jy| u, at most, rounding apart.
        rounding: by how much a product may be off, absolutely; ``allowance``: relatively.
    """

    left: Tensor
    right: Tensor
    value: Tensor
    lower: Tensor
    high: Tensor
    residual: Tensor
    dropped: Tensor
    rounding: Tensor
    allowance: float
    products: int

    @classmethod
    def of(cls, op: Truncated, y: Tensor, rtol: float) -> _Near:
        """From steps of power iteration, until the residual is small enough.

        The last y is one whose product with JᵀJ is known, so that one step takes two products. These need not be exact:
        of |Jy| a tenth of rtol may be missing, of Jᵀu a quarter of the residual.
        """
        batch, axes = op.batch_shape, tuple(range(-len(op.in_shape), 0))

        def length(x: Tensor) -> Tensor:
            return torch.linalg.vector_norm(x, dim=axes, dtype=torch.float64)

        def times(x: Tensor, number: Tensor) -> Tensor:
            return x * number.to(x).reshape(*batch, *[1] * len(axes))

        residual = _OF_ROOT * rtol**0.5
        for step in range(1, _OWN_STEPS + 1):
            y = times(y, 1 / length(y))
            u, dropped = op.matvec_within(y, rtol / 10 * op.lower)
            value = length(u)
            u = times(u, torch.where(value > 0, 1 / value, 0.0))
            back, dropped_back = op.rmatvec_within(u, residual / 4 * op.lower)
            apart = length(back - times(y, value)).cpu() + dropped + dropped_back
            if step == _OWN_STEPS or (apart <= residual * value.cpu()).all():
                break
            y = back
        value, error = value.cpu(), product_error(op.exact).reshape(batch)
        allowance = rounding_allowance(op.dtype, 4, op.exact.accuracy.point)
        lower, high = widened(value, allowance, error + dropped)
        rounding = 2 * (error + allowance * high)
        return cls(u, y, value, lower, high, apart, dropped, rounding, allowance, 2 * step)

    def upper(self, b: Tensor) -> Tensor:
        """The bound of the theorem on ‖J‖ with this b."""
        r = self.high * (self.residual + self.rounding) + (b - self.high).clamp_min(0.0) * self.dropped
        a, b = self.high**2, (b * (1 + self.allowance)) ** 2
        return torch.sqrt((a + b) / 2 + torch.sqrt(((a - b) / 2) ** 2 + r**2)) * (1 + self.allowance)

    def enough(self, limit: Tensor) -> Tensor:
        """The largest b with which that bound is at most ``limit``, or 0; a little less for rounding.

        λ is no less than the eigenvalues of the form with a, b² and r when (λ − a)(λ − b²) ≥ r² and λ > a.
        """
        room = (limit / (1 + self.allowance)) ** 2
        r, over = self.high * (self.residual + self.rounding), room - self.high**2
        square = torch.where(over > 0, room - r**2 / over, 0.0)
        return square.clamp_min(0.0).sqrt() / (1 + self.allowance) * (1 - 1e-9)


def _in_full(
    exact: JacobianOperator, m: Measurement, rtol: float, confidence: float, seed: int, started: float, **options: Any
) -> Measurement:
    """The same measurement, with the open maps measured again by exact products."""
    open_maps = (~m.converged).flatten().nonzero().flatten()
    part = exact.subset(open_maps) if len(open_maps) < exact.batch_size else None
    again = golub_kahan(exact if part is None else part, 1, rtol, confidence, seed, **options)
    note = f"{len(open_maps)} of {exact.batch_size} maps were measured with all tiles: the dropped tiles weigh too much"
    fields: dict[str, Any] = {}
    for name in ("value", "lower", "upper", "converged", "left", "right", "values", "residuals"):
        old, new = getattr(m, name), getattr(again, name)
        if part is not None:
            tail = old.shape[m.value.dim() :]
            new = old.reshape(-1, *tail).index_put((open_maps.to(old.device),), new).reshape(old.shape)
        fields[name] = new
    count, seconds = m.products + again.products, time.perf_counter() - started
    return replace(again, **fields, products=count, seconds=seconds, notes=(*again.notes, note))
