"""The Jacobian of any differentiable torch function or module, known through its products.

Reverse mode, Jᵀu, is one recorded autograd graph, walked again for each product. Forward mode, Jv, takes the first of
these that works and that agrees with reverse mode:

1. ``torch.func linearize``: f traced once into the graph of v ↦ Jv (`howsmooth.jacobians.linearization`); no product
   runs f again.
2. ``torch.func jvp``: when f cannot be traced (branches on values, writes into tensors from outside) or the trace does
   not reproduce its derivative; every product runs f.
3. ``double backward``: when an operation has no forward mode. Jᵀu is linear in u, so Jv is the gradient of
   ⟨Jᵀu, v⟩ in u [1]_; the graph is recorded once.
4. ``dense rows``: when that graph cannot be differentiated again (``torch.cdist``): J itself, row by row, if f has at
   most 4096 outputs.

Every one gives the same numbers, so a fallback is not warned about: ``method`` names the way taken and ``notes`` says
why the earlier ones were left. What does raise a `DerivativeWarning` is reason to doubt the derivative itself.

.. [1] J. Townsend, *A new trick for calculating Jacobian vector products*, 2017.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from howsmooth._util.common import first_line
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.torch_globals import exact_autograd
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.jacobians import function_checks
from howsmooth.jacobians.function_checks import moves_otherwise
from howsmooth.jacobians.linearization import Map, linearized
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, random_like

_MAX_DENSE_ROWS = 4096
_NUMBERS_PER_CHUNK = 2**21
# Relative errors allowed between forward and reverse mode, and between a trace and what it traces. They catch wrong
# derivatives, not rounding, and leave room for models that round to float32 inside whatever the dtype of x.
_SAME_PRODUCT = 1e-3
_SAME_TRACE = 1e-5
_VANISHES = 1e3
"""A derivative this many eps of |f(x)|/|x| or less is what rounding leaves of zero: nothing forward and reverse mode
could agree on. What f computes on its way to values near zero is taken to be of size one."""
_POINT_ERROR = 32
"""Rounding inside f, whose operations nobody knows, in units of eps: whole layers of language models show up to 15."""


class DerivativeWarning(UserWarning):
    """The Jacobian was computed as requested, but f gives reason to doubt that it is the intended derivative."""


@validated
def function_jacobian(f: Callable[[Tensor], Any], x: Tensor, notes: Sequence[str] = ()) -> FunctionJacobian:
    """The Jacobian of f at x as an operator.

    A 2-D x (or below) is one input and J one map, ``batch_shape == ()``. A 3-D x is a batch of inputs, one map for
    each, ``batch_shape == (batch,)``; f(x) must then keep the batch first and its items independent. f receives x as
    given and may return any shape; of a tuple, list or ``ModelOutput`` the first tensor (``last_hidden_state``) counts.
    A module built sequence first (``batch_first=False``) has the axes of a 3-D x exchanged around it.

    The dtype of x rules: a module's parameters follow it, so a float64 x gives float64 products of a float32 module;
    float16 and bfloat16 are computed in float32. Modules keep their parameters, gradients, buffers and mode. A plain
    function runs as it is: a module called inside it must have the dtype of x, and keeps its own side effects.

    >>> J = function_jacobian(lambda x: x.softmax(-1), torch.zeros(3, 2, dtype=torch.float64))
    >>> J
    FunctionJacobian((3, 2) → (3, 2), torch.func linearize, float64)
    >>> J.matvec(torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64))[0]
    tensor([ 0.2500, -0.2500], dtype=torch.float64)
    """
    function_checks.check_point(x)
    notes = list(notes)
    # What draws random numbers is refused, and leaves the generator as it was.
    with exact_autograd(x.device), torch.random.fork_rng(devices=[]):
        point = x.detach().clone().to(torch.float32 if x.dtype.itemsize < 4 else x.dtype)
        call = tensor_map(f, x.dtype, point.dtype)
        if point.dim() == 3 and isinstance(f, nn.Module) and _reads_sequence_first(f, call, point):
            call = _with_axes_exchanged(call)
        tape = _Tape.record(call, point)
        function_checks.check_output(tape.output, point)
        function_checks.check_repeatable(lambda: _Tape.record(call, point).output, tape.output)
        u = random_like(tape.output)
        try:
            pulled = tape.pull(u)
        except RuntimeError as error:
            raise NotDifferentiable(
                f"autograd cannot go back through f, replace the operation it names: {first_line(error, kind=True)}"
            ) from error
        if not torch.isfinite(pulled).all():
            raise NotDifferentiable(
                "the Jacobian of f has NaN or infinite entries at this x (as sqrt has at 0): move x away from that "
                "point, or smooth f there."
            )
        if point.dim() == 3:
            _check_independent_items(call, point, tape)
        if not pulled.any():
            why = "f is constant or piecewise constant there, as round is."
            _doubt(notes, f"the Jacobian of f is exactly zero at x: {why}")
        push, absolute = _forward_products(call, point, tape, u, pulled, notes)
        if pulled.any() and moves_otherwise(call, point, push.one):
            why = "f has a kink at x, or a part of f is detached from x, leaves torch or runs in a kernel without one."
            _doubt(notes, f"f moves otherwise than its derivative says: {why}")
    return FunctionJacobian(point, tape, push, tuple(notes), absolute)


class FunctionJacobian(JacobianOperator):
    """The Jacobian of a torch function at a point; build it with `function_jacobian`.

    Attributes:
        output: f(x).
        notes: sentences on fallbacks taken and doubts raised; empty when all went the usual way.
    """

    def __init__(self, x: Tensor, tape: _Tape, push: _Products, notes: tuple[str, ...], error: float = 0.0):
        y = self.output = tape.output.detach()
        batch_axes = 1 if x.dim() == 3 else 0
        self.batch_shape = x.shape[:batch_axes]
        self.in_shape, self.out_shape = x.shape[batch_axes:], y.shape[batch_axes:]
        self.dtype, self.device = x.dtype, x.device
        self.accuracy = Accuracy(_POINT_ERROR * torch.finfo(x.dtype).eps, error, guarantee=Guarantee.MEASURED)
        self.method, self.notes = push.name, notes
        self._push, self._pull = push, tape.products

    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
        return self.output

    def matvec(self, v: Tensor) -> Tensor:
        return self._product(self._push, v, self.in_shape)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self._product(self._pull, u, self.out_shape)

    def columns(self, index: Tensor) -> Tensor:
        return self._on_basis(self._push, index, self.in_shape)

    def rows(self, index: Tensor) -> Tensor:
        return self._on_basis(self._pull, index, self.out_shape)

    def _product(self, products: _Products, v: Tensor, shape: torch.Size) -> Tensor:
        expected = self.batch_shape + shape
        if v.shape != expected:
            raise InvalidInput(f"this product takes vectors of shape {tuple(expected)}, not {tuple(v.shape)}: reshape.")
        with exact_autograd(self.device):
            return products.one(v.detach().to(self.device, self.dtype)).detach()

    def _on_basis(self, products: _Products, index: Tensor, shape: torch.Size) -> Tensor:
        numbers = max(self.batch_size, 1) * max(self.in_size, self.out_size)
        chunk = max(1, min(256, _NUMBERS_PER_CHUNK // numbers))
        with exact_autograd(self.device):
            return torch.cat([products.stacked(self._units(i, shape)) for i in index.split(chunk)]).detach()


@dataclass(frozen=True)
class _Products:
    """One linear map: ``one`` applies it to a vector, ``many`` to vectors stacked along a new first axis."""

    name: str
    one: Map
    many: Map

    def stacked(self, vectors: Tensor) -> Tensor:
        try:
            return self.many(vectors)
        except (RuntimeError, ValueError):  # an operation without a batching rule, or too little memory
            return torch.stack([self.one(v) for v in vectors])


@dataclass(frozen=True)
class _Tape:
    """f evaluated once with its autograd graph stored: Jᵀu without another forward pass."""

    leaf: Tensor
    output: Tensor

    @classmethod
    def record(cls, call: Map, x: Tensor) -> _Tape:
        leaf = x.detach().clone().requires_grad_()
        return cls(leaf, call(leaf))

    @property
    def products(self) -> _Products:
        return _Products("vjp", self.pull, partial(self.pull, batched=True))

    def pull(self, u: Tensor, batched: bool = False) -> Tensor:
        gradient = None
        if self.output.requires_grad:
            (gradient,) = torch.autograd.grad(
                self.output, self.leaf, u, retain_graph=True, allow_unused=True, is_grads_batched=batched
            )
        if gradient is None:
            raise NotDifferentiable(
                "f(x) is not connected to x by differentiable operations: look inside f for detach, no_grad, numpy, "
                "comparisons or a result that ignores x."
            )
        return gradient


def tensor_map(f: Callable[[Tensor], Any], given: torch.dtype, dtype: torch.dtype) -> Map:
    """f as a pure map of tensors of ``dtype``: no write reaches x, and a module's state is copied, never touched."""
    function_checks.check_takes_one(f)
    is_module = isinstance(f, nn.Module) and not isinstance(f, torch.jit.ScriptModule)  # functional_call refuses those
    run = _with_own_state(cast(nn.Module, f), dtype) if is_module else f
    dtype_trouble = re.compile(r"dtype|scalar type|type \(.*should be the same")

    def call(x: Tensor) -> Tensor:
        try:
            y = function_checks.evaluate(run, x.clone())
        except RuntimeError as error:
            if given != dtype and not is_module and dtype_trouble.search(str(error)):
                raise InvalidInput(
                    f"f does not accept float32, in which a {str(given).removeprefix('torch.')} x is computed: convert "
                    "what f holds to float32 and pass x.float()."
                ) from error
            raise
        return y.to(dtype) if y.is_floating_point() else y

    return call


def _with_own_state(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    """The module with detached parameters in ``dtype``, and fresh copies of its buffers for each call."""

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        return tensor.clone() if tensor.is_inference() else tensor

    parameters = {name: copied(p) for name, p in module.named_parameters()}
    buffers = {name: copied(b) for name, b in module.named_buffers()}
    return lambda x: functional_call(module, parameters | {name: b.clone() for name, b in buffers.items()}, (x,))


def _reads_sequence_first(module: nn.Module, call: Map, x: Tensor) -> bool:
    """Whether the module takes (n, batch, d): a part says ``batch_first=False`` and the items of a batch would mix."""
    if all(getattr(inner, "batch_first", True) for inner in module.modules()):
        return False
    try:
        tape = _Tape.record(call, _at_least_two(x))
    except (RuntimeError, ValueError):  # a size that only fits the other order of axes
        return True
    return len(tape.output) != len(tape.leaf) or function_checks.mixes_items(tape.pull, tape.output)


def _with_axes_exchanged(call: Map) -> Map:
    return lambda x: call(x.transpose(0, 1)).transpose(0, 1)


def _at_least_two(x: Tensor) -> Tensor:
    return x if len(x) > 1 else torch.cat([x, x])


def _check_independent_items(call: Map, x: Tensor, tape: _Tape) -> None:
    """One item cannot mix with others but can be read along the wrong axis, so it is tried next to a copy of itself."""
    if len(x) > 1:
        function_checks.check_reads_items_alone(call, x, tape.output)
    else:
        try:
            tape = _Tape.record(call, _at_least_two(x))
        except Exception:
            return
        if tape.output.dim() == 0 or len(tape.output) != 2:
            return
    if function_checks.mixes_items(tape.pull, tape.output):
        raise function_checks.mixing_error()


def _forward_products(
    call: Map, x: Tensor, tape: _Tape, u: Tensor, pulled: Tensor, notes: list[str]
) -> tuple[_Products, float]:
    """The first way to compute Jv that works and agrees with reverse mode, and the error of the products.

    Where the derivative vanishes but for rounding, there is nothing to agree on: the error says so.
    """
    v, absolute = random_like(x, seed=1), 0.0
    point, value = (float(torch.linalg.vector_norm(t.detach())) for t in (x, tape.output))
    rounding = _VANISHES * torch.finfo(x.dtype).eps * max(value, tape.output.numel() ** 0.5) / (point or 1.0)
    vanishes = _relative_length(pulled, u) <= rounding

    def disagreement(jv: Tensor) -> float:
        """The larger defect of ⟨w, Jv⟩ = ⟨Jᵀw, v⟩ for w = u, and for w = Jv, which leaves no room for cancellation."""
        defects = []
        for w, jtw in ((u, pulled), (jv, tape.pull(jv))):
            scale = torch.linalg.vector_norm(w) * torch.linalg.vector_norm(jv)
            scale = scale + torch.linalg.vector_norm(jtw) * torch.linalg.vector_norm(v)
            defects.append(float(((w * jv).sum() - (jtw * v).sum()).abs() / scale) if scale > 0 else 0.0)
        return max(defects)

    def agrees(jv: Tensor, way: str) -> bool:
        nonlocal absolute
        defect = disagreement(jv)
        if defect <= _SAME_PRODUCT:
            return True
        if vanishes and _relative_length(jv, v) <= rounding:
            absolute = rounding
            notes.append("the Jacobian of f vanishes at x to the accuracy of its rounding: its norm may be zero.")
            return True
        _doubt(
            notes,
            f"{way} and reverse mode disagree on ⟨u, Jv⟩ by {defect:.1e}, so reverse mode was taken: "
            "look in f for a custom derivative that is wrong, or for side effects.",
        )
        return False

    try:
        jv = jvp(call, (x,), (v,))[1].detach()
    except Exception as error:
        notes.append(f"forward mode is not possible: {first_line(error, kind=True)}")
    else:
        if agrees(jv, "forward mode"):
            pushed = lambda v: jvp(call, (x,), (v,))[1]  # noqa: E731
            return _linearized(call, x, v, jv, notes) or _Products("torch.func jvp", pushed, vmap(pushed)), absolute
    try:
        products = _double_backward(tape)
        if agrees(products.one(v), "double backward"):
            return products, absolute
    except Exception as error:
        notes.append(f"double backward is not possible: {first_line(error, kind=True)}")
    return _dense_rows(x, tape), absolute


def _relative_length(image: Tensor, vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(image) / torch.linalg.vector_norm(vector))


def _linearized(call: Map, x: Tensor, v: Tensor, jv: Tensor, notes: list[str]) -> _Products | None:
    """`linearized`, if the graph reproduces Jv, also when used again."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # f has run before; what is left is the tracer's talk about its own graph
            push = linearized(call, x)
            first = push(v)
            stored = first.clone()
            second = push(random_like(v, seed=2))
            again = push(v)
    except Exception as error:
        notes.append(f"f cannot be linearized once: {first_line(error, kind=True)}")
        return None
    shared = first.data_ptr() == second.data_ptr()
    same = all(function_checks.relative_error(product, jv) <= _SAME_TRACE for product in (stored, again))  # NaN is not
    if shared or not same:
        notes.append("f cannot be linearized once: the trace does not reproduce f's derivative.")
        return None

    def one(v: Tensor) -> Tensor:
        with torch.no_grad():
            return push(v)

    return _Products("torch.func linearize", one, vmap(one))


def _double_backward(tape: _Tape) -> _Products:
    u = torch.zeros_like(tape.output).requires_grad_()
    (pulled,) = torch.autograd.grad(tape.output, tape.leaf, u, create_graph=True)

    def push(v: Tensor, batched: bool = False) -> Tensor:
        return torch.autograd.grad(pulled, u, v, retain_graph=True, is_grads_batched=batched)[0]

    return _Products("double backward", push, partial(push, batched=True))


def _dense_rows(x: Tensor, tape: _Tape) -> _Products:
    y = tape.output
    batch = len(x) if x.dim() == 3 else 1
    out_size, in_size = y.numel() // batch, x.numel() // batch
    if out_size > _MAX_DENSE_ROWS:
        raise NotDifferentiable(
            f"f has no forward mode and cannot be differentiated twice, and its {out_size} outputs are too many to "
            f"take J row by row (at most {_MAX_DENSE_ROWS}): replace the operation without forward mode (torch.cdist "
            "by |a|² - 2ab + |b|²), or measure fewer tokens."
        )
    basis = torch.eye(out_size, dtype=x.dtype, device=x.device).unsqueeze(1).expand(-1, batch, -1)
    chunks = basis.split(max(1, _NUMBERS_PER_CHUNK // x.numel()))
    rows = [tape.products.stacked(units.reshape(-1, *y.shape)) for units in chunks]
    matrix = torch.cat(rows).reshape(out_size, batch, in_size).movedim(0, 1)

    def one(v: Tensor) -> Tensor:
        return (matrix @ v.reshape(batch, in_size, 1)).reshape(y.shape)

    return _Products("dense rows", one, vmap(one))


def _doubt(notes: list[str], sentence: str) -> None:
    notes.append(sentence)
    warnings.warn(sentence, DerivativeWarning, stacklevel=4)
