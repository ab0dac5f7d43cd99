"""Token stages: what happens to a projected query, key or value before tokens meet.

Each stage acts on every token by itself and knows its own derivative in closed form. Tensors are ``(maps, n, width)``
(or any leading shape): one map per head and batch item.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from howsmooth.checks import check_number, door
from howsmooth.errors import InvalidInput


class TokenDerivative(ABC):
    """Derivative of a stage at the tokens it was linearised at."""

    @abstractmethod
    def jvp(self, dx: Tensor) -> Tensor:
        """Tangents through the stage."""

    @abstractmethod
    def vjp(self, gy: Tensor) -> Tensor:
        """Cotangents back through the stage."""

    @abstractmethod
    def select(self, index: Tensor) -> TokenDerivative:
        """The derivative for the maps at ``index`` only."""

    def to(self, dtype: torch.dtype) -> TokenDerivative:
        """The derivative rounded to another dtype: a dataclass with its tensors in it."""
        tensors = {name: value.to(dtype) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors) if tensors else self  # type: ignore[type-var]

    @abstractmethod
    def size(self) -> Tensor | float:
        """At least the operator norm at every token, as ``(maps, n, 1)`` or anything that spreads to it."""


class TokenStage(nn.Module, ABC):
    """A map x_i ↦ y_i applied to every token."""

    @abstractmethod
    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        """The value at x and the derivative there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linearize(x)[0]


@dataclass(frozen=True)
class Chain(TokenDerivative):
    """Stages one after the other; the empty chain is the identity."""

    links: tuple[TokenDerivative, ...]

    @classmethod
    def through(cls, stages: Sequence[TokenStage], x: Tensor) -> tuple[Tensor, Chain]:
        """Run x through the stages and keep their derivatives."""
        links = []
        for stage in stages:
            x, link = stage.linearize(x)
            links.append(link)
        return x, cls(tuple(links))

    def jvp(self, dx: Tensor) -> Tensor:
        for link in self.links:
            dx = link.jvp(dx)
        return dx

    def vjp(self, gy: Tensor) -> Tensor:
        for link in reversed(self.links):
            gy = link.vjp(gy)
        return gy

    def select(self, index: Tensor) -> Chain:
        return Chain(tuple(link.select(index) for link in self.links))

    def to(self, dtype: torch.dtype) -> Chain:
        return Chain(tuple(link.to(dtype) for link in self.links))

    def size(self) -> Tensor | float:
        return math.prod((link.size() for link in self.links), start=1.0)


class Scale(TokenStage):
    """y = c·x."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = check_number(factor, "the scale of queries, keys or values")

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        return x * self.factor, Multiple(self.factor)


@dataclass(frozen=True)
class Multiple(TokenDerivative):
    """The derivative c·dx of a multiple."""

    factor: float

    def jvp(self, dx: Tensor) -> Tensor:
        return dx * self.factor

    def vjp(self, gy: Tensor) -> Tensor:
        return gy * self.factor

    def select(self, index: Tensor) -> TokenDerivative:
        return self

    def size(self) -> float:
        return abs(self.factor)


class UnitNorm(TokenStage):
    """y = c·g∘x/√(|x|² + ε): queries, keys or values brought to (nearly) one length.

    Its derivative is c·g∘(dx − u (u·dx))/√(|x|² + ε) with u = x/√(|x|² + ε).
    """

    @door
    def __init__(self, eps: float, length: float = 1.0, gain: Tensor | None = None):
        super().__init__()
        self.gain: Tensor | None
        if not (math.isfinite(eps) and eps >= 0 and math.isfinite(length)):
            raise InvalidInput(
                f"a normalisation needs a finite length and a finite eps that is not negative, got length {length} and "
                f"eps {eps}."
            )
        self.eps, self.length = eps, length
        self.register_buffer("gain", gain, persistent=False)

    @classmethod
    @door
    def rms(cls, width: int, eps: float = 1e-6, gain: Tensor | None = None) -> UnitNorm:
        """RMSNorm over ``width`` coordinates: x/√(mean x² + ε) = √width·x/√(|x|² + width·ε)."""
        return cls(eps * width, width**0.5, gain)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        inverse = (x.square().sum(-1, keepdim=True) + self.eps).rsqrt()
        unit = x * inverse
        gain = torch.full((), self.length, dtype=x.dtype, device=x.device)
        if self.gain is not None:
            gain = gain * self.gain.to(x)
        return unit * gain, _UnitNormDerivative(unit, inverse, gain)


@dataclass(frozen=True)
class _UnitNormDerivative(TokenDerivative):
    unit: Tensor
    inverse: Tensor
    gain: Tensor

    def _project(self, t: Tensor) -> Tensor:
        return (t - self.unit * (self.unit * t).sum(-1, keepdim=True)) * self.inverse

    def jvp(self, dx: Tensor) -> Tensor:
        return self._project(dx) * self.gain

    def vjp(self, gy: Tensor) -> Tensor:
        return self._project(gy * self.gain)

    def select(self, index: Tensor) -> TokenDerivative:
        return replace(self, unit=self.unit[index], inverse=self.inverse[index])

    def size(self) -> Tensor:
        return self.inverse * self.gain.abs().amax()
