"""Maps of single tokens and their Jacobians: linear maps, normalisations, activations and gates.

Each is a `TokenStage`: a value, and a derivative that keeps what it needs of the tokens. A chain of them is one
operator (`TokenwiseJacobian`): block diagonal, one block per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth.attention.memory_layout import is_channels_first, matmul, prefers_channels_first
from howsmooth.attention.stages import Chain, Multiple, TokenDerivative, TokenStage, UnitNorm
from howsmooth.jacobians.operator import Accuracy, JacobianOperator
from howsmooth.numerics.roundoff import spread_of_sum
from howsmooth.numerics.spectral_norms import spectral_bound


class Affine(TokenStage):
    """y = W x + b, the weight ``(out, in)`` as in `torch.nn.Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        weight = self.weight.to(x)
        bias = None if self.bias is None else self.bias.to(x)
        return torch.nn.functional.linear(x, weight, bias), Matrix(weight, self.weight)


@dataclass(frozen=True)
class Matrix(TokenDerivative):
    """dy = W dx; ``given`` is W in the dtype it came in, so that going back to that takes no memory."""

    weight: Tensor
    given: Tensor | None = None

    def jvp(self, dx: Tensor) -> Tensor:
        return matmul(dx, self.weight.mT)

    def vjp(self, gy: Tensor) -> Tensor:
        return matmul(gy, self.weight)

    def to(self, dtype: torch.dtype) -> Self:
        given = self.weight if self.given is None else self.given
        return replace(self, weight=given.to(dtype), given=given)

    def channels_first(self) -> Self:
        return self

    def size(self) -> Tensor:
        return spectral_bound(self.weight)


class Diagonal(TokenStage):
    """y = g∘x + b: the end of a normalisation, or a scale of its own for every channel."""

    def __init__(self, gain: Tensor | float, shift: Tensor | None = None):
        super().__init__()
        self.gain, self.shift = gain, shift

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        gain = torch.as_tensor(self.gain, dtype=x.dtype, device=x.device)
        y = x * gain
        return y if self.shift is None else y + self.shift.to(x), Slopes(gain)


class Norm(TokenStage):
    """LayerNorm or RMSNorm of single tokens: y = γ∘z/(|z|²/d + ε)^½ + β, with z = x or, ``centred``, x less its mean.

    >>> x = torch.tensor([[1.0, 3.0]])
    >>> Norm(2, eps=0.0, centred=True)(x).round(), Norm(2, eps=0.0, gain=torch.tensor([5.0, 1.0]))(x)[0, 1] > 1
    (tensor([[-1.,  1.]]), tensor(True))
    """

    def __init__(
        self,
        width: int,
        eps: float,
        gain: Tensor | None = None,
        shift: Tensor | None = None,
        centred: bool = False,
    ):
        super().__init__()
        self.unit, self.shift, self.centred = UnitNorm.rms(width, eps, gain), shift, centred
        self.width, self.eps = width, eps

    @property
    def gain(self) -> Tensor | None:
        """γ, or None for ones."""
        return self.unit.gain

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        y, derivative = self.unit.linearize(x - x.mean(-1, keepdim=True) if self.centred else x)
        return y if self.shift is None else y + self.shift.to(x), replace(derivative, centred=self.centred)

    def followed_by(self, factor: Tensor | None, shift: Tensor | None) -> Norm:
        """The normalisation times a factor of each channel, plus a shift."""
        gain, beta = self.gain, self.shift
        if factor is not None:
            gain, beta = factor if gain is None else gain * factor, None if beta is None else beta * factor
        if shift is not None:
            beta = shift if beta is None else beta + shift
        return Norm(self.width, self.eps, gain, beta, self.centred)


class Activation(TokenStage):
    """y = a(x) for a function a of single numbers, which may be any that torch can differentiate.

    >>> Activation(torch.relu).linearize(torch.tensor([[-1.0, 2.0]]))[1].jvp(torch.ones(1, 2))
    tensor([[0., 1.]])
    """

    def __init__(self, function: Callable[[Tensor], Tensor], name: str = ""):
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        """The value alone, differentiable."""
        return self.function(x)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        y, slopes = _with_slopes(self.function, x)
        return y, Slopes(slopes)


class Slopes(Multiple):
    """dy = s∘dx with a slope for each coordinate, of all tokens or of each."""

    def size(self) -> Tensor:
        return torch.as_tensor(super().size()).double().amax()


class GatedActivation(TokenStage):
    """y = a(g)∘u, where a token holds g in its first half and u in its second: the middle of a gated MLP.

    >>> GatedActivation(torch.relu)(torch.tensor([[2.0, 3.0]]))
    tensor([[6.]])
    """

    def __init__(self, function: Callable[[Tensor], Tensor], name: str = ""):
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        """The value alone, differentiable."""
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        gate, up = x.chunk(2, dim=-1)
        opened, slopes = _with_slopes(self.function, gate)
        return opened * up, _Gated(slopes.mul_(up), opened)


class Softmax(TokenStage):
    """y = softmax(x) of every token by itself, such as weights over keys that do not move.

    >>> Softmax().linearize(torch.zeros(1, 2))[1].jvp(torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        y = x.softmax(-1)
        return y, _SoftmaxDerivative(y)


@dataclass(frozen=True)
class _SoftmaxDerivative(TokenDerivative):
    """dy = y∘(dx − y·dx), which is symmetric and has norm at most ½."""

    weights: Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        push = self.weights * dx
        return push - self.weights * push.sum(-1, keepdim=True)

    def vjp(self, gy: Tensor) -> Tensor:
        return self.jvp(gy)

    def size(self) -> float:
        return 0.5


@dataclass(frozen=True)
class _Gated(TokenDerivative):
    """dy = (a'(g)∘u)∘dg + a(g)∘du."""

    of_gate: Tensor
    of_up: Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        dgate, dup = dx.chunk(2, dim=-1)
        return (dgate * self.of_gate).addcmul_(dup, self.of_up)

    def vjp(self, gy: Tensor) -> Tensor:
        *batch, n, width = gy.shape
        back = gy.new_empty(*batch, 2 * width, n).mT if is_channels_first(gy) else gy.new_empty(*batch, n, 2 * width)
        torch.mul(gy, self.of_gate, out=back[..., :width])
        torch.mul(gy, self.of_up, out=back[..., width:])
        return back

    def size(self) -> Tensor:
        return torch.hypot(self.of_gate.double(), self.of_up.double()).amax()


def _with_slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """a(x) and a'(x) of a function of single numbers: the gradient of Σ a(x_i) in x."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf)
        (slopes,) = torch.autograd.grad(y.sum(), leaf)
    return y.detach(), slopes


@dataclass(frozen=True, eq=False, repr=False)
class TokenwiseJacobian(JacobianOperator):
    """Products with the derivative of a chain of token stages.

    >>> x = torch.tensor([[1.0, -2.0]])
    >>> J = TokenwiseJacobian.at(x, Chain.through([Activation(torch.relu), Affine(torch.ones(3, 2))], x)[1], 3)
    >>> J.matvec(torch.ones(1, 2))
    tensor([[1., 1., 1.]])
    """

    method = "closed form"

    chain: Chain
    batch_shape: torch.Size
    in_shape: torch.Size
    out_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def at(cls, x: Tensor, chain: Chain, out_width: int) -> TokenwiseJacobian:
        """The derivative at tokens x, ``(…, n, d)``."""
        return cls(chain, x.shape[:-2], x.shape[-2:], torch.Size([x.shape[-2], out_width]), x.dtype, x.device)

    @property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        widths = [link.weight.shape[1] for link in self.chain.links if isinstance(link, Matrix)]
        terms = [spread_of_sum(width) / 4 for width in widths]  # as for the projections of attention
        return Accuracy(product=(sum(terms) + 2 * len(self.chain.links)) * torch.finfo(self.dtype).eps * self.size())

    def size(self) -> Tensor:
        size = torch.as_tensor(self.chain.size(), dtype=torch.float64).cpu()
        return size.expand(*self.batch_shape, self.in_shape[0], 1).amax((-2, -1))

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        return self.chain.jvp(v.to(self.dtype))

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        return self.chain.vjp(u.to(self.dtype))

    def rounded(self, dtype: torch.dtype) -> JacobianOperator:
        chain = self.chain.to(dtype)
        if prefers_channels_first(self.batch_shape + self.in_shape, dtype):
            chain = chain.channels_first()
        return replace(self, chain=chain, dtype=dtype)

    def subset(self, index: Tensor) -> JacobianOperator | None:
        if len(self.batch_shape) != 1:
            return None  # derivatives have the batch first
        return replace(self, chain=self.chain.select(index), batch_shape=index.shape)

    def line_costs(self) -> tuple[float, float]:
        n = math.prod(self.in_shape[:1])
        return self.out_size / n, self.in_size / n

    def columns(self, index: Tensor) -> Tensor:
        return self._lines(index, self.in_shape, self.out_shape, self.chain.jvp)

    def rows(self, index: Tensor) -> Tensor:
        return self._lines(index, self.out_shape, self.in_shape, self.chain.vjp)

    def _lines(
        self, index: Tensor, shape: torch.Size, other: torch.Size, product: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Tokens do not meet: one product gives the lines of one coordinate for every token."""
        token, coordinate = index // shape[1], index % shape[1]
        lines = torch.zeros(len(index), *self.batch_shape, *other, dtype=self.dtype, device=self.device)
        for a in coordinate.unique().tolist():
            unit = torch.zeros(*self.batch_shape, *shape, dtype=self.dtype, device=self.device)
            unit[..., a] = 1
            moved = product(unit)
            for i in (coordinate == a).nonzero().flatten().tolist():
                lines[i, ..., token[i], :] = moved[..., token[i], :]
        return lines
