r"""Sets of inputs X, in the coordinates of a search, with the ellipsoid that theorems use.

Every set but a box and that of sequences is an affine image of a simple body: :math:`X = C + \rho Z\Gamma^\top` with Z
in a body of unit size, which is a ball for each token, a sphere for each token, a ball for all tokens together, or
everything. A search moves the coordinates Z, where projection onto the set is division by a length; after a
normalisation layer every axis of the ellipsoid gets its own unit of length in this way.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Count, check_finite, check_number, shown, validated
from howsmooth.errors import InvalidInput
from howsmooth.sets.ellipsoid import Ellipsoid

Body = Literal["ball", "sphere", "all tokens", "box", "everything"]
_ROUNDING = 1e-6
"""Tolerance of `check_inside`, as a share of the radius; larger for an input of a coarser dtype."""


class InputSet(ABC):
    """A set of inputs: `excess` measures the distance of an input from it, `project_` moves an input into it.

    Attributes:
        body: the body of the coordinates Z: see the module.
        reach: ρ.
        centre: C, ``(d,)`` or ``(n, d)``, or None for the origin.
        axes: Γ, ``(d, r)`` of full column rank, or None for the identity.
        length: number of tokens, when the set fixes it.
        width: d, when the set fixes it.
        x: the input ``(n, d)`` that the set is about, when there is one.
        eps: the largest distance of a token from that of x; None without x and at x alone.
        size: the radius, or eps, for tables; None for a set that has neither.
    """

    body: Body = "ball"
    reach: float = 1.0
    centre: Tensor | None = None
    axes: Tensor | None = None
    length: int | None = None
    width: Count | None = None
    x: Tensor | None = None
    eps: float | None = None
    size: float | None = None

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        """The ellipsoid around every token of this width, for theorems; None for a set without one."""
        return None

    def first(self, n: int) -> InputSet:
        """The set of the first n tokens, for a set that fixes the number of tokens; the set itself otherwise."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain Python for files and tables."""

    def __str__(self) -> str:
        """The set in a few characters."""
        return str(self.describe()["set"])

    def check(self, n: int, d: int) -> None:
        """Refuse sizes that do not fit the set."""
        if self.width not in (None, d):
            raise InvalidInput(f"the set holds tokens of width {self.width}, but the map takes {d}.")
        if self.length not in (None, n):
            raise InvalidInput(f"the set holds inputs of {self.length} tokens, but n={n} was requested: leave n out.")

    def at(self, z: Tensor) -> Tensor:
        """The inputs at coordinates z, ``(…, n, r)`` → ``(…, n, d)``."""
        x = self.reach * (z if self.axes is None else z @ self.axes.to(z).mT)
        return x if self.centre is None else x + self.centre.to(z)

    def pull(self, gradient: Tensor) -> Tensor:
        """A gradient in x as a gradient in z."""
        return self.reach * (gradient if self.axes is None else gradient @ self.axes.to(gradient))

    def coordinates(self, x: Tensor) -> Tensor:
        """The z whose point lies nearest to x, whether in the set or not."""
        shifted = x if self.centre is None else x - self.centre.to(x)
        if self.reach == 0:
            return torch.zeros_like(shifted)
        if self.axes is not None:
            columns = torch.linalg.lstsq(self.axes.to(x), shifted.flatten(0, -2).mT).solution
            shifted = columns.mT.reshape(*x.shape[:-1], -1)
        return shifted / self.reach

    def restrict_(self, z: Tensor) -> Tensor:
        """Project coordinates onto the body, in place."""
        if self.body == "ball":
            z.div_(z.norm(dim=-1, keepdim=True).clamp(min=1.0))
        elif self.body == "sphere":
            size = z.norm(dim=-1, keepdim=True)
            z[..., :1].add_((size == 0).to(z))  # every point of the sphere is as near to its centre
            z.div_(size.masked_fill_(size == 0, 1.0))
        elif self.body == "all tokens":
            z.div_(z.norm(dim=(-2, -1), keepdim=True).clamp(min=1.0))
        return z

    def tangent(self, z: Tensor, step: Tensor) -> Tensor:
        """The part of a step at z that does not leave the sphere; the step itself in other bodies."""
        return step - z * (z * step).sum(-1, keepdim=True) if self.body == "sphere" else step

    def stride(self, z: Tensor) -> Tensor:
        """A length for steps of single tokens, ``(…, 1, 1)``: of the order of their possible moves in coordinates."""
        ones = torch.ones_like(z[..., :1, :1])
        if self.body == "all tokens":
            return ones * z.shape[-2] ** -0.5
        if self.body == "everything":
            spread = (z - z.mean(-2, keepdim=True)).norm(dim=-1).mean(-1)[..., None, None]
            return torch.where(spread > 0, spread, ones)
        return ones

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """An input whose tokens point in independent random directions, as far out as the set allows, ``(n, d)``."""
        z = torch.randn(n, self.rank(d), generator=generator, dtype=torch.float64)
        if self.body != "everything":
            z /= z.norm(dim=(-2, -1) if self.body == "all tokens" else -1, keepdim=True)
        return self.at(z).to(dtype)

    def rank(self, d: int) -> int:
        """Number r of coordinates of a token."""
        return d if self.axes is None else self.axes.shape[1]

    def project_(self, x: Tensor) -> Tensor:
        """Project inputs ``(…, n, d)`` onto the set, in place: to the nearest point in their coordinates."""
        return x.copy_(self.at(self.restrict_(self.coordinates(x))))

    def outside(self, x: Tensor) -> Tensor:
        """The distance of each token of x from its projection, ``(…, n, d)`` → ``(…, n)``."""
        x = x.double()
        return (x - self.project_(x.clone())).norm(dim=-1)

    def excess(self, x: Tensor) -> float:
        """The distance of x from the set: the largest of the distances of its tokens."""
        return float(self.outside(x).max())


class Ball(InputSet):
    """Every token in the ball of this radius around the origin.

    >>> Ball(2.0).excess(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    1.0
    """

    @validated
    def __init__(self, radius: float, width: Count | None = None):
        self.radius = self.reach = self.size = check_extent("a radius", radius)
        self.width = width

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        return Ellipsoid.ball(self.radius, width) if self.radius > 0 else None

    def describe(self) -> dict[str, Any]:
        return {"set": type(self).__name__.lower(), "radius": self.radius}

    def __str__(self) -> str:
        return f"|x| {'=' if self.body == 'sphere' else '≤'} {self.radius:.4g}"


class Sphere(Ball):
    """Every token at this distance from the origin.

    >>> Sphere(2.0).project_(torch.tensor([[4.0, 0.0]]))
    tensor([[2., 0.]])
    """

    body = "sphere"

    @validated
    def __init__(self, radius: float, width: Count | None = None):
        super().__init__(radius, width)
        if self.radius == 0:
            raise InvalidInput("a sphere needs a positive radius.")


class Normalised(InputSet):
    """Every token in the image of a normalisation layer: an ellipsoid {c + Γz : |z| ≤ ρ}.

    Args:
        norm: the normalisation module; see `layer_norm` and `rms_norm` for gains without a module.
        surface: only |z| = ρ, the image of tokens whose variance is large beside the ε of the layer.

    Attributes:
        radius: R with |x| ≤ R on the whole set: √d·max|γ| + |β|.

    >>> layer = nn.LayerNorm(4)
    >>> over = Normalised(layer)
    >>> over.excess(layer(torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).detach()) < 1e-6
    True
    >>> over.radius, Normalised.rms_norm(torch.tensor([1.0, 2.0])).radius == 2 * 2**0.5
    (2.0, True)
    """

    @validated
    def __init__(self, norm: Ellipsoid | nn.Module, surface: bool = False):
        self._ellipsoid = norm if isinstance(norm, Ellipsoid) else Ellipsoid.after(norm)
        left, size, _ = torch.linalg.svd(self._ellipsoid.axes, full_matrices=False)
        full = size > 1e-12 * size[0]
        self.axes = left[:, full] * size[full]  # |z| ≤ ρ maps onto the same ellipsoid, without idle coordinates
        self.centre, self.reach, self.width = self._ellipsoid.centre, self._ellipsoid.reach, self._ellipsoid.width
        self.body = "sphere" if surface else "ball"
        self.radius = self.size = self._ellipsoid.radius

    @classmethod
    def layer_norm(cls, gain: Tensor, shift: Tensor | None = None, surface: bool = False) -> Normalised:
        """The image of LayerNorm with this gain and shift."""
        return cls(Ellipsoid.layer_norm(gain, shift), surface)

    @classmethod
    def rms_norm(cls, gain: Tensor, shift: Tensor | None = None, surface: bool = False) -> Normalised:
        """The image of RMSNorm with this gain and shift."""
        return cls(Ellipsoid.rms_norm(gain, shift), surface)

    def ellipsoid(self, width: int) -> Ellipsoid:
        return self._ellipsoid

    def describe(self) -> dict[str, Any]:
        kind = {"set": "normalised", "origin": self._ellipsoid.origin, "radius": self.radius}
        return kind | ({"surface": True} if self.body == "sphere" else {})

    def __str__(self) -> str:
        return f"{self._ellipsoid.origin} (|x| ≤ {self.radius:.4g})"


class Everywhere(InputSet):
    """All inputs, for maps that have a Lipschitz constant without any restriction (L2 attention)."""

    body = "everything"

    def describe(self) -> dict[str, Any]:
        return {"set": "everywhere"}


def check_inside(x: Tensor, tokens: Ellipsoid) -> None:
    """Refuse an input ``(n, d)`` with a token outside the ellipsoid, beyond the rounding of its dtype.

    >>> check_inside(torch.tensor([[1.0, 0.0], [3.0, 4.0]]), Ellipsoid.ball(2.0, width=2))
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: token 1 of the input lies outside the set: its norm 5 is outside the radius 2.
    """
    distances = (Ball(tokens.radius) if tokens.is_ball else Normalised(tokens)).outside(x)
    farthest = int(distances.argmax())
    if float(distances[farthest]) <= max(_ROUNDING, 4 * torch.finfo(x.dtype).eps) * tokens.radius:
        return
    if tokens.is_ball:
        why = f": its norm {float(x[farthest].double().norm()):.6g} is outside the radius {tokens.radius:.6g}."
    else:
        why = f" ({tokens.origin}): give the normalisation that this input comes from, or leave it out."
    raise InvalidInput(f"token {farthest} of the input lies outside the set{why}")


def check_extent(name: str, value: float) -> float:
    """A finite number that is not negative: a radius, or a distance."""
    number = value if isinstance(value, int | float) else check_number(value, name)
    if not 0 <= number <= sys.float_info.max:
        raise InvalidInput(f"{name} must be finite and not negative, or the set is empty, got {shown(value)}.")
    return float(number)


class Tokens(InputSet):
    """Sequences of given tokens: X = transform(E[ids]), each row of ``matrix`` a token.

    Args:
        matrix: E, ``(vocabulary, d)``, such as a language model's input embeddings, or the tokens of a text.
        transform: a function between the tokens ``(…, n, d)`` and the map, such as adding positions and the first
            normalisation; differentiable, and called with a batch of sequences at once.

    >>> over = Tokens(torch.eye(3))
    >>> over.sequence(torch.tensor([2, 0]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]], dtype=torch.float64)
    """

    @validated
    def __init__(self, matrix: Tensor, transform: Callable[[Tensor], Tensor] | None = None):
        if matrix.dim() != 2 or 0 in matrix.shape or not matrix.is_floating_point():
            raise InvalidInput(
                f"tokens are rows of a floating (vocabulary, d) matrix, at least one, got {matrix.dtype} of shape "
                f"{tuple(matrix.shape)}."
            )
        check_finite(matrix, "the matrix of tokens")
        self.matrix, self.transform = matrix.detach().double().cpu(), transform
        if transform is None:
            self.width = matrix.shape[1]

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        radius = float(self.matrix.norm(dim=-1).max())
        if self.transform is not None or radius == 0:
            return None
        return Ellipsoid.ball(radius, width, "largest token")

    def describe(self) -> dict[str, Any]:
        return {"set": "tokens", "vocabulary": len(self.matrix), "transformed": self.transform is not None}

    def sequence(self, ids: Tensor) -> Tensor:
        """The input of these token ids, ``(…, n)`` → ``(…, n, d)``."""
        return self.transformed(self.matrix[ids])

    def at(self, z: Tensor) -> Tensor:
        """The input of token ids, which are the coordinates of this set."""
        return self.sequence(z)

    def transformed(self, embedded: Tensor) -> Tensor:
        """The input of the map for these tokens."""
        return embedded if self.transform is None else self.transform(embedded)

    def nearest(self, x: Tensor) -> Tensor:
        """The ids of the rows nearest to the tokens of x, ``(…, n, d)`` → ``(…, n)``."""
        return (self.matrix.square().sum(-1) - 2 * x.double() @ self.matrix.mT).argmin(-1)

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.sequence(torch.randint(len(self.matrix), (n,), generator=generator)).to(dtype)

    def project_(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            raise InvalidInput("inputs cannot be projected through the transform of the tokens: give ids instead.")
        return x.copy_(self.matrix[self.nearest(x)])
