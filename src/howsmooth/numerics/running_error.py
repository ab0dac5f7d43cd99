r"""Running error analysis: bounds on the rounding error of a computation, operation by operation.

Every tensor t̃ of a computation carries a bound e with :math:`|\tilde t - t| \le e`, entry by entry, t being the result
in exact arithmetic (Wilkinson 1986; Higham 2002, §3.3). An operation passes the errors of its operands on, by its
derivatives or by a bound on them, and adds its own: with u = ε/2, :math:`\gamma_k = ku/(1-ku)`,

.. math:: |\tilde a\tilde b - ab| \le |\tilde a|e_b + |\tilde b|e_a + e_ae_b + u|\tilde a\tilde b|, \qquad
          |\widetilde{AB} - AB| \le (|\tilde A| + E_A)E_B + E_A|\tilde B| + \gamma_k|\tilde A||\tilde B|,

the latter for any order of the sums. A softmax whose logits are off by λ has weights off by at most a factor
:math:`e^{2\lambda}`. Nothing is assumed about signs, so the bound is a proof, and larger than measured errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from howsmooth.numerics.roundoff import gamma, unit_roundoff

aten = torch.ops.aten
_Rule = Callable[..., Tensor]
ELEMENTARY = 4
"""Error of exp, tanh and the like in units in the last place; those of torch are within 1 or 2."""
SAFETY = 1.01
"""Factor for the rounding of the bounds themselves."""


class UnknownRounding(Exception):
    """An operation without a rule."""


def evaluation_error(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Bound |f̃(x) − f(x)|, entry by entry: the computed result against exact arithmetic on the same x and weights.

    Raises:
        UnknownRounding: f has an operation without a rule.

    >>> x = torch.tensor([[1e8, 1.0, -1e8]])
    >>> bound = evaluation_error(lambda x: x.sum(-1), x)
    >>> bool(bound >= abs(float(x.sum(-1)) - 1.0))
    True
    """
    with torch.no_grad(), _Running() as running:
        out = f(x)
        error = running.error(out)
    return torch.zeros_like(out) if error is None else SAFETY * error


class _Running(TorchDispatchMode):
    """Computes the error of every operation while it runs; tensors from elsewhere are exact."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the stored tensor keeps its id from being reused

    def error(self, tensor: Any) -> Tensor | None:
        """Return the error of a tensor, None for zero."""
        entry = self._errors.get(id(tensor))
        return None if entry is None else entry[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket
        if name in _SHAPES or name in _PIECES:
            errors = self._reshaped(func, args, kwargs)
            if errors is not None:
                self._store(out, errors)
            return out
        if name is torch.ops.howsmooth.top_singular_vectors:  # any u, v of length one are exact
            for vector in out:
                self._store(vector, _unit(vector) * len(vector) * vector.abs())
            return out
        if not isinstance(out, Tensor) or not out.is_floating_point():
            if isinstance(out, tuple | list):
                raise UnknownRounding(str(func))
            self._check_decision(func, args)
            return out
        if not any(isinstance(a, Tensor) for a in args):
            return out  # computed from numbers alone
        rule = _RULES.get(name)
        if rule is None:
            raise UnknownRounding(str(func))
        self._store(out, rule(self, out, *args, **kwargs).masked_fill(~out.isfinite(), 0.0))
        return out

    def _check_decision(self, func: Any, args: Any) -> None:
        """Refuse booleans and numbers that rounding may have changed."""
        inexact = [a for a in args if isinstance(a, Tensor) and self.error(a) is not None]
        if not inexact or func.overloadpacket in (aten.isfinite, aten.isnan):
            return
        if func.overloadpacket in _COMPARISONS:
            apart, room = (args[0] - args[1]).abs(), self.of(args[0]) + self.of(args[1])
            if ((apart > room) | apart.isnan() | (room == 0)).all():
                return
        raise UnknownRounding(str(func))

    def _store(self, out: Any, error: Any) -> None:
        if isinstance(out, Tensor):
            self._errors[id(out)] = (out, error)
        else:
            for each, its in zip(out, error, strict=True):
                self._store(each, its)

    def _reshaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply the same change of shape to the errors."""
        if func.overloadpacket in (aten.cat, aten.stack):
            if all(self.error(tensor) is None for tensor in args[0]):
                return None
            return func([self.of(tensor) for tensor in args[0]], *args[1:], **kwargs)
        error = self.error(args[0])
        return None if error is None else func(error, *args[1:], **kwargs)

    def of(self, value: Any) -> Any:
        """Return the error of an operand: zeros when it is exact, 0 for a number."""
        if not isinstance(value, Tensor):
            return 0.0
        error = self.error(value)
        return torch.zeros_like(value) if error is None else error


def _unit(like: Tensor) -> float:
    return unit_roundoff(like.dtype)


def _tiny(like: Tensor) -> float:
    """Bound the cost of underflow in one operation."""
    return torch.finfo(like.dtype).tiny


def _size(value: Any) -> Any:
    """Return |value|, and 0 for the ±∞ of masks, which are exact."""
    return value.abs().masked_fill(~value.isfinite(), 0.0) if isinstance(value, Tensor) else abs(value)


def _ulp(out: Tensor) -> Tensor:
    """Return u·|out|, the rounding of one operation."""
    return _unit(out) * _size(out)


def _sum(run: _Running, out: Tensor, a: Any, b: Any, *, alpha: float = 1, **_: Any) -> Tensor:
    return run.of(a) + abs(alpha) * run.of(b) + 2 * _ulp(out) + (alpha != 1) * _unit(out) * _size(b)


def _product(run: _Running, out: Tensor, a: Any, b: Any, **_: Any) -> Tensor:
    ea, eb = run.of(a), run.of(b)
    return _size(a) * eb + _size(b) * ea + ea * eb + _ulp(out) + _tiny(out)


def _quotient(run: _Running, out: Tensor, a: Any, b: Any, **_: Any) -> Tensor:
    margin = (_size(b) - run.of(b)) * torch.ones_like(out)
    moved = (run.of(a) + _size(out) * run.of(b)) / margin
    return torch.where(margin > 0, moved, math.inf) + _ulp(out) + _tiny(out)


def _matrices(run: _Running, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    ea, eb, size = run.of(a), run.of(b), _size(b)
    return (_size(a) + ea) @ (eb + gamma(a.shape[-1] + 2, _unit(out)) * size) + ea @ size + a.shape[-1] * _tiny(out)


def _added(run: _Running, out: Tensor, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """β·c + α·ab."""
    product = a @ b
    moved = abs(alpha) * (_matrices(run, product, a, b) + 2 * _unit(out) * _size(product))
    return moved + abs(beta) * run.of(c) + 2 * _unit(out) * (_size(out) + abs(beta) * _size(c))


def _reduced(run: _Running, out: Tensor, a: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    dims = list(range(a.dim())) if dim is None or dim == [] else dim
    return run.of(a).sum(dims, keepdim) + gamma(_terms(out, a) + 2, _unit(out)) * _size(a).sum(dims, keepdim)


def _terms(out: Tensor, a: Tensor) -> int:
    """Count the entries of a that one entry of a reduction depends on."""
    return a.numel() // max(1, out.numel())


def _power(run: _Running, out: Tensor, a: Tensor, exponent: float) -> Tensor:
    if exponent == 2:
        return _product(run, out, a, a)
    if exponent == 0.5:
        return _root(run, out, a)
    raise UnknownRounding(f"power {exponent}")


def _root(run: _Running, out: Tensor, a: Tensor) -> Tensor:
    error = run.of(a)
    return torch.minimum(error.sqrt(), error / out.clamp(min=_tiny(out))) + 2 * _unit(out) * out


def _inverse_root(run: _Running, out: Tensor, a: Tensor) -> Tensor:
    margin = 1 - run.of(a) / a
    moved = out * (margin.clamp(min=0.0).rsqrt() - 1)
    return torch.where(margin > 0, moved, math.inf) + 4 * _unit(out) * out


def _softmax(run: _Running, out: Tensor, a: Tensor, dim: int, _: bool) -> Tensor:
    """Weights are off by a factor e^(λ_j + Λ): λ_j the error of the logits, Λ = log Σ_j P_j e^λ_j their denominator.

    λ_j includes the rounding of the difference in the argument of exp. Weights lie between 0 and 1 and sum to one, so
    none is off by more than all others together: the error is small for a token that sees only one other.
    """
    moved = run.of(a) + 2 * _unit(out) * (_size(a.amax(dim, keepdim=True)) + _size(a))
    floor = out + _tiny(out)
    denominator = (floor * moved.exp()).sum(dim, keepdim=True).log().clamp(min=0.0)
    rounding = gamma(out.shape[dim] + 4 * ELEMENTARY + 2, _unit(out))
    error = (floor * torch.expm1(moved + denominator) * (1 + rounding)).clamp(max=1.0)
    total = error.sum(dim, keepdim=True) * (1 + rounding)
    return torch.minimum(error, total - error + rounding * (total + 2)) + rounding * floor


def _with_slope(slope: float) -> _Rule:
    """Make the rule of an elementary function with derivatives up to ``slope``."""
    return lambda run, out, a, *_: slope * run.of(a) + 2 * ELEMENTARY * _ulp(out) + _tiny(out)


def _softplus(run: _Running, out: Tensor, a: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """torch returns the argument itself above a threshold, and drops log(1 + e^−a)."""
    dropped = torch.where(beta * a > threshold, torch.exp(-beta * a) / beta, 0.0)
    return run.of(a) + dropped + 3 * ELEMENTARY * _ulp(out) + _tiny(out)


def _length(run: _Running, out: Tensor, a: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims, count = list(range(a.dim())) if dim is None else dim, _terms(out, a)
    moved = torch.linalg.vector_norm(run.of(a), order, dims, keepdim)
    return moved + gamma(count + 4 + 2, _unit(out)) * out + count * _tiny(out)


def _converted(run: _Running, out: Tensor, a: Tensor, **_: Any) -> Tensor:
    exact = a.is_floating_point() and torch.finfo(out.dtype).bits >= torch.finfo(a.dtype).bits
    return run.of(a).to(out.dtype) + (0.0 if exact else _ulp(out))


def _exact(run: _Running, out: Tensor, a: Tensor, *_: Any, **__: Any) -> Tensor:
    """Functions without rounding whose slope is at most one."""
    return run.of(a)


def _constant(run: _Running, out: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(out)


_SHAPES = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze),
    *(aten.squeeze, aten.slice, aten.select, aten.clone, aten.detach, aten.alias, aten.diagonal, aten.index),
    *(aten.index_select, aten.flip, aten.repeat, aten.cat, aten.stack, aten.roll),
}
_COMPARISONS = {aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne}
_PIECES = {aten.split, aten.split_with_sizes, aten.chunk, aten.unbind}
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _sum),  # rsub is b − a, with the same error
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), _matrices),
    **dict.fromkeys((aten.addmm, aten.baddbmm), _added),
    **dict.fromkeys((aten.tanh, aten.sin, aten.cos), _with_slope(1.0)),
    **dict.fromkeys((aten.relu, aten.abs, aten.neg, aten.clamp, aten.clamp_min, aten.lift_fresh), _exact),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like), _constant),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full), _constant),
    aten.mul: _product,
    aten.div: _quotient,
    aten.reciprocal: lambda run, out, a: _quotient(run, out, 1.0, a),
    aten.rsqrt: _inverse_root,
    aten.sum: _reduced,
    aten.mean: lambda run, out, a, *dims, **_: _reduced(run, out, a, *dims) / _terms(out, a) + _ulp(out),
    aten.pow: _power,
    aten.sqrt: _root,
    aten.exp: lambda run, out, a: out * torch.expm1(run.of(a)) + ELEMENTARY * 2 * _unit(out) * out + _tiny(out),
    aten._softmax: _softmax,
    aten.sigmoid: _with_slope(0.25),
    aten.silu: _with_slope(1.1),
    aten.softplus: _softplus,
    aten.amax: lambda run, out, a, dim=(), keepdim=False: run.of(a).amax(dim, keepdim),
    aten.masked_fill: lambda run, out, a, mask, value: run.of(a).masked_fill(mask, 0.0) + torch.zeros_like(out),
    aten.where: lambda run, out, condition, a, b: torch.where(condition, run.of(a), run.of(b)) + torch.zeros_like(out),
    aten.linalg_vector_norm: _length,
    aten._to_copy: _converted,
}
