"""Token stages: functions of a projected query, key or value, applied before the logits.

Each stage acts on every token by itself and knows its own derivative in closed form. Tensors are ``(maps, n, width)``
(or any leading shape): one map per head and batch item.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_number, check_positive, validated
from howsmooth.attention.memory_layout import channels_first, interleave_channels, join_channels
from howsmooth.errors import InvalidInput


class TokenDerivative(ABC):
    """Derivative of a stage at the tokens it was linearised at."""

    @abstractmethod
    def jvp(self, dx: Tensor) -> Tensor:
        """Tangents through the stage."""

    @abstractmethod
    def vjp(self, gy: Tensor) -> Tensor:
        """Cotangents back through the stage."""

    def select(self, index: Tensor) -> Self:
        """The derivative for the maps at ``index`` only: all maps share tensors but those of shape ``(maps, n, ·)``.

        Where there is one map, it stands for all.
        """
        return self._changed(
            lambda tensor: tensor[index] if tensor.dim() > 2 and len(tensor) > 1 else tensor,
            lambda inner: inner.select(index),
        )

    def to(self, dtype: torch.dtype) -> Self:
        """The derivative rounded to another dtype."""
        return self._changed(lambda tensor: tensor.to(dtype), lambda inner: inner.to(dtype))

    def channels_first(self) -> Self:
        """The same for tangents whose channels lie before their tokens (`howsmooth.attention.memory_layout`)."""
        return self._changed(
            lambda tensor: channels_first(tensor) if tensor.dim() > 1 else tensor, lambda inner: inner.channels_first()
        )

    def _changed(self, tensor: Callable[[Tensor], Tensor], inner: Callable[[TokenDerivative], TokenDerivative]) -> Self:
        """The same dataclass with its tensors, and the derivatives that it consists of, changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            if isinstance(value, TokenDerivative):
                return inner(value)
            return tensor(value) if isinstance(value, Tensor) else value

        return replace(self, **{name: changed(value) for name, value in vars(self).items()})  # type: ignore[type-var]

    @abstractmethod
    def size(self) -> Tensor | float:
        """An upper bound on the operator norm at every token, as ``(maps, n, 1)`` or a shape that broadcasts to it."""


class TokenStage(nn.Module, ABC):
    """A map x_i ↦ y_i applied to every token.

    Attributes:
        linear: whether it is linear with one bound on its norm at all places: a multiple or a rotation.
        scale: c where it is y = c·x, else None.
    """

    linear = False
    scale: float | None = None

    @abstractmethod
    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        """The value at x and the derivative there."""

    def of_head(self, head: int) -> TokenStage:
        """The stage of one head by itself."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.linearize(x)[0]


@dataclass(frozen=True)
class Chain(TokenDerivative):
    """Stages one after the other; the empty chain is the identity."""

    links: tuple[TokenDerivative, ...]

    @classmethod
    def through(cls, stages: Sequence[TokenStage], x: Tensor) -> tuple[Tensor, Chain]:
        """The value of the stages at x, and their derivatives."""
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

    def size(self) -> Tensor | float:
        return math.prod((link.size() for link in self.links), start=1.0)


IDENTITY = Chain(())
"""The derivative of no stage at all."""


class Scale(TokenStage):
    """y = c·x."""

    linear = True

    def __init__(self, factor: float):
        super().__init__()
        self.scale = self.factor = check_number(factor, "the scale of queries, keys or values")

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        return x * self.factor, Multiple(self.factor)


@dataclass(frozen=True)
class Multiple(TokenDerivative):
    """The derivative c·dx of a multiple: one number, or one for each token, ``(n, 1)``, the same in every map."""

    factor: float | Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        return dx * self.factor

    def vjp(self, gy: Tensor) -> Tensor:
        return gy * self.factor

    def size(self) -> float | Tensor:
        return self.factor.abs() if isinstance(self.factor, Tensor) else abs(self.factor)


class UnitNorm(TokenStage):
    """y = c·g∘x/√(|x|² + ε): queries, keys or values brought to (nearly) one length.

    Its derivative is c·g∘(dx − u (u·dx))/√(|x|² + ε) with u = x/√(|x|² + ε).
    """

    @validated
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
    @validated
    def rms(cls, width: int, eps: float = 1e-6, gain: Tensor | None = None) -> UnitNorm:
        """RMSNorm over ``width`` coordinates: x/√(mean x² + ε) = √width·x/√(|x|² + width·ε)."""
        check_count(width, "width", most=2**62)
        return cls(eps * width, width**0.5, gain)

    def linearize(self, x: Tensor) -> tuple[Tensor, UnitNormDerivative]:
        inverse = (x.square().sum(-1, keepdim=True) + self.eps).rsqrt()
        unit = x * inverse
        gain = torch.full((), self.length, dtype=x.dtype, device=x.device)
        if self.gain is not None:
            gain = gain * self.gain.to(x)
        return unit * gain, UnitNormDerivative(unit, inverse, gain)


@dataclass(frozen=True)
class UnitNormDerivative(TokenDerivative):
    """dy = g∘(dx − u (u·dx))/√(|x|² + ε), the gain being c·g; with ``centred`` u has mean 0 and dx loses its own."""

    unit: Tensor
    inverse: Tensor
    gain: Tensor
    centred: bool = False

    def _project(self, t: Tensor) -> Tensor:
        along = (self.unit * t).sum(-1, keepdim=True)
        t = t - t.mean(-1, keepdim=True) if self.centred else t
        return torch.addcmul(t, self.unit, along, value=-1) * self.inverse

    def jvp(self, dx: Tensor) -> Tensor:
        return self._project(dx) * self.gain

    def vjp(self, gy: Tensor) -> Tensor:
        return self._project(gy * self.gain)

    def size(self) -> Tensor:
        return self.inverse * self.gain.abs().amax(-1, keepdim=True)


class HeadNorm(TokenStage):
    """LayerNorm of a head: y = g∘(x − x̄)/√(mean (x − x̄)² + ε) + b, with x̄ the mean of its coordinates.

    Args:
        eps: ε. gain, shift: g and b, for all heads ``(width,)`` or one for each ``(heads, width)``.

    With u = (x − x̄)/√(|x − x̄|² + width·ε) the derivative is c·g∘(dx − d̄x − u (u·dx)), c = √width/√(|x − x̄|² + width·ε).
    """

    @validated
    def __init__(self, eps: float, gain: Tensor | None = None, shift: Tensor | None = None):
        super().__init__()
        self.gain: Tensor | None
        self.shift: Tensor | None
        self.eps = eps
        self.register_buffer("gain", gain, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        centred, width = x - x.mean(-1, keepdim=True), x.shape[-1]
        inverse = (centred.square().sum(-1, keepdim=True) + width * self.eps).rsqrt()
        unit = centred * inverse
        gain = width**0.5 * (x.new_ones(()) if self.gain is None else _of_heads(self.gain, x))
        shift = x.new_zeros(()) if self.shift is None else _of_heads(self.shift, x)
        return unit * gain + shift, UnitNormDerivative(unit, inverse, gain.expand_as(unit), centred=True)

    def of_head(self, head: int) -> HeadNorm:
        gain, shift = (t if t is None or t.dim() == 1 else t[head] for t in (self.gain, self.shift))
        return HeadNorm(self.eps, gain, shift)


def _of_heads(numbers: Tensor, x: Tensor) -> Tensor:
    """Numbers of each coordinate, or of each head and coordinate, beside tokens ``(…, heads, n, width)``."""
    numbers = numbers.to(x)
    if numbers.dim() == 1:
        return numbers
    numbers = numbers[:, None]
    return numbers.repeat(len(x) // len(numbers), 1, 1) if x.dim() == 3 else numbers


class Rotary(TokenStage):
    """Rotary position embedding (Su et al. 2021): the pair (x_a, x_b) at position t turns by the angle t·ω.

    Args:
        frequencies: the angles per position ω, one per pair; see `Rotary.standard`.
        interleaved: pairs are (0,1), (2,3), … (GPT-J) instead of (0, m), (1, m+1), … (Llama, GPT-NeoX).
        amplitude: factor on cosine and sine (YaRN and relatives).
        positions: the position of each token; 0, 1, 2, … when None.

    Coordinates beyond the pairs pass unchanged (partial rotary).
    """

    linear = True
    has_frequencies = True

    @validated
    def __init__(
        self, frequencies: Tensor, interleaved: bool = False, amplitude: float = 1.0, positions: Tensor | None = None
    ):
        super().__init__()
        check_number(amplitude, "amplitude")
        if frequencies.dim() != 1 or not bool(torch.isfinite(frequencies).all()):
            raise InvalidInput(
                f"rotary positions need a vector of finite frequencies, got some of shape {tuple(frequencies.shape)}."
            )
        self.frequencies: Tensor
        self.positions: Tensor | None
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("positions", positions, persistent=False)
        self.interleaved, self.amplitude = interleaved, amplitude

    @classmethod
    @validated
    def standard(cls, dim: int, base: float = 10_000.0, interleaved: bool = False) -> Rotary:
        """ω_m = base^{−2m/dim}, in double precision."""
        base = check_positive(base, "the base of rotary positions")
        if dim < 2 or dim % 2:
            raise InvalidInput(f"rotary positions turn pairs of coordinates: the width must be even, got {dim}.")
        return cls(base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), interleaved)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        n, width = x.shape[-2:]
        pairs = len(self.frequencies)
        if 2 * pairs > width:
            raise InvalidInput(f"rotary positions need {2 * pairs} coordinates per head, but heads are {width} wide.")
        places = torch.arange(n, device=x.device) if self.positions is None else self.positions
        if len(places) != n:
            raise InvalidInput(f"rotary positions are given for {len(places)} tokens, but the input has {n}.")
        wide = torch.promote_types(self.frequencies.dtype, torch.float32)  # bfloat16 cannot count beyond 256
        angle = places.to(wide)[:, None] * self.frequencies.to(wide)
        turn = _Turn((angle.cos() * self.amplitude).to(x), (angle.sin() * self.amplitude).to(x), self.interleaved)
        return turn.jvp(x), turn


class RotaryTable(Rotary):
    """Rotary positions by their cosines and sines, ``(n, pairs)``, as a network holds them.

    Args:
        cos, sin: the table. frequencies: those that give the table up to rounding; None where none do.
        interleaved, amplitude, positions: as in `Rotary`.
    """

    @validated
    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        frequencies: Tensor | None = None,
        amplitude: float = 1.0,
        positions: Tensor | None = None,
    ):
        known = cos.new_zeros(cos.shape[-1]) if frequencies is None else frequencies
        super().__init__(known, interleaved, amplitude, positions)
        self.has_frequencies = frequencies is not None
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        if x.shape[-2] != len(self.cos):
            raise InvalidInput(
                f"rotary positions are given for {len(self.cos)} tokens, but the input has {x.shape[-2]}."
            )
        turn = _Turn(self.cos.to(x), self.sin.to(x), self.interleaved)
        return turn.jvp(x), turn

    @staticmethod
    def tables_of(rotary: Rotary, n: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions, in float64 as they are rounded for the dtype of the frequencies."""
        places = torch.arange(n) if rotary.positions is None else rotary.positions
        angle = places.to(rotary.frequencies.dtype)[:, None] * rotary.frequencies
        return (angle.cos() * rotary.amplitude).double(), (angle.sin() * rotary.amplitude).double()


@dataclass(frozen=True)
class _Turn(TokenDerivative):
    """The rotation itself: linear, the same for every head and batch item."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def jvp(self, dx: Tensor) -> Tensor:
        return self._turn(dx, self.sin)

    def vjp(self, gy: Tensor) -> Tensor:
        return self._turn(gy, -self.sin)

    def size(self) -> Tensor:
        return torch.hypot(self.cos, self.sin).amax(-1, keepdim=True).clamp_min(1.0)

    def _turn(self, x: Tensor, sin: Tensor) -> Tensor:
        pairs = sin.shape[-1]
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.split(pairs, dim=-1)
        both = a * self.cos - b * sin, b * self.cos + a * sin
        return join_channels([interleave_channels(*both) if self.interleaved else join_channels(both), rest])


class PlaceScale(TokenStage):
    """y_i = (1 + a·ln(1 + ⌊(i + 1)/m⌋))·x_i: queries that grow with their place (temperature tuning of Llama 4).

    Args:
        strength: a. step: m. positions: the place of each token; 0, 1, 2, … when None.
    """

    @validated
    def __init__(self, strength: float, step: float, positions: Tensor | None = None):
        super().__init__()
        self.strength, self.step = strength, step
        self.positions: Tensor | None
        self.register_buffer("positions", positions, persistent=False)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        places = torch.arange(x.shape[-2], device=x.device) if self.positions is None else self.positions
        factors = 1 + self.strength * torch.log1p(torch.floor((places.double() + 1) / self.step))
        scale = Multiple(factors.to(x)[:, None])
        return scale.jvp(x), scale


class Behind(TokenStage):
    """A stage on all tokens but the first few, which are zero and stay so."""

    def __init__(self, stage: TokenStage, first: int):
        super().__init__()
        self.stage, self.first = stage, first

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        y, link = self.stage.linearize(x[..., self.first :, :])
        return _after_zeros(y, self.first), _BehindDerivative(link, self.first)


@dataclass(frozen=True)
class _BehindDerivative(TokenDerivative):
    link: TokenDerivative
    first: int

    def jvp(self, dx: Tensor) -> Tensor:
        return _after_zeros(self.link.jvp(dx[..., self.first :, :]), self.first)

    def vjp(self, gy: Tensor) -> Tensor:
        return _after_zeros(self.link.vjp(gy[..., self.first :, :]), self.first)

    def size(self) -> Tensor | float:
        size = self.link.size()
        return _after_zeros(size, self.first) if isinstance(size, Tensor) and size.dim() > 1 else size


def _after_zeros(x: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, count, 0))
