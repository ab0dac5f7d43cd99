r"""The norm of a map from the products of a cheaper one near it, and a few products of its own.

Let J₀ = J − E be cheap, ‖E‖ ≤ ε proved (tiles of attention weights left out), and y a unit vector, found in any way:
say from J₀, then bettered by a step or two with J. With a = |Jy|², r = |JᵀJy − a y| and b ≥ ‖J(1 − yyᵀ)‖,

.. math:: a \le \|J\|^2 \le \frac{a + b^2}{2} + \sqrt{\Bigl(\frac{a - b^2}{2}\Bigr)^2 + r^2}.

*Proof.* For a unit vector z = αy + βp with p ⟂ y, |Jz|² ≤ α²a + 2|αβ| r + β²b², the form of a 2 × 2 matrix whose larger
eigenvalue stands on the right. ∎

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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.truncated_operator import Truncated
from howsmooth.norms.counted_products import product_error, rounding_allowance, widened
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.measurement import Measurement, NormKind
from howsmooth.norms.norm_choice import is_small, norm_of

_NEAR = 1e-2
"""Relative residual of y in J₀."""
_OWN_STEPS = 3
_OF_ROOT = 0.5
"""Relative residual ρ of y in J, in √rtol: the ends are then ρ²/(2 − 2b²/a) apart, half of rtol up to b² = ¾a."""


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


@norm_of.register
def truncated_norm(op: Truncated, norm: NormKind, *, rtol: float, **options: Any) -> Measurement:
    """A norm of the exact maps of a truncated operator.

    Where the error is at most an eighth of ``rtol``, or the norm is not the 2-norm alone, the cheap maps are measured
    and both ends are moved by the error; otherwise the 2-norm comes from `deflated_norm`.
    """
    plain = options["start"] is None and options["stop_at"] is None and options["k"] == 1
    if (
        norm == 2
        and plain
        and not is_small(op, options["dense_limit"])
        and bool((op.error > rtol / 8 * op.lower).any())
    ):
        common = {name: options[name] for name in ("confidence", "seed")}
        return deflated_norm(op, rtol, **common, **options["solver"])
    # With upper ≤ (1 + r) lower of the cheap maps, both ends moved by e ≤ s·lower are (r + (2 + rtol) s) apart.
    share = float(torch.where(op.lower > 0, op.error / op.lower, math.inf).max())
    m = norm_of(op.cheap, norm, rtol=max(rtol - (2 + rtol) * share, rtol / 2), **options)
    tokens, smaller = math.prod(op.in_shape[:-1]), min(op.in_size, op.out_size)
    factor = {2: 1, 1: op.out_size, math.inf: op.in_size, "fro": smaller, "token": tokens}[norm] ** 0.5
    lower, upper = (m.lower - factor * op.error).clamp_min(0.0), m.upper + factor * op.error
    converged = m.converged & (upper <= (1 + rtol) * lower) if m.confidence else m.converged
    notes = tuple(note.partition("; the norm is at least")[0] for note in m.notes)  # of the cheap maps
    return replace(m, lower=lower, upper=upper, converged=converged, notes=notes)


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
    return m if bool(m.converged.all()) else _in_full(op.exact, m, rtol, confidence, seed, started, **given)


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
            if step == _OWN_STEPS or bool((apart <= residual * value.cpu()).all()):
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
    open_maps = (~m.converged).reshape(-1).nonzero().flatten()
    part = exact.subset(open_maps) if len(open_maps) < exact.batch_size else None
    again = golub_kahan(exact if part is None else part, 1, rtol, confidence, seed, **options)
    note = f"{len(open_maps)} of {exact.batch_size} maps were measured with all tiles: what is left out is too much"
    fields: dict[str, Any] = {}
    for name in ("value", "lower", "upper", "converged", "left", "right", "values", "residuals"):
        old, new = getattr(m, name), getattr(again, name)
        if part is not None:
            tail = old.shape[m.value.dim() :]
            fields[name] = old.reshape(-1, *tail).index_put((open_maps.to(old.device),), new).reshape(old.shape)
        else:
            fields[name] = new
    count, seconds = m.products + again.products, time.perf_counter() - started
    return replace(again, **fields, products=count, seconds=seconds, notes=(*again.notes, note))
