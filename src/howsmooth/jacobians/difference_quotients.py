r"""Comparison of a derivative with difference quotients of f, which see code that autograd does not.

Forward and reverse mode agree on a function that detaches a part of its input, sends it through numpy or calls a kernel
without derivatives, and both leave that part out. Difference quotients do not. Along one direction v,

.. math:: q_h = \frac{f(x + hv) - f(x - hv)}{2h} = Jv + O(h^2)

where f is smooth, up to rounding of about :math:`\varepsilon|f|/h`. Quotients of two steps, one a quarter of the other,
that agree with each other have settled, on Jv to within a fifteenth of their difference. Quotients that have settled on
something else show that Jv is not the derivative of f. Quotients that do not settle, as at a jump or in a function too
wild for these steps, show nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.jacobians.function_checks import random_like

_STEPS = (2.0**-5, 2.0**-7, 2.0**-9, 2.0**-11)
"""Lengths of the steps as shares of |x|, or of one where x vanishes."""
_SETTLED, _ELSEWHERE = 0.02, 0.05
"""Relative differences: between quotients that have settled, and between them and a derivative that is another's."""

_ROUNDING = 32
"""Rounding error of a difference of two values of f, in units of eps of their size."""


def moves_otherwise(f: Callable[[Tensor], Tensor], x: Tensor, push: Callable[[Tensor], Tensor]) -> bool:
    """Whether difference quotients of f at x settle on something else than ``push``, v ↦ Jv, says.

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
