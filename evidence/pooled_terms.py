"""Expansions of attention read at one token, and parabolas around ReLU, beside what they bound.

Of `howsmooth.certificates.classifier.cls_token` and `howsmooth.certificates.classifier.relu_relaxation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evidence.juries import Example, Modules, agreement, largest

DRAWS = 4000
SHARES = (0.3, 0.7, 1.0)
"""Radii, in units of that of the ball, at which growth, spread and third derivatives are compared."""


@dataclass(frozen=True)
class Pool:
    """o(p) = c + Σ_h Σ_j P_hj (U_h p_j + u_hj), P_h = softmax(κ_h·p_j + s_hj), on a ball around tokens.

    Attributes:
        keys: κ ``(heads, d)``. offsets: s ``(heads, fixed + n)``. values: U ``(heads, m, d)``.
        value_offsets: u ``(heads, fixed + n, m)``. tokens: ``(n, d)``. radius: of the ball around all of them.
    """

    keys: Tensor
    offsets: Tensor
    values: Tensor
    value_offsets: Tensor
    tokens: Tensor
    radius: float

    @property
    def fixed(self) -> int:
        return self.offsets.shape[-1] - len(self.tokens)

    @property
    def constant(self) -> Tensor:
        return torch.ones(self.values.shape[1], dtype=torch.float64)

    @property
    def functional(self) -> Tensor:
        """a, the functional that is expanded."""
        return torch.linspace(1.0, -0.5, self.values.shape[1], dtype=torch.float64)

    def weights(self, tokens: Tensor) -> Tensor:
        """P at tokens ``(…, n, d)``, ``(…, heads, rows)``."""
        return torch.softmax(self.offsets + self.keys @ self._rows(tokens).mT, -1)

    def value(self, tokens: Tensor) -> Tensor:
        """a·o at tokens ``(…, n, d)``."""
        rows = self.value_offsets + self._rows(tokens)[..., None, :, :] @ self.values.mT
        return (self.constant + (self.weights(tokens)[..., None] * rows).sum((-3, -2))) @ self.functional

    def _rows(self, tokens: Tensor) -> Tensor:
        still = tokens.new_zeros(*tokens.shape[:-2], self.fixed, tokens.shape[-1])
        return torch.cat([still, tokens], -2)

    @cached_property
    def directions(self) -> Tensor:
        """Unit moves, ``(draws, n, d)``."""
        moves = torch.randn(DRAWS, *self.tokens.shape, generator=torch.Generator().manual_seed(0)).double()
        units = self.keys / self.keys.norm(dim=-1, keepdim=True)
        moves[:200] = moves[:200, :, :1] * units[0]  # along the keys of the first head, where weights move most
        return moves / moves.norm(dim=(-2, -1), keepdim=True)

    def along(self, shares: Tensor, order: int) -> Tensor:
        """The derivative of this order of g(t) = a·o(p + tδ) at shares of the radius, of every direction δ."""
        directions = self.directions

        def g(t: Tensor) -> Tensor:
            return self.value(self.tokens + t[:, None, None] * directions)

        f = g
        for _ in range(order):
            f = _derivative(f)
        return f(shares * self.radius)

    @cached_property
    def rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """g, g' and g'' at the input, of every direction."""
        zero = torch.zeros(DRAWS, dtype=torch.float64)
        return self.along(zero, 0), self.along(zero, 1), self.along(zero, 2)

    def example(self, label: str) -> Example:
        """All of it."""
        return Example(label, self._proved, self._truths())

    def _proved(self, modules: Modules) -> Iterator[tuple[str, Tensor]]:
        pooled = modules["certificates.classifier.cls_token"]
        parts = self.keys, self.offsets, self.values, self.value_offsets, self.constant
        point = pooled.PooledAttention(*parts, self.fixed).at(self.tokens)
        found, radii = pooled.Functionals(point, self.functional[None]), self.radius * _column(SHARES)
        yield "value", agreement(found.value, self.value(self.tokens)[None])
        yield "gradient", agreement(found.gradient[0] @ self.directions.flatten(1).mT, self.rates[1])
        some = self.directions[:20].flatten(1)
        bends = torch.stack([found.hessian_product(move[None])[0] @ move for move in some])
        yield "second derivative", agreement(bends, self.rates[2][:20])
        yield "growth", point.growth(radii).exp()
        variance, reach = point.spread(radii)
        yield "variance", variance
        yield "reach", reach
        least, most = found.curvature
        yield "curvature", torch.cat([-least, most])
        yield "third derivative", found.third_derivative(radii)[0]
        yield "remainder", found.remainder(self.radius)

    def _truths(self) -> dict[str, Tensor]:
        growth, variance, reach, third = [], [], [], []
        here = self.weights(self.tokens)
        for share in SHARES:
            p = self.weights(self.tokens + share * self.radius * self.directions)
            growth.append(largest((p / here).amax(-1)))
            moving = p[..., self.fixed :]
            square = moving.square().sum(-1)
            spread = torch.diag_embed(moving) - moving[..., None] * moving[..., None, :]
            variance.append(largest(torch.linalg.eigvalsh(spread)[..., -1]))
            far = (1 - 2 * moving + square[..., None]).amax(-1)
            reach.append(largest(torch.maximum(far, square) if self.fixed else far))
            third.append(largest(self.along(torch.full((DRAWS,), share).double(), 3).abs()))
        start, slope, curvature = self.rates
        there = self.along(torch.ones(DRAWS, dtype=torch.float64), 0)
        rest = there - start - self.radius * slope - 0.5 * self.radius**2 * curvature
        ones = torch.ones(1, dtype=torch.float64)
        return {
            "value": ones, "gradient": ones.expand(DRAWS), "second derivative": ones.expand(20),
            "growth": torch.stack(growth), "variance": torch.stack(variance), "reach": torch.stack(reach),
            "curvature": torch.stack([largest(-curvature), largest(curvature)]),
            "third derivative": torch.stack(third), "remainder": largest(rest.abs())[None],
        }  # fmt: skip


def _derivative(f):  # type: ignore[no-untyped-def]
    return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


def _column(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def _double(*numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _drawn(
    seed: int, radius: float, steep: float = 1.0, heads: int = 2, fixed: int = 1, n: int = 2, d: int = 2
) -> Pool:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).double()

    rows = fixed + n
    return Pool(steep * normal(heads, d), normal(heads, rows), normal(heads, 2, d), normal(heads, rows, 2),
                normal(n, d), radius)  # fmt: skip


def _two(share: float, radius: float, steep: float = 1.0, value: float = 0.0, far: float = 1.0, fixed: int = 0) -> Pool:
    """One head at two tokens of one coordinate, or one that moves and one that does not.

    Args:
        share: the weight of the second. value: what values move with tokens. far: how far apart they are.
    """
    tokens = torch.zeros(2 - fixed, 1, dtype=torch.float64)
    return Pool(_double([steep]), _double([1 - share, share]).log(), _double([[value]]), _double([[0.0], [far]]),
                tokens, radius)  # fmt: skip


def _across(share: float, radius: float) -> Pool:
    """One head at two tokens whose values move across the direction of its keys."""
    one = torch.eye(2, dtype=torch.float64)
    return Pool(
        one[:1], _double([1 - share, share]).log(), one[None, 1:], torch.zeros(1, 2, 1).double(), 0 * one, radius
    )


POOLS = {
    **{f"drawn {seed} by {radius:g}": _drawn(seed, radius) for seed, radius in ((0, 0.01), (1, 0.3), (2, 2.0))},
    "drawn, one head, none fixed": _drawn(3, 0.1, heads=1, fixed=0, n=3),
    "drawn, steep": _drawn(4, 0.3, steep=6.0),
    **{f"two tokens, {share:g} by {radius:g}": _two(share, radius)
       for share in (0.5, 0.2, 0.02) for radius in (0.01, 1.0)},
    **{f"one of two tokens, {share:g}": _two(share, 0.01, fixed=1) for share in (0.5, 0.2, 0.02)},
    "two tokens whose values move": _two(0.2, 0.01, value=1.0, far=0.0),
    "two tokens whose values move, far": _two(0.5, 3.0, value=1.0, far=0.0),
    "two tokens of the largest skew whose values move across": _across(0.2113, 0.01),
    "two tokens, the second below": _two(0.5, 0.01, far=-1.0),
    "two tokens, 0.1 by 0.01": _two(0.1, 0.01),
    "two tokens, 0.1 by 0.5": _two(0.1, 0.5),
    "two tokens, nearly saturated": _two(1e-4, 2.0, steep=3.0),
}  # fmt: skip


def pools() -> list[Example]:
    """Examples of `howsmooth.certificates.classifier.cls_token`."""
    return [pool.example(label) for label, pool in POOLS.items()]


BOXES = ((-1.0, 1.0), (-0.1, 2.0), (-3.0, 0.2), (0.5, 1.0), (-2.0, -1.0), (-0.6, 1.0), (-1.0, 0.6), (-1.02, 1.0))
"""Intervals of hidden values."""


@dataclass(frozen=True)
class Box:
    """A hidden value z = z⁰ + y + R, |y| ≤ ``reach``, |R| ≤ ``rest``, times a weight, below ReLU or above it.

    Attributes:
        skew: z⁰ less the middle of the interval of z, which is so much wider on one side.
    """

    lower: float
    upper: float
    weight: float
    size: float | None
    rest: float
    skew: float = 0.0

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """All pairs of y and R."""
        reach = (self.upper - self.lower) / 2 - self.rest - abs(self.skew)
        moves = torch.linspace(-reach, reach, 201, dtype=torch.float64)
        rests = torch.linspace(-self.rest, self.rest, 5, dtype=torch.float64)
        return moves[:, None].expand(-1, 5), rests.expand(201, -1)

    @property
    def start(self) -> float:
        return (self.lower + self.upper) / 2 + self.skew

    def example(self, label: str) -> Example:
        """What is lost below the largest value of the term."""
        moves, rests = self.grid
        z = self.start + moves + rests
        top = 10.0

        def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
            module = modules["certificates.classifier.relu_relaxation"]
            hidden = module.HiddenBounds(
                *(_double(number) for number in (self.start,)), torch.ones(1, 1).double(),
                *(_double(number) for number in (self.lower, self.upper, self.rest, float(moves.max()))),
            )  # fmt: skip
            for line in (0.0, 0.4, 1.0):
                guess = None if self.size is None else module.HiddenMoments(_double(self.start), _double(self.size**2))
                found = module.ReluRelaxation.of(_double(self.weight), hidden, _double(line), guess)
                value = found.constant + found.coefficients * z + found.slopes * moves + found.squares * moves.square()
                yield f"line {line:g}", top - value

        truth = top - self.weight * torch.relu(z)
        return Example(label, proved, {f"line {line:g}": truth for line in (0.0, 0.4, 1.0)})


def boxes() -> list[Example]:
    """Examples of `howsmooth.certificates.classifier.relu_relaxation`."""
    found = []
    for lower, upper in BOXES:
        for weight in (-2.0, 3.0):
            for size in (None, 0.0, 0.3, 0.8, 5.0):
                for rest, skew in ((0.0, 0.0), (0.0, 0.02), (0.04, 0.0), (0.04, -0.02)):
                    box = Box(lower, upper, weight, size, rest, skew)
                    found.append(box.example(f"[{lower:g}, {upper:g}] × {weight:g}, {size}, {rest:g}, {skew:g}"))
    return found
