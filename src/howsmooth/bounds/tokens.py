"""The sets tokens live in: balls, and the ellipsoids that normalisation layers map onto."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    def ball(cls, radius: float, width: int, origin: str = "given") -> TokenSet:
        """The ball B_R around the origin."""
        radius = float(radius)
        if not (math.isfinite(radius) and radius > 0):
            raise InvalidInput(f"a radius must be positive and finite, got {radius}.")
        identity = torch.eye(width, dtype=torch.float64)
        return cls(torch.zeros(width, dtype=torch.float64), identity, radius, radius, origin)

    @classmethod
    def around(cls, x: Tensor) -> TokenSet:
        """The smallest ball around the origin that holds every token of x."""
        return cls.ball(float(x.detach().double().norm(dim=-1).max()), x.shape[-1], "largest token of the input")

    @classmethod
    def after_rms_norm(cls, gain: Tensor, shift: Tensor | None = None) -> TokenSet:
        r"""What RMSNorm can give out: :math:`x = \gamma \circ z + \beta` with :math:`|z| \le \sqrt d`."""
        return cls._after(gain, shift, torch.eye(len(gain), dtype=torch.float64), "RMSNorm")

    @classmethod
    def after_layer_norm(cls, gain: Tensor, shift: Tensor | None = None) -> TokenSet:
        r"""What LayerNorm can give out: as RMSNorm, with z in the hyperplane of centred vectors."""
        width = len(gain)
        centring = torch.eye(width, dtype=torch.float64) - 1.0 / width
        return cls._after(gain, shift, centring, "LayerNorm")

    @classmethod
    def after(cls, norm: nn.Module) -> TokenSet:
        """The image of a normalisation module: `nn.LayerNorm`, `nn.RMSNorm`, or a model's own class with a weight.

        >>> TokenSet.after(nn.LayerNorm(4)).radius
        2.0
        """
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and len(norm.normalized_shape) != 1:
            raise InvalidInput(
                f"normalisation must act on single tokens, but this one acts on {norm.normalized_shape}."
            )
        gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if gain is None and isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            gain = torch.ones(norm.normalized_shape)
        name = type(norm).__name__.lower()
        if not isinstance(gain, Tensor) or "norm" not in name:
            raise InvalidInput(f"{type(norm).__name__} is not a LayerNorm or RMSNorm: give a radius instead.")
        shift = shift if isinstance(shift, Tensor) else None
        make = cls.after_rms_norm if "rms" in name else cls.after_layer_norm
        return make(gain.detach(), None if shift is None else shift.detach())

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
