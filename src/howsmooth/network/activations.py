"""Functions of single numbers between linear maps, by name, each with its Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth.errors import InvalidInput


@dataclass(frozen=True)
class KnownActivation:
    """An element-wise function with its Lipschitz constant, the supremum of |act'|.

    Attributes:
        function: the activation itself.
        lipschitz: the constant, rounded up in the last digit where it has no closed form.
        reached: where |act'| comes to it.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    lipschitz: float
    reached: str

    @property
    def at_zero(self) -> float:
        """|act(0)|; |act(t)| is at most this plus lipschitz·|t|."""
        return float(self.function(torch.zeros((), dtype=torch.float64)).abs())


_SWISH = 1.099839320129  # ½ + x/4 at the root x = 2.399357… of x·tanh(x/2) = 2; the same for x·σ(βx), whatever β
_GELU = (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)  # Φ(√2) + √2 φ(√2), as act'' = φ(t)(2 − t²)
_SELU = 1.0507009873554805 * 1.6732632423543772

ACTIVATIONS: dict[str, KnownActivation] = {
    entry.name: entry
    for entry in (
        KnownActivation("identity", lambda t: t, 1.0, "everywhere"),
        KnownActivation("relu", functional.relu, 1.0, "t > 0"),
        KnownActivation("relu6", functional.relu6, 1.0, "0 < t < 6"),
        KnownActivation("leaky_relu", functional.leaky_relu, 1.0, "t > 0 (negative slope 0.01)"),
        KnownActivation("elu", functional.elu, 1.0, "t > 0 (α = 1)"),
        KnownActivation("selu", functional.selu, _SELU, "t → 0 from below: λα"),
        KnownActivation("softplus", functional.softplus, 1.0, "t → ∞"),
        KnownActivation("tanh", torch.tanh, 1.0, "t = 0"),
        KnownActivation("sigmoid", torch.sigmoid, 0.25, "t = 0"),
        KnownActivation("softsign", functional.softsign, 1.0, "t = 0"),
        KnownActivation("hardswish", functional.hardswish, 1.5, "t → 3 from below"),
        KnownActivation("gelu", functional.gelu, _GELU, "t = √2, 1.12890…"),
        KnownActivation("gelu_tanh", torch.nn.GELU("tanh"), 1.128993068659, "t = 1.41850…, numerically"),
        KnownActivation("silu", functional.silu, _SWISH, "t = 2.39936…"),
        KnownActivation("quick_gelu", lambda t: t * torch.sigmoid(1.702 * t), _SWISH, "t = 2.39936…/1.702"),
        KnownActivation("mish", functional.mish, 1.088498161252, "t = 1.49057…, numerically"),
    )
}
"""Activations by name, each with its constant; tests find every one again by a search over t."""

_PROBE = torch.linspace(-30, 30, 961, dtype=torch.float64)


def activation(which: str | KnownActivation | Callable[[Tensor], Tensor]) -> KnownActivation:
    """The entry of `ACTIVATIONS` of that name, or that computes the same as the given function or module.

    >>> activation(torch.nn.GELU(approximate="tanh")).name
    'gelu_tanh'
    >>> activation("gelu").lipschitz
    1.12890...
    """
    if isinstance(which, KnownActivation):
        return which
    if isinstance(which, str):
        if which not in ACTIVATIONS:
            raise InvalidInput(f"there is no activation {which!r}: choose from {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[which]
    with torch.no_grad(), suppress(RuntimeError):  # what cannot take a vector of doubles is none of these
        answers = which(_PROBE.clone())
        for entry in ACTIVATIONS.values():
            if answers.shape == _PROBE.shape and torch.allclose(answers, entry.function(_PROBE), rtol=1e-7, atol=1e-7):
                return entry
    raise InvalidInput(
        f"the activation {getattr(which, '__name__', type(which).__name__)} computes none of {', '.join(ACTIVATIONS)}: "
        "give an KnownActivation with its Lipschitz constant."
    )
