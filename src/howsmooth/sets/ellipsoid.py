"""The ellipsoid in which every token of a set lies: a ball, or the image of a normalisation layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_numbers, check_positive, check_weights, validated
from howsmooth.errors import InvalidInput
from howsmooth.models.probed_norms import read_norm


@dataclass(frozen=True)
class Ellipsoid:
    r"""Every token lies in :math:`\{c + \Gamma z : |z| \le \rho\}`: a ball when Γ is the identity, else an ellipsoid.

    The theorems of the papers speak of balls around the origin and use `radius`; this project's own bounds use the
    ellipsoid itself, which is never worse.

    Attributes:
        centre: c, ``(d,)``, float64.
        axes: Γ, ``(d, r)``, float64.
        reach: ρ.
        radius: R with |x| ≤ R on the whole set; √d·max|γ| + |β| after normalisation.
        origin: where the set comes from, for tables.

    >>> Ellipsoid.ball(2.0, width=3).radius
    2.0
    >>> gain, shift = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    >>> Ellipsoid.rms_norm(gain, shift).radius == 2 * 2**0.5 + 1
    True
    """

    centre: Tensor
    axes: Tensor
    reach: float
    radius: float
    origin: str = "given"

    @classmethod
    @validated
    def ball(cls, radius: float, width: int, origin: str = "given") -> Ellipsoid:
        """The ball B_R around the origin."""
        radius = check_positive(radius, "radius")
        check_weights(2 * check_count(width, "width") ** 2, "a ball of this width")
        identity = torch.eye(width, dtype=torch.float64)
        return cls(torch.zeros(width, dtype=torch.float64), identity, radius, radius, origin)

    @classmethod
    @validated
    def rms_norm(cls, gain: Tensor, shift: Tensor | None = None) -> Ellipsoid:
        r"""The image of RMSNorm: :math:`x = \gamma \circ z + \beta` with :math:`|z| \le \sqrt d`."""
        return cls._after(gain, shift, 0.0, "RMSNorm")

    @classmethod
    @validated
    def layer_norm(cls, gain: Tensor, shift: Tensor | None = None) -> Ellipsoid:
        r"""The image of LayerNorm: as that of RMSNorm, with z in the hyperplane of centred vectors."""
        return cls._after(gain, shift, 1.0, "LayerNorm")

    @classmethod
    @validated
    def after(cls, norm: nn.Module, width: int | None = None) -> Ellipsoid:
        """The image of a normalisation module: `nn.LayerNorm`, `nn.RMSNorm`, or a model's own class.

        The module is probed (`howsmooth.models.probed_norms`), its name is ignored: gains of 1 + weight and RMSNorms
        called LayerNorm are recognised, and a module that is neither norm is refused.

        Args:
            width: of the tokens, for a module that does not know it.

        >>> Ellipsoid.after(nn.LayerNorm(4)).radius
        2.0
        """
        image = read_norm(norm, width)
        make = cls.layer_norm if image.centred else cls.rms_norm
        return make(image.gain, image.shift)

    @classmethod
    def _after(cls, gain: Tensor, shift: Tensor | None, centring: float, name: str) -> Ellipsoid:
        """γ ∘ z + β; ``centring`` is 1 where the mean is subtracted first and 0 where it is not."""
        gain = check_numbers(gain, "gain")
        centre = torch.zeros_like(gain) if shift is None else check_numbers(shift, "shift")
        if gain.dim() != 1 or centre.shape != gain.shape:
            shapes = f"{tuple(gain.shape)} and {tuple(centre.shape)}"
            raise InvalidInput(f"gain and shift must be vectors of one length, got shapes {shapes}.")
        if not gain.any():
            raise InvalidInput(f"the gain of this {name} must not be all zero.")
        plane = torch.eye(len(gain), dtype=torch.float64) - centring / len(gain)
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
        return self.axes.shape == identity.shape and torch.equal(self.axes, identity) and not self.centre.any()

    def at(self, z: Tensor) -> Tensor:
        """The tokens c + ρΓz for coordinates z in the unit ball, ``(…, r)`` → ``(…, d)``."""
        return self.centre.to(z) + self.reach * z @ self.axes.to(z).mT
