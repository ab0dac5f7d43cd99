r"""The rough measures: one light atom that everybody looks at, far from the rest.

With :math:`A = -\gamma I` (or any A with real eigenvalue −γ, unit eigenvector u) and :math:`b = \gamma R^2`, let the
mass :math:`1/n` sit at −Ru and the rest at Ru. The heavy atom gives the light one the weight :math:`p = E/(E+n-1)`,
:math:`E = e^{2b}`. Moving the light atom along u moves the image of the heavy one by
:math:`p\,(1 + 2(1-p)b)\,|Vu|`, and weights turn that into the stretch

.. math:: \sqrt{n-1}\;p\,(1 + 2(1-p)b)\,|Vu| .

With :math:`n - 1 = tE` it is :math:`e^b\,\sqrt t\,(1 + (1+2b)t)/(1+t)^2`, largest where
:math:`(1+2b)t^2 - 6bt - 1 = 0`. n need not be whole: it is a ratio of masses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import Positive, check_numbers, validated
from howsmooth.errors import InvalidInput
from howsmooth.meanfield.discrete_measure import Measure

_LARGEST = 350.0
"""e^{2b} must be a float64."""


class TwoAtom(NamedTuple):
    """A lower bound of the constant in W₂ on the ball, in units of |Vu|, and the masses that reach it.

    Attributes:
        value: the stretch.
        heavy: n − 1, mass of the heavy atom over that of the light one.
    """

    value: float
    heavy: float

    @property
    def guarantee(self) -> Guarantee:
        """Of the value: a formula in float64, not rounded downward."""
        return Guarantee.MODELLED


@validated
def two_atom(gamma: float, radius: float) -> TwoAtom:
    """The largest stretch of two atoms over all ratios of their masses, for the eigenvalue −γ of A on B_R.

    >>> [round(two_atom(b, 1.0).value, 2) for b in (1, 2, 3, 4, 5)]
    [2.99, 12.88, 47.98, 165.8, 546.92]
    """
    numbers = all(isinstance(number, int | float) and number < 1e150 for number in (gamma, radius))
    b = gamma * radius**2 if numbers else math.nan
    if not (numbers and gamma >= 0 and radius > 0 and math.isfinite(b)):
        raise InvalidInput(f"two atoms need γ ≥ 0 and a positive radius, both finite, got {gamma!r} and {radius!r}.")
    if b > _LARGEST:
        raise InvalidInput(f"the stretch e^{b:.4g} of two atoms is beyond float64: lower γ or the radius.")
    c = 1 + 2 * b
    t = (3 * b + math.sqrt(9 * b * b + c)) / c
    return TwoAtom(math.exp(b) * math.sqrt(t) * (1 + c * t) / (1 + t) ** 2, t * math.exp(2 * b))


@validated
def two_atom_measure(direction: Tensor, radius: Positive, heavy: Positive) -> Measure:
    """The light atom at −Ru and the heavy one, ``heavy`` times its mass, at Ru, with u the direction at unit length."""
    direction = check_numbers(direction, "direction")
    if direction.dim() != 1 or not bool(direction.any()):
        raise InvalidInput("two atoms lie along a vector that is not zero: give a direction of shape (d,).")
    u = direction / direction.norm()
    return Measure(torch.stack([-radius * u, radius * u]), [1 / (1 + heavy), heavy / (1 + heavy)])
