"""The sets tokens live in: balls, and the ellipsoids that normalisation layers map onto."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.bounds.norm_images import read_norm
from howsmooth.checks import door
from howsmooth.errors import InvalidInput


@dataclass(frozen=True)
class TokenSet:
    r"""Every token lies in :math:`\{c + \Gamma z : |z| \le \rho\}`: a ball when Γ is the identity, else an ellipsoid.

    The theorems of the papers speak of balls around the origin and use `radius`; this project's own bounds use the
    ellipsoid itself, which is never worse.

    Attributes:
        centre: c, ``(d,)``, float64.
        axes: Γ, ``(d, r)``, float64.
        reach: ρ.
        radius: R with |x| ≤ R on the whole set; √d·max|γ| + |β| after normalisation.
        origin: where the set comes from, for tables.

    >>> TokenSet.ball(2.0, width=3).radius
    2.0
    >>> gain, shift = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    >>> TokenSet.after_rms_norm(gain, shift).radius == 2 * 2**0.5 + 1
    True
    """

    centre: Tensor
    axes: Tensor
    reach: float
    radius: float
    origin: str = "given"

    @classmethod
    @door
    def ball(cls, radius: float, width: int, origin: str = "given") -> TokenSet:
        """The ball B_R around the origin."""
        radius = float(radius)
        if not (math.isfinite(radius) and radius > 0):
            raise InvalidInput(f"a radius must be positive and finite, got {radius}.")
        identity = torch.eye(width, dtype=torch.float64)
        return cls(torch.zeros(width, dtype=torch.float64), identity, radius, radius, origin)

    @classmethod
    @door
    def around(cls, x: Tensor) -> TokenSet:
        """The smallest ball around the origin that holds every token of x."""
        return cls.ball(float(x.detach().double().norm(dim=-1).max()), x.shape[-1], "largest token of the input")

    @classmethod
    @door
    def after_rms_norm(cls, gain: Tensor, shift: Tensor | None = None) -> TokenSet:
        r"""What RMSNorm can give out: :math:`x = \gamma \circ z + \beta` with :math:`|z| \le \sqrt d`."""
        return cls._after(gain, shift, torch.eye(len(gain), dtype=torch.float64), "RMSNorm")

    @classmethod
    @door
    def after_layer_norm(cls, gain: Tensor, shift: Tensor | None = None) -> TokenSet:
        r"""What LayerNorm can give out: as RMSNorm, with z in the hyperplane of centred vectors."""
        width = len(gain)
        centring = torch.eye(width, dtype=torch.float64) - 1.0 / width
        return cls._after(gain, shift, centring, "LayerNorm")

    @classmethod
    @door
    def after(cls, norm: nn.Module, width: int | None = None) -> TokenSet:
        """The image of a normalisation module: `nn.LayerNorm`, `nn.RMSNorm`, or a model's own class.

        What it does is read off its answers (`howsmooth.bounds.norm_images`), not its name: gains of 1 + weight and
        RMSNorms called LayerNorm are what they are, and what is neither is refused.

        Args:
            width: of the tokens, for a module that does not know it.

        >>> TokenSet.after(nn.LayerNorm(4)).radius
        2.0
        """
        found = read_norm(norm, width)
        make = cls.after_layer_norm if found.centred else cls.after_rms_norm
        return make(found.gain, found.shift)

    @classmethod
    def _after(cls, gain: Tensor, shift: Tensor | None, plane: Tensor, name: str) -> TokenSet:
        gain = gain.double()
        centre = torch.zeros_like(gain) if shift is None else shift.double()
        if gain.dim() != 1 or centre.shape != gain.shape:
            raise InvalidInput(f"gain and shift must be vectors of one length, got {gain.shape} and {centre.shape}.")
        if not bool((gain.isfinite() & centre.isfinite()).all()) or not bool(gain.any()):
            raise InvalidInput(f"the gain and shift of this {name} must be finite and the gain not all zero.")
        reach = len(gain) ** 0.5
        radius = float(reach * gain.abs().max() + centre.norm())
        return cls(centre, gain[:, None] * plane, reach, radius, name)

    @property
    def width(self) -> int:
        """Width d of a token."""
        return self.axes.shape[0]

    @property
    def is_ball(self) -> bool:
        """Whether this is a ball around the origin."""
        identity = torch.eye(self.width, dtype=self.axes.dtype)
        return self.axes.shape == identity.shape and torch.equal(self.axes, identity) and not bool(self.centre.any())

    def at(self, z: Tensor) -> Tensor:
        """The tokens c + ρΓz for coordinates z in the unit ball, ``(…, r)`` → ``(…, d)``."""
        return self.centre.to(z) + self.reach * z @ self.axes.to(z).mT
