"""Checks before a Jacobian is computed, with one readable error for each.

The first group looks at tensors and serves every Jacobian, closed form or not. The second looks at a function: whether
it returns numbers that depend on x, returns the same ones twice, and treats the items of a batch one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from howsmooth._util.common import first_tensor, relative_error
from howsmooth._util.validation import check_finite, check_tensor
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.jacobians.operator import random_like

# Relative difference up to which two evaluations count as one. It does not shrink in float64, because many models
# round to float32 inside whatever the dtype of x (the RMSNorm of transformers' Llama does).
SAME_VALUE = 1e-4


def check_point(x: Tensor, name: str = "x") -> None:
    """Refuse what no Jacobian can be taken at: not a floating tensor, above 3-D, empty, or not finite."""
    check_tensor(x, name, floating=False)
    if not x.is_floating_point():
        raise InvalidInput(
            f"{name} has dtype {_short(x.dtype)}, but a Jacobian needs real floating-point numbers: pass embeddings "
            f"rather than token ids, or convert with {name}.float()."
        )
    if x.dim() > 3:
        raise InvalidInput(
            f"{name} has shape {tuple(x.shape)}, but must be (n, d) or (batch, n, d): merge or index axes."
        )
    check_finite(x, name)


def check_tokens(x: Tensor, name: str = "x") -> None:
    """Refuse anything but finite floating tokens of shape (n, d) or (batch, n, d).

    >>> check_tokens(torch.zeros(4))
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: x has shape (4,), but must be (n, d) or (batch, n, d): add the missing axes.
    """
    check_point(x, name)
    if x.dim() < 2:
        raise InvalidInput(
            f"{name} has shape {tuple(x.shape)}, but must be (n, d) or (batch, n, d): add the missing axes."
        )


def check_takes_one(f: Callable[..., Any]) -> None:
    """Refuse an f that cannot be called with one tensor, or whose weights are not there yet.

    >>> check_takes_one(torch.nn.MultiheadAttention(2, 1))
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: f must take one tensor: missing a required argument: 'key'.
    """
    try:
        inspect.signature(f.forward if isinstance(f, nn.Module) else f).bind(None)
    except ValueError:  # no signature, as of functions written in C
        pass
    except TypeError as error:
        raise InvalidInput(f"f must take one tensor: {error}.") from None
    if isinstance(f, nn.Module) and any(map(is_lazy, (*f.parameters(), *f.buffers()))):
        raise InvalidInput("f has weights that are not initialised: call it once before.")
    quantised = [part for part in f.modules() if _is_quantised(part)] if isinstance(f, nn.Module) else []
    if quantised:
        raise NotDifferentiable(
            f"f holds quantised layers ({type(quantised[0]).__module__}.{type(quantised[0]).__name__}), which compute "
            "without derivatives: measure the model before it is quantised, or one with weights rounded and stored in "
            "floating point."
        )


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module is one of torch's own kernels for whole numbers; what only imitates them has derivatives."""
    return type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"))


def evaluate(f: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The tensor f(x); an exception of f's own passes through with a note on what it was called with."""
    try:
        output = f(x)
    except Exception as error:
        if "Inference tensors cannot be saved" in str(error):
            raise InvalidInput(
                "f holds tensors that were created under torch.inference_mode, which autograd cannot use: "
                "create them under torch.no_grad, or clone them outside inference mode."
            ) from error
        error.add_note(f"howsmooth called f with a tensor of shape {tuple(x.shape)} and dtype {_short(x.dtype)}.")
        raise
    return first_tensor(output)


def check_output(y: Tensor, x: Tensor) -> None:
    """Refuse values y = f(x) that have no Jacobian: complex, integer, empty, not finite, or without the batch first."""
    if y.is_complex():
        raise InvalidInput("f returns complex numbers: return torch.view_as_real(...) of them to get a real Jacobian.")
    if not y.is_floating_point():
        raise NotDifferentiable(
            f"f returns {_short(y.dtype)} values, which have no derivative: return the scores before argmax, "
            "comparison or rounding to integers."
        )
    if y.numel() == 0:
        raise InvalidInput(f"f(x) has shape {tuple(y.shape)}, which holds no numbers: make f return at least one.")
    check_finite(y.detach(), "f(x)")
    if x.dim() == 3 and (y.dim() == 0 or len(y) != len(x)):
        raise InvalidInput(
            f"f(x) has shape {tuple(y.shape)} for x of shape {tuple(x.shape)}, but a 3-D x is a batch and f(x) must "
            "start with the same batch size: keep that axis first, or pass one input of shape (n, d)."
        )


def check_repeatable(again: Callable[[], Tensor], y: Tensor) -> None:
    """Refuse a function whose value ``again()`` differs from the first one, y, or draws from torch's random numbers.

    The state of the generator is compared as well because a light dropout often leaves a small tensor as it was.
    """
    state = torch.get_rng_state()
    second = again().detach()
    same = second.shape == y.shape and relative_error(second, y.detach()) <= SAME_VALUE
    if not same or not torch.equal(state, torch.get_rng_state()):
        raise InvalidInput(
            "f is random: two evaluations at the same x differ or draw random numbers, as dropout does in training "
            "mode: call .eval() on the model, or fix the noise outside f."
        )


def check_reads_items_alone(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Refuse an f whose value at the first item of a batch changes when the other items are absent.

    An f that cannot take one item (a mask or bias for each item of the batch) is let through: what remains to be seen
    is in its derivative, see ``mixes_items``.
    """
    try:
        alone = f(x[:1]).detach()
    except Exception:
        return
    if alone.shape == (1, *y.shape[1:]) and not relative_error(alone, y[:1].detach()) <= SAME_VALUE:
        raise mixing_error()


def mixes_items(pull: Callable[[Tensor], Tensor], y: Tensor) -> bool:
    """Whether the first or last item of y = f(x) has a derivative in another item of x; ``pull`` is u ↦ Jᵀu.

    The first and the last: in a causal map read along the wrong axis the first item depends on nothing else.
    """
    for item in (0, len(y) - 1):
        u = torch.zeros_like(y)
        u[item] = random_like(y[item])
        gradient = pull(u).clone()
        gradient[item] = 0
        if gradient.any():
            return True
    return False


def mixing_error() -> InvalidInput:
    """The error for an f whose batch items are not independent."""
    return InvalidInput(
        "f mixes the items of the batch, or reads the axes of x in another order than (batch, n, d): transpose inside "
        "f, or pass one input of shape (n, d)."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_STEPS = (2.0**-5, 2.0**-7, 2.0**-9, 2.0**-11)
"""Lengths of the steps as shares of |x|, or of one where x vanishes."""
_SETTLED, _ELSEWHERE = 0.02, 0.05
"""Relative differences: between quotients that have settled, and between them and a derivative that is another's."""

_ROUNDING = 32
"""Rounding error of a difference of two values of f, in units of eps of their size."""


def moves_otherwise(f: Callable[[Tensor], Tensor], x: Tensor, push: Callable[[Tensor], Tensor]) -> bool:
    r"""Whether difference quotients of f at x settle on something else than ``push``, v ↦ Jv, says.

    Forward and reverse mode agree on a function that detaches a part of its input, sends it through numpy or calls a
    kernel without derivatives, and both leave that part out. Difference quotients do not. Along one direction v,

    .. math:: q_h = \frac{f(x + hv) - f(x - hv)}{2h} = Jv + O(h^2)

    where f is smooth, up to rounding of about :math:`\varepsilon|f|/h`. Quotients of two steps, one a quarter of the
    other, that agree with each other have settled, on Jv to within a fifteenth of their difference. Quotients that have
    settled on something else show that Jv is not the derivative of f. Quotients that do not settle, as at a jump or in
    a function too wild for these steps, show nothing.

    >>> x = torch.linspace(0.5, 1, 6)
    >>> moves_otherwise(torch.tanh, x, lambda v: v * (1 - x.tanh() ** 2))
    False
    >>> moves_otherwise(lambda x: x + torch.tanh(x.detach()), x, lambda v: v)
    True
    """
    direction = random_like(x, seed=3)
    direction = direction / torch.linalg.vector_norm(direction)
    length = float(torch.linalg.vector_norm(x.detach())) or 1.0
    slope = push(direction).detach()
    before = None
    with torch.no_grad():
        for share in _STEPS:
            step = share * length
            try:
                ahead, behind = f(x + step * direction), f(x - step * direction)
            except Exception:  # not defined there
                return False
            if ahead.shape != slope.shape or behind.shape != slope.shape:
                return False
            quotient = (ahead - behind) / (2 * step)
            if not bool(torch.isfinite(quotient).all()):
                return False
            rounding = _ROUNDING * torch.finfo(x.dtype).eps * float(torch.linalg.vector_norm(ahead)) / step
            if before is not None and _within(_SETTLED, before, quotient):
                return not _within(_ELSEWHERE, slope, quotient, rounding)
            before = quotient
    return False


def _within(share: float, one: Tensor, other: Tensor, more: float = 0.0) -> bool:
    """Whether two vectors differ by no more than a share of the longer one, and what is allowed besides."""
    longest = max(float(torch.linalg.vector_norm(vector)) for vector in (one, other))
    return float(torch.linalg.vector_norm(one - other)) <= share * longest + more
