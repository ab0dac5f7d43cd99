r"""The norm of a map from the products of a cheaper one that is near it, and a few products of its own.

Let J₀ = J − E be cheap, ‖E‖ ≤ ε proved (tiles of attention weights left out), and y a unit vector, found in any way:
say from J₀, then bettered by a step or two with J. With a = |Jy|², r = |JᵀJy − a y| and b ≥ ‖J(1 − yyᵀ)‖,

.. math:: a \le \|J\|^2 \le \frac{a + b^2}{2} + \sqrt{\Bigl(\frac{a - b^2}{2}\Bigr)^2 + r^2}.

*Proof.* For a unit vector z = αy + βp with p ⟂ y, |Jz|² ≤ α²a + 2|αβ| r + β²b², the form of a 2 × 2 matrix whose larger
eigenvalue stands on the right. ∎

The upper end is above a by about r²/(a − b²) only. So b need not be sharp: b = b₀ + ε will do, where
b₀ ≥ ‖J₀(1 − yyᵀ)‖ comes from a rough certificate (`howsmooth.norms.certificate`) with a start drawn independently of y,
and ε may be a tenth of the norm or more, as long as b stays below |Jy|. By Weyl's inequality alone ε itself would be
added to both ends.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.golub_kahan import golub_kahan
from howsmooth.norms.measurement import Measurement
from howsmooth.norms.products import absolute_noise, left_out, rounding_allowance, widened
from howsmooth.small import random_stream

_NEAR, _ROUGH = 1e-2, (0.2, 0.03)
"""Relative residual of y in J₀, and the accuracies of b₀ that are tried one after the other."""
_OWN_STEPS = 4
_OF_ROOT = 0.5
"""Relative residual ρ of y in J, in √rtol: the ends are then ρ²/(2 − 2b²/a) apart, half of rtol up to b² = ¾a."""


class Deflated(JacobianOperator):
    """J(1 − yyᵀ) for unit vectors y, one for every map, ``batch_shape + in_shape``; nothing counts as left out.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> J = Deflated(MatrixOperator(torch.diag(torch.tensor([3.0, 2.0]))), torch.tensor([1.0, 0.0]))
    >>> J.matvec(torch.tensor([1.0, 1.0]))
    tensor([0., 2.])
    """

    def __init__(self, op: JacobianOperator, y: Tensor):
        self.op, self.y = op, y
        self.batch_shape, self.in_shape, self.out_shape = op.batch_shape, op.in_shape, op.out_shape
        self.dtype, self.device, self.method = op.dtype, op.device, op.method
        self.blur, self.noise, self.scatter = op.blur, op.noise, op.scatter

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


def too_much_left_out(op: JacobianOperator, rtol: float) -> bool:
    """Whether ends moved by what was left out would be further apart than an eighth of ``rtol`` allows."""
    return op.whole is not None and bool((left_out(op) > rtol / 8 * op.whole.least.reshape(-1)).any())


def deflated_norm(op: JacobianOperator, rtol: float, confidence: float, seed: int, **options: Any) -> Measurement:
    """‖J‖₂ of every map of ``op.whole``, of which ``op`` is what is left; maps that this cannot certify run in full."""
    assert op.whole is not None
    started = time.perf_counter()
    random = torch.randn(*op.batch_shape, *op.in_shape, generator=random_stream(seed, "guess"), dtype=op.dtype)
    guess = golub_kahan(op, 1, max(rtol, _NEAR), confidence, seed, start=random.to(op.device), **options)
    near = golub_kahan(op.whole, 1, _OF_ROOT * rtol**0.5, confidence, seed, _OWN_STEPS, start=guess.right)
    assert near.right is not None
    count = guess.products + near.products
    for rough in _ROUGH:  # from the same start: one event covers both
        rest = golub_kahan(Deflated(op, near.right), 1, max(rtol, rough), confidence, seed, **options)
        count += rest.products
        missing, most = left_out(op).reshape(op.batch_shape), (1 + rtol) * near.lower
        upper = _upper(op, near, rest.upper + missing)
        converged = upper <= most
        if bool((converged | (_upper(op, near, rest.lower + missing) > most)).all()):  # a sharper b₀ would not help
            break
    m = replace(near, upper=upper, confidence=confidence, products=count, method="golub-kahan, deflated", notes=())
    m = replace(m, converged=converged, seconds=time.perf_counter() - started)
    return m if bool(converged.all()) else _in_full(op.whole, m, rtol, confidence, seed, started, **options)


def _upper(op: JacobianOperator, near: Measurement, b: Tensor) -> Tensor:
    """The bound of the theorem, with what rounding may do to a and r."""
    assert op.whole is not None
    assert near.residuals is not None
    noise = absolute_noise(op.whole).reshape(op.batch_shape)
    allowance = rounding_allowance(op.dtype, 4, op.blur)
    _, high = widened(near.value, allowance, noise)
    r = high * (near.residuals[..., 0] + 2 * (noise + allowance * high))
    a, b = high**2, (b * (1 + allowance)) ** 2
    return torch.sqrt((a + b) / 2 + torch.sqrt(((a - b) / 2) ** 2 + r**2)) * (1 + allowance)


def _in_full(
    whole: JacobianOperator, m: Measurement, rtol: float, confidence: float, seed: int, started: float, **options: Any
) -> Measurement:
    """The same measurement, with the maps that are not certified measured again without leaving anything out."""
    open_maps = (~m.converged).reshape(-1).nonzero().flatten()
    part = whole.subset(open_maps) if len(open_maps) < whole.batch_size else None
    again = golub_kahan(whole if part is None else part, 1, rtol, confidence, seed, **options)
    note = f"{len(open_maps)} of {whole.batch_size} maps were measured with all tiles: what is left out is too much"
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
