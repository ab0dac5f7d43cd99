r"""Where the worst case is looked for: the sets an input X may come from.

Every set but that of sequences is an affine image of a simple body: :math:`X = C + \rho Z\Gamma^\top` with Z in a body
of unit size, which is a ball for each token, a sphere for each token, a ball for all tokens together, or everything.
The search climbs in the coordinates Z, where keeping to the set means dividing by a length; after a normalisation layer
that also gives every axis of the ellipsoid its own unit of length.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Count, shown, validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.sets.token_sets import TokenSet

Body = Literal["ball", "sphere", "all tokens", "everything"]
_ROUNDING = 1e-6
"""By how much of its radius an input may miss a set and still be in it; more where its dtype is coarser."""


class InputSet(ABC):
    """A set of inputs; `contains` by `excess`, kept to by `project_`.

    Attributes:
        body: what the coordinates Z may be: see the module.
        reach: ρ.
        centre: C, ``(d,)`` or ``(n, d)``, or None for the origin.
        axes: Γ, ``(d, r)`` of full column rank, or None for the identity.
        length: number of tokens, when the set fixes it.
        width: d, when the set fixes it.
    """

    body: Body = "ball"
    reach: float = 1.0
    centre: Tensor | None = None
    axes: Tensor | None = None
    length: int | None = None
    width: Count | None = None

    @property
    def tokens(self) -> TokenSet | None:
        """A set that holds every token, for upper bounds; None when there is none or the width is not known."""
        return None if self.width is None else self.token_set(self.width)

    def token_set(self, width: int) -> TokenSet | None:
        """A set that holds every token of this width, or None."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain Python for files and tables."""

    def check(self, n: int, d: int) -> None:
        """Refuse sizes that do not fit the set."""
        if self.width not in (None, d):
            raise InvalidInput(f"the set holds tokens of width {self.width}, but the map takes {d}.")
        if self.length not in (None, n):
            raise InvalidInput(f"the set holds inputs of {self.length} tokens, but n={n} was asked for: leave n out.")

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
        """Bring coordinates back into the body, in place."""
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
        """A length for steps of single tokens, ``(…, 1, 1)``: of the order of what tokens can move in coordinates."""
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
        """Bring inputs ``(…, n, d)`` into the set, in place: to the nearest point, in the metric of the coordinates."""
        return x.copy_(self.at(self.restrict_(self.coordinates(x))))

    def outside(self, x: Tensor) -> Tensor:
        """How far each token of x lies outside, ``(…, n, d)`` → ``(…, n)``: from where `project_` brings it."""
        x = x.double()
        return (x - self.project_(x.clone())).norm(dim=-1)

    def excess(self, x: Tensor) -> float:
        """How far x lies outside: the largest of the distances of its tokens."""
        return float(self.outside(x).max())


class Ball(InputSet):
    """Every token in the ball of this radius around the origin.

    >>> Ball(2.0).excess(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    1.0
    """

    @validated
    def __init__(self, radius: float, width: Count | None = None):
        self.radius = self.reach = _size("a radius", radius)
        self.width = width

    def token_set(self, width: int) -> TokenSet | None:
        return TokenSet.ball(self.radius, width) if self.radius > 0 else None

    def describe(self) -> dict[str, Any]:
        return {"set": type(self).__name__.lower(), "radius": self.radius}


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
    """Every token in the image of a normalisation layer: the ellipsoid {c + Γz : |z| ≤ ρ} of a `TokenSet`.

    Args:
        tokens: the ellipsoid, or the normalisation layer itself.
        surface: only |z| = ρ, which is what the layer gives out for tokens whose variance is large beside its ε.

    >>> layer = nn.LayerNorm(4)
    >>> over = Normalised(layer)
    >>> over.excess(layer(torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).detach()) < 1e-6
    True
    """

    @validated
    def __init__(self, tokens: TokenSet | nn.Module, surface: bool = False):
        ellipsoid = tokens if isinstance(tokens, TokenSet) else TokenSet.after(tokens)
        left, size, _ = torch.linalg.svd(ellipsoid.axes, full_matrices=False)
        kept = size > 1e-12 * size[0]
        self.axes = left[:, kept] * size[kept]  # |z| ≤ ρ maps onto the same ellipsoid, without idle coordinates
        self.centre, self.reach, self.width = ellipsoid.centre, ellipsoid.reach, ellipsoid.width
        self.body = "sphere" if surface else "ball"
        self._tokens = ellipsoid

    def token_set(self, width: int) -> TokenSet:
        return self._tokens

    def describe(self) -> dict[str, Any]:
        ellipsoid = self._tokens
        kind = {"set": "normalised", "origin": ellipsoid.origin, "radius": ellipsoid.radius}
        return kind | ({"surface": True} if self.body == "sphere" else {})


class Neighbourhood(InputSet):
    """Inputs near x: every token within eps of its own, or ‖X − x‖_F ≤ eps with ``per_token=False``.

    >>> near = Neighbourhood(torch.zeros(2, 1), eps=0.5)
    >>> near.excess(torch.tensor([[0.5], [2.0]]))
    1.5
    """

    @validated
    def __init__(self, x: Tensor, eps: float, per_token: bool = True):
        check_tokens(x)
        if x.dim() != 2:
            raise InvalidInput(f"a neighbourhood is that of one input, (n, d), got shape {tuple(x.shape)}.")
        self.x = self.centre = x.detach().double().cpu()
        self.eps = self.reach = _size("eps", eps)
        self.per_token = per_token
        self.body = "ball" if per_token else "all tokens"
        self.length, self.width = self.x.shape

    def token_set(self, width: int) -> TokenSet | None:
        radius = float(self.x.norm(dim=-1).max()) + self.eps
        return TokenSet.ball(radius, width, "largest token near the input") if radius > 0 else None

    def describe(self) -> dict[str, Any]:
        return {"set": "neighbourhood", "eps": self.eps, "per_token": self.per_token}


class Everywhere(InputSet):
    """All inputs, for maps that have a Lipschitz constant without any restriction (L2 attention)."""

    body = "everything"

    def describe(self) -> dict[str, Any]:
        return {"set": "everywhere"}


def as_set(over: InputSet | TokenSet | nn.Module | None, radius: float | None) -> InputSet:
    """The set meant by ``over`` and ``radius``: at most one of them is given."""
    if radius is not None:
        if over is not None:
            raise InvalidInput("give either a radius or a set (over), not both.")
        return Ball(radius)
    if over is None:
        return Everywhere()
    if isinstance(over, TokenSet | nn.Module):
        return Normalised(over)
    if not isinstance(over, InputSet):
        raise InvalidInput(
            f"over is one of the sets in howsmooth.search (Ball, Sphere, Normalised, …), got {type(over).__name__}."
        )
    return over


def check_inside(x: Tensor, tokens: TokenSet) -> None:
    """Refuse an input ``(n, d)`` with a token outside the set, beyond the rounding of its dtype.

    >>> check_inside(torch.tensor([[1.0, 0.0], [3.0, 4.0]]), TokenSet.ball(2.0, width=2))
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


def _size(name: str, value: float) -> float:
    if not 0 <= value <= sys.float_info.max:
        raise InvalidInput(f"{name} must be finite and not negative, or the set is empty, got {shown(value)}.")
    return float(value)
