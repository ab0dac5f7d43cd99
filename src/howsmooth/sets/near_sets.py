"""Sets around an input: the input itself, balls around its tokens, boxes; and the set that an argument ``over`` means.

These sets know the input ``x`` and, in `Around.moves`, the distance that each of its tokens may move. `SetText` reads
sets from the texts of the command line: ``point``, ``around:0.01``, ``around:1%``, ``ball:2``, ``norm``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, shown, validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.input_sets import Ball, Everywhere, InputSet, Normalised, Sphere, check_extent, check_inside

Over = InputSet | Tensor | nn.Module | Ellipsoid
"""An argument ``over``: a set, an input (`Point`), or the normalisation before the map (`Normalised`)."""


class Around(InputSet):
    """Inputs near x: every token within eps of its own, or ‖X − x‖_F ≤ eps with ``per_token=False``.

    Args:
        x: the input, ``(n, d)``.
        eps: the distance.
        per_token: False bounds all tokens together, in the Frobenius norm.
        moving: the tokens that move, counted from 0; the others stay in place. None for all.
        within: a set that holds every token, such as the normalisation before the map; bounds on sets use it. Without
            it they use the smallest ball around the origin that holds the neighbourhood.

    >>> near = Around(torch.zeros(2, 1), eps=0.5)
    >>> near.excess(torch.tensor([[0.5], [2.0]]))
    1.5
    >>> Around(torch.zeros(3, 1), 0.5, moving=[1]).moves
    tensor([0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    centre: Tensor
    x: Tensor

    @validated
    def __init__(
        self,
        x: Tensor,
        eps: float,
        per_token: bool = True,
        *,
        moving: Sequence[int] | None = None,
        within: Over | None = None,
    ):
        check_tokens(x)
        if x.dim() != 2:
            raise InvalidInput(f"a set is about one input, (n, d), got shape {tuple(x.shape)}.")
        self.x, self.centre = x.detach(), x.detach().double().cpu()
        self.eps = self.reach = self.size = check_extent("eps", eps)
        self.per_token, self.body = per_token, "ball" if per_token else "all tokens"
        self.length, self.width = x.shape
        self.moving = None if moving is None else [check_count(i, "moving", least=0, most=len(x) - 1) for i in moving]
        self.within = None if within is None else as_set(within, x.shape[1]).ellipsoid(x.shape[1])
        if self.within is not None:
            check_inside(self.x, self.within)

    @property
    def moves(self) -> Tensor:
        """The distance that every token may move, ``(n,)``."""
        moves = torch.zeros(len(self.x), dtype=torch.float64)
        moves[slice(None) if self.moving is None else self.moving] = self.reach
        return moves

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        if self.within is not None:
            return self.within
        radius = float(self.centre.norm(dim=-1).max()) + self.reach
        origin = f"largest token {'near' if self.eps else 'of'} the input"
        return Ellipsoid.ball(radius, width, origin) if radius > 0 else None

    def first(self, n: int) -> Around:
        if n > len(self.x):
            raise InvalidInput(f"{n} tokens were requested, but the input has {len(self.x)}: ask for fewer.")
        moving = None if self.moving is None else [token for token in self.moving if token < n]
        return Around(self.x[:n], self.reach, self.per_token, moving=moving, within=self.within)

    def restrict_(self, z: Tensor) -> Tensor:
        super().restrict_(z)
        return z if self.moving is None else z.mul_((self.moves > 0).to(z)[:, None])

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        x = super().random(generator, n, d, dtype)
        return x if self.moving is None else self.project_(x)

    def describe(self) -> dict[str, Any]:
        still = {} if self.moving is None else {"moving": self.moving}
        return {"set": "around", "eps": self.eps, "per_token": self.per_token} | still

    def __str__(self) -> str:
        return f"{'each token' if self.per_token else 'all tokens'} within {self.reach:.4g}"


class Point(Around):
    """The input x alone.

    Args:
        x: the input, ``(n, d)``.
        within: as in `Around`; without it the smallest ball around the origin that holds the tokens of x.

    >>> Point(torch.tensor([[3.0, 4.0]])).excess(torch.tensor([[3.0, 3.0]]))
    1.0
    """

    @validated
    def __init__(self, x: Tensor, *, within: Over | None = None):
        super().__init__(x, 0.0, within=within)
        self.eps = None

    def first(self, n: int) -> Point:
        return Point(super().first(n).x, within=self.within)

    def describe(self) -> dict[str, Any]:
        return {"set": "point"}

    def __str__(self) -> str:
        return "the input"


class Box(InputSet):
    """Inputs whose entries lie between two bounds of their own: lower ≤ X ≤ upper, both ``(n, d)``.

    Its x is the centre, and eps the largest distance of a token from that of x.

    >>> box = Box(torch.zeros(1, 2), torch.tensor([[6.0, 8.0]]))
    >>> box.excess(torch.tensor([[7.0, 4.0]])), round(float(box.moves), 9)
    (1.0, 5.0)
    """

    body = "box"
    centre: Tensor
    x: Tensor

    @validated
    def __init__(self, lower: Tensor, upper: Tensor):
        for name, bound in (("lower", lower), ("upper", upper)):
            check_tokens(bound, name)
        if lower.dim() != 2 or lower.shape != upper.shape or (lower > upper).any():
            shapes = f"{tuple(lower.shape)} and {tuple(upper.shape)}"
            raise InvalidInput(f"a box needs lower ≤ upper, both of shape (n, d), got shapes {shapes}.")
        self.lower, self.upper = lower.detach().double().cpu(), upper.detach().double().cpu()
        self.x = self.centre = self.lower / 2 + self.upper / 2
        self.half = torch.maximum(self.upper - self.centre, self.centre - self.lower)
        self.length, self.width = self.centre.shape
        self.eps = self.size = float(self.moves.max())

    @property
    def moves(self) -> Tensor:
        """The distance of the farthest corner from the centre for every token, ``(n,)``, rounded up."""
        return self.half.norm(dim=-1) * (1 + (self.half.shape[1] + 8) * torch.finfo(torch.float64).eps)

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        radius = float(torch.maximum(self.lower.abs(), self.upper.abs()).norm(dim=-1).max())
        return Ellipsoid.ball(radius, width, "largest token of the box") if radius > 0 else None

    def first(self, n: int) -> Box:
        return Box(self.lower[:n], self.upper[:n])

    def at(self, z: Tensor) -> Tensor:
        return self.centre.to(z) + self.half.to(z) * z

    def pull(self, gradient: Tensor) -> Tensor:
        return self.half.to(gradient) * gradient

    def coordinates(self, x: Tensor) -> Tensor:
        half = self.half.to(x)
        return (x - self.centre.to(x)) / half.masked_fill(half == 0, 1.0)

    def restrict_(self, z: Tensor) -> Tensor:
        return z.clamp_(-1.0, 1.0)

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        z = torch.randn(n, d, generator=generator, dtype=torch.float64)
        return self.at(z / z.abs().amax(-1, keepdim=True)).to(dtype)

    def project_(self, x: Tensor) -> Tensor:
        return x.copy_(torch.minimum(torch.maximum(x, self.lower.to(x)), self.upper.to(x)))

    def describe(self) -> dict[str, Any]:
        return {"set": "box", "eps": self.eps}

    def __str__(self) -> str:
        return f"a box, each token within {self.eps:.4g}"


def as_set(over: object, width: int | None = None) -> InputSet:
    """The set that ``over`` means: an input is its `Point`, a normalisation layer its image, None all inputs.

    Args:
        width: of the tokens, for a normalisation that does not know it.

    >>> print(as_set(nn.LayerNorm(4)))
    LayerNorm (|x| ≤ 2)
    """
    if isinstance(over, InputSet):
        return over
    if over is None:
        return Everywhere()
    if isinstance(over, Tensor):
        return Point(over)
    if isinstance(over, Ellipsoid | nn.Module):
        return Normalised(over if isinstance(over, Ellipsoid) else Ellipsoid.after(over, width))
    raise InvalidInput(
        f"over is a set of howsmooth.sets, such as Ball(2.0) or Around(x, 0.01), got {type(over).__name__}."
    )


Form = Literal["point", "around", "together", "ball", "sphere", "norm", "rms"]
_SIZED = ("around", "together", "ball", "sphere")
_NEAR = ("point", "around", "together")
_EXAMPLES = "point, around:0.01, around:1%, together:0.01, ball:2, sphere:2 or norm"


@dataclass(frozen=True)
class SetText:
    """A set of inputs as a text names it; `sets` makes it once the input and the normalisation are known.

    Sizes are absolute, unless they end in %: a share of the mean norm of the tokens of the input.

    - ``point``: the input. ``around:0.01``: every token within 0.01 of its own. ``together:0.01``: all tokens together,
      in the Frobenius norm.
    - ``ball:2`` and ``sphere:2``: every token in the ball, or on the sphere, of that radius around the origin.
    - ``norm``: the image of the normalisation before the map. ``norm:h.0.ln_1``: of the LayerNorm of that name,
      ``rms:h.0.ln_1``: of the RMSNorm.

    Several sizes between commas are several sets: ``ball:1,2,5``.

    Attributes:
        form: the word before the colon.
        sizes: the numbers, rising; shares as numbers between 0 and 1.
        share: whether sizes are shares of the mean token norm.
        name: of the normalisation.

    >>> [print(region) for region in SetText.parse("ball:2,1").sets()]
    |x| ≤ 1
    |x| ≤ 2
    [None, None]
    >>> SetText.parse("ball")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: 'ball' names no set: write for example point, around:0.01, ..., sphere:2 or norm.
    """

    form: Form
    sizes: tuple[float, ...] = ()
    share: bool = False
    name: str | None = None

    @classmethod
    @validated
    def parse(cls, text: str) -> SetText:
        """Read a text; one sentence with examples for a text that names no set."""
        form, colon, rest = text.strip().partition(":")
        if form in ("norm", "rms") and (rest or not colon) and (form == "norm" or rest):
            return cls(form, name=rest or None)  # type: ignore[arg-type]
        if form == "point" and not colon:
            return cls("point")
        shares = {part.strip().endswith("%") for part in rest.split(",")}
        sizes = numbers_in(rest.replace("%", ""))
        if form not in _SIZED or not all(size > 0 and math.isfinite(size) for size in sizes):
            raise InvalidInput(f"{shown(text)} names no set: write for example {_EXAMPLES}.")
        if len(shares) > 1 or (shares == {True} and form not in _NEAR):
            raise InvalidInput(
                f"{shown(text)} mixes units: sizes with % are shares of the mean token norm, and only of around and "
                "together, for example around:1%,5%."
            )
        share = shares == {True}
        return cls(form, tuple(size / 100 if share else size for size in sizes), share)  # type: ignore[arg-type]

    @property
    def near_input(self) -> bool:
        """Whether the set is about an input."""
        return self.form in _NEAR

    @validated
    def absolute(self, x: Tensor | None = None) -> tuple[float, ...]:
        """The sizes, shares multiplied by the mean token norm of x."""
        if not self.share:
            return self.sizes
        if x is None:
            raise InvalidInput("a size with % is a share of the mean token norm: give an input.")
        unit = float(x.double().norm(dim=-1).mean())
        return tuple(share * unit for share in self.sizes)

    @validated
    def sets(
        self, x: Tensor | None = None, norm: Ellipsoid | None = None, within: InputSet | None = None
    ) -> list[InputSet]:
        """The sets, smallest first.

        Args:
            x: the input that the set is about. norm: the image of the normalisation. within: as in `Around`.
        """
        if self.form in ("norm", "rms"):
            assert norm is not None
            return [Normalised(norm)]
        if self.form in ("ball", "sphere"):
            return [(Ball if self.form == "ball" else Sphere)(radius) for radius in self.sizes]
        if x is None:
            raise InvalidInput(f"the set {self.form} is about an input: give one.")
        if self.form == "point":
            return [Point(x, within=within)]
        return [Around(x, eps, self.form == "around", within=within) for eps in self.absolute(x)]


def numbers_in(text: str) -> list[float]:
    """Numbers between commas in rising order; NaN alone for a text that is no such list.

    >>> numbers_in("2, 0.5"), numbers_in("2,x")
    ([0.5, 2.0], [nan])
    """
    try:
        return sorted({float(number) for number in text.split(",")})
    except ValueError:
        return [math.nan]
