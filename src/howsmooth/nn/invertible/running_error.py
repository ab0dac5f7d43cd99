r"""How far rounding can have moved the result of a computation: running error analysis, operation by operation.

Every tensor t̃ of a computation carries a bound e with :math:`|\tilde t - t| \le e`, entry by entry, t being what exact
arithmetic gives (Wilkinson 1986; Higham 2002, §3.3). An operation passes the errors of its operands on, by its
derivatives or by a bound on them, and adds its own: with u = ε/2, :math:`\gamma_k = ku/(1-ku)`,

.. math:: |\tilde a\tilde b - ab| \le |\tilde a|e_b + |\tilde b|e_a + e_ae_b + u|\tilde a\tilde b|, \qquad
          |\widetilde{AB} - AB| \le (|\tilde A| + E_A)E_B + E_A|\tilde B| + \gamma_k|\tilde A||\tilde B|,

the latter for any order of the sums. A softmax whose logits are off by λ has weights off by at most a factor
:math:`e^{2\lambda}`. Nothing is assumed about signs, so the bound is a proof, and larger than what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Rule = Callable[..., Tensor]
ELEMENTARY = 4
"""Units in the last place by which exp, tanh and the like may be off; torch's are within 1 or 2."""
SAFETY = 1.01
"""The bounds are computed in floating point themselves."""


class UnknownRounding(Exception):
    """An operation that no rule is known for."""


def evaluation_error(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Bounds on |f̃(x) − f(x)|, entry by entry: what was computed against exact arithmetic on the same x and weights.

    Raises:
        UnknownRounding: f has an operation that is not analysed.

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
    """Carries errors along while operations run; tensors it has not seen are exact."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor is kept, so that no id is used twice

    def error(self, tensor: Any) -> Tensor | None:
        """None for zero."""
        entry = self._errors.get(id(tensor))
        return None if entry is None else entry[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket
        if name in _SHAPES or name in _PIECES:
            moved = self._moved(func, args, kwargs)
            if moved is not None:
                self._keep(out, moved)
            return out
        if name is torch.ops.howsmooth.top_singular_vectors:  # any u, v do, but they must be of length one
            for vector in out:
                self._keep(vector, _unit(vector) * len(vector) * vector.abs())
            return out
        if not isinstance(out, Tensor) or not out.is_floating_point():
            if isinstance(out, tuple | list):
                raise UnknownRounding(str(func))
            self._check_decision(func, args)
            return out
        if not any(isinstance(a, Tensor) for a in args):
            return out  # made from numbers
        rule = _RULES.get(name)
        if rule is None:
            raise UnknownRounding(str(func))
        self._keep(out, rule(self, out, *args, **kwargs).masked_fill(~out.isfinite(), 0.0))
        return out

    def _check_decision(self, func: Any, args: Any) -> None:
        """Refuse booleans and numbers that would be others without rounding."""
        inexact = [a for a in args if isinstance(a, Tensor) and self.error(a) is not None]
        if not inexact or func.overloadpacket in (aten.isfinite, aten.isnan):
            return
        if func.overloadpacket in _COMPARISONS:
            apart, room = (args[0] - args[1]).abs(), self.of(args[0]) + self.of(args[1])
            if bool(((apart > room) | apart.isnan() | (room == 0)).all()):
                return
        raise UnknownRounding(str(func))

    def _keep(self, out: Any, error: Any) -> None:
        if isinstance(out, Tensor):
            self._errors[id(out)] = (out, error)
        else:
            for each, its in zip(out, error, strict=True):
                self._keep(each, its)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same change of shape on the errors."""
        if func.overloadpacket in (aten.cat, aten.stack):
            if all(self.error(tensor) is None for tensor in args[0]):
                return None
            return func([self.of(tensor) for tensor in args[0]], *args[1:], **kwargs)
        error = self.error(args[0])
        return None if error is None else func(error, *args[1:], **kwargs)

    def of(self, value: Any) -> Any:
        """The error of an operand, zeros when it is exact, 0 for a number."""
        if not isinstance(value, Tensor):
            return 0.0
        error = self.error(value)
        return torch.zeros_like(value) if error is None else error


def _unit(like: Tensor) -> float:
    return torch.finfo(like.dtype).eps / 2


def _tiny(like: Tensor) -> float:
    """What underflow can cost one operation."""
    return torch.finfo(like.dtype).tiny


def _gamma(k: int, like: Tensor) -> float:
    share = (k + 2) * _unit(like)
    return share / (1 - share) if share < 0.5 else math.inf


def _size(value: Any) -> Any:
    """|value|, with what masks hide (±∞) counted as nothing: it is exact."""
    return value.abs().masked_fill(~value.isfinite(), 0.0) if isinstance(value, Tensor) else abs(value)


def _sum(run: _Running, out: Tensor, a: Any, b: Any, *, alpha: float = 1, **_: Any) -> Tensor:
    return run.of(a) + abs(alpha) * run.of(b) + 2 * _unit(out) * _size(out) + (alpha != 1) * _unit(out) * _size(b)


def _product(run: _Running, out: Tensor, a: Any, b: Any, **_: Any) -> Tensor:
    ea, eb = run.of(a), run.of(b)
    return _size(a) * eb + _size(b) * ea + ea * eb + _unit(out) * _size(out) + _tiny(out)


def _quotient(run: _Running, out: Tensor, a: Any, b: Any, **_: Any) -> Tensor:
    room = (_size(b) - run.of(b)) * torch.ones_like(out)
    moved = (run.of(a) + _size(out) * run.of(b)) / room
    return torch.where(room > 0, moved, math.inf) + _unit(out) * _size(out) + _tiny(out)


def _matrices(run: _Running, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    ea, eb, size = run.of(a), run.of(b), _size(b)
    return (_size(a) + ea) @ (eb + _gamma(a.shape[-1], out) * size) + ea @ size + a.shape[-1] * _tiny(out)


def _added(run: _Running, out: Tensor, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """β·c + α·ab."""
    product = a @ b
    moved = abs(alpha) * (_matrices(run, product, a, b) + 2 * _unit(out) * _size(product))
    return moved + abs(beta) * run.of(c) + 2 * _unit(out) * (_size(out) + abs(beta) * _size(c))


def _reduced(run: _Running, out: Tensor, a: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    dims = list(range(a.dim())) if dim is None or dim == [] else dim
    count = a.numel() // max(1, out.numel())
    return run.of(a).sum(dims, keepdim) + _gamma(count, out) * _size(a).sum(dims, keepdim)


def _mean(run: _Running, out: Tensor, a: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    return _reduced(run, out, a, dim, keepdim) / (a.numel() // max(1, out.numel())) + _unit(out) * _size(out)


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
    room = 1 - run.of(a) / a
    moved = out * (room.clamp(min=0.0).rsqrt() - 1)
    return torch.where(room > 0, moved, math.inf) + 4 * _unit(out) * out


def _exponential(run: _Running, out: Tensor, a: Tensor) -> Tensor:
    return out * torch.expm1(run.of(a)) + ELEMENTARY * 2 * _unit(out) * out + _tiny(out)


def _softmax(run: _Running, out: Tensor, a: Tensor, dim: int, _: bool) -> Tensor:
    """Weights off by a factor e^(λ_j + Λ): λ_j what logits are off by, Λ = log Σ_j P_j e^λ_j their denominator.

    λ_j includes the rounding of the difference that exp is taken of. Weights lie between 0 and 1, and as they sum to
    one, none can be off by more than all others together: a token that sees one other alone is hardly off at all.
    """
    moved = run.of(a) + 2 * _unit(out) * (_size(a.amax(dim, keepdim=True)) + _size(a))
    floor = out + _tiny(out)
    denominator = (floor * moved.exp()).sum(dim, keepdim=True).log().clamp(min=0.0)
    rounding = _gamma(out.shape[dim] + 4 * ELEMENTARY, out)
    error = (floor * torch.expm1(moved + denominator) * (1 + rounding)).clamp(max=1.0)
    total = error.sum(dim, keepdim=True) * (1 + rounding)
    return torch.minimum(error, total - error + rounding * (total + 2)) + rounding * floor


def _steep(slope: float) -> Rule:
    """A function that is nowhere steeper than this, with the precision of an elementary one."""

    def rule(run: _Running, out: Tensor, a: Tensor, *_: Any) -> Tensor:
        return slope * run.of(a) + 2 * ELEMENTARY * _unit(out) * _size(out) + _tiny(out)

    return rule


def _softplus(run: _Running, out: Tensor, a: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """torch returns the argument itself where it is above a threshold, and leaves log(1 + e^−a) out."""
    left_out = torch.where(beta * a > threshold, torch.exp(-beta * a) / beta, 0.0)
    return run.of(a) + left_out + 3 * ELEMENTARY * _unit(out) * _size(out) + _tiny(out)


def _exact(run: _Running, out: Tensor, a: Tensor, *_: Any, **__: Any) -> Tensor:
    """Functions that do not round, and move no further apart what they are given."""
    return run.of(a)


def _constant(run: _Running, out: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(out)


def _largest(run: _Running, out: Tensor, a: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return run.of(a).amax(dim, keepdim)


def _filled(run: _Running, out: Tensor, a: Tensor, mask: Tensor, value: Any) -> Tensor:
    return run.of(a).masked_fill(mask, 0.0) + torch.zeros_like(out)


def _chosen(run: _Running, out: Tensor, condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, run.of(a), run.of(b)) + torch.zeros_like(out)


def _length(run: _Running, out: Tensor, a: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = list(range(a.dim())) if dim is None else dim
    count = a.numel() // max(1, out.numel())
    moved = torch.linalg.vector_norm(run.of(a), order, dims, keepdim)
    return moved + _gamma(count + 4, out) * out + count * _tiny(out)


def _converted(run: _Running, out: Tensor, a: Tensor, **_: Any) -> Tensor:
    narrower = torch.finfo(out.dtype).bits < torch.finfo(a.dtype).bits if a.is_floating_point() else False
    return run.of(a).to(out.dtype) + (_unit(out) * _size(out) if narrower or not a.is_floating_point() else 0.0)


_SHAPES = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze),
    *(aten.squeeze, aten.slice, aten.select, aten.clone, aten.detach, aten.alias, aten.diagonal, aten.index),
    *(aten.index_select, aten.flip, aten.repeat, aten.cat, aten.stack, aten.roll),
}
_COMPARISONS = {aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne}
_PIECES = {aten.split, aten.split_with_sizes, aten.chunk, aten.unbind}
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _sum),  # rsub is b − a, with the same errors
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), _matrices),
    **dict.fromkeys((aten.addmm, aten.baddbmm), _added),
    **dict.fromkeys((aten.tanh, aten.sin, aten.cos), _steep(1.0)),
    **dict.fromkeys((aten.relu, aten.abs, aten.neg, aten.clamp, aten.clamp_min, aten.lift_fresh), _exact),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like), _constant),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full), _constant),
    aten.mul: _product,
    aten.div: _quotient,
    aten.reciprocal: lambda run, out, a: _quotient(run, out, 1.0, a),
    aten.rsqrt: _inverse_root,
    aten.sum: _reduced,
    aten.mean: _mean,
    aten.pow: _power,
    aten.sqrt: _root,
    aten.exp: _exponential,
    aten._softmax: _softmax,
    aten.sigmoid: _steep(0.25),
    aten.silu: _steep(1.1),
    aten.softplus: _softplus,
    aten.amax: _largest,
    aten.masked_fill: _filled,
    aten.where: _chosen,
    aten.linalg_vector_norm: _length,
    aten._to_copy: _converted,
}
