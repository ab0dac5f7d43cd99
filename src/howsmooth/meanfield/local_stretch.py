r"""The local constant of attention on measures: the stretch of small changes of a measure.

Move the mass of atom i by small random displacements :math:`\varepsilon Y_i`, with mean :math:`\bar Y_i`, so that
:math:`W_2^2 = \varepsilon^2 \sum_i w_i E|Y_i|^2`. To first order Γ_μ sees only the means, while every bit of mass is
also carried by the field: with J the Jacobian of the weighted map of tokens, the image of atom i moves by
:math:`\varepsilon\,[(J\bar Y)_i + \partial_x\Gamma_\mu(x_i)\,(Y_i - \bar Y_i)]`. Mean and rest are orthogonal, before
and after, hence

.. math:: \mathrm{Lip}_\mu(F) = \max\Big(\|D^{1/2} J D^{-1/2}\|,\ \max_i \|\partial_x\Gamma_\mu(x_i)\|\Big),
          \qquad D = \mathrm{diag}(w).

The first part moves atoms as wholes, the second splits one in two that part ways. Nothing here asks how many tokens
an atom stands for. ∎

This is the constant for displacements that tend to zero. Along the straight paths of an optimal plan they do, so that
the constant of F in W₂ on all measures of a convex set is the supremum of these local constants. W₂ alone can be small
with a little mass moving far; that reaches the chords of Γ_μ, which are no longer than ∂_xΓ_μ at points between the
atoms: add them as atoms of tiny weight to see those.

**Rough measures** have one light atom that every other attends to, far from the rest. With :math:`A = -\gamma I` (or
any A with real eigenvalue −γ, unit eigenvector u) and :math:`b = \gamma R^2`, let the mass :math:`1/n` sit at −Ru and
the rest at Ru. The heavy atom gives the light one the weight :math:`p = E/(E+n-1)`, :math:`E = e^{2b}`. Moving the
light atom along u moves the image of the heavy one by :math:`p\,(1 + 2(1-p)b)\,|Vu|`, and weights turn that into the
stretch

.. math:: \sqrt{n-1}\;p\,(1 + 2(1-p)b)\,|Vu| .

With :math:`n - 1 = tE` it is :math:`e^b\,\sqrt t\,(1 + (1+2b)t)/(1+t)^2`, largest where
:math:`(1+2b)t^2 - 6bt - 1 = 0`. n need not be whole: it is a ratio of masses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth._util.common import rounded
from howsmooth._util.guarantee import Guarantee, weakest, with_guarantees
from howsmooth._util.validation import Positive, check_numbers, validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import JacobianOperator, attention_jacobian
from howsmooth.jacobians.operator import Accuracy
from howsmooth.meanfield.measure_attention import Measure, weighted
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import solve


class WeightedJacobian(JacobianOperator):
    """D^{1/2} J D^{-1/2}: the Jacobian of attention on a measure between tokens whose squares are weighted by mass.

    Lifted vectors are displacements of the atoms and of their images, y = D^{-1/2}z with Σ w_i|y_i|² = 1.
    """

    @validated
    def __init__(self, attention: nn.Module, measure: Measure):
        self.inner = attention_jacobian(*weighted(attention, measure))
        self.root = measure.weights.sqrt()[:, None]
        self.batch_shape = torch.Size()
        self.in_shape, self.out_shape = self.inner.in_shape, self.inner.out_shape
        self.dtype, self.device, self.method = self.inner.dtype, self.inner.device, self.inner.method
        error = self.inner.accuracy.product * float(self.root.max() / self.root.min())  # ‖D^{1/2}‖·‖D^{-1/2}‖
        self.accuracy = Accuracy(self.inner.accuracy.point, error)

    def matvec(self, v: Tensor) -> Tensor:
        return self.root * self.inner.matvec(v / self.root)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.inner.rmatvec(u * self.root) / self.root

    def lift_in(self, v: Tensor) -> Tensor:
        return v / self.root

    def lift_out(self, u: Tensor) -> Tensor:
        return u / self.root


class FieldJacobian(JacobianOperator):
    """∂_xΓ_μ(x_i) for every atom: a batch of (d_out × d) matrices.

    A copy of the atoms with weight zero passes through attention beside the atoms themselves. No atom sees the copy, so
    its part of the Jacobian is block diagonal, and one product serves all atoms.
    """

    @validated
    def __init__(self, attention: nn.Module, measure: Measure):
        self.inner = attention_jacobian(*weighted(attention, measure, measure.atoms, measure.positions))
        self.batch_shape = torch.Size([len(measure)])
        self.in_shape, self.out_shape = self.inner.in_shape[1:], self.inner.out_shape[1:]
        self.dtype, self.device, self.method = self.inner.dtype, self.inner.device, self.inner.method
        inner = self.inner.accuracy
        self.accuracy = Accuracy(inner.point, inner.product)  # a block of a matrix errs no more than the matrix

    def matvec(self, v: Tensor) -> Tensor:
        return self.inner.matvec(torch.cat([torch.zeros_like(v), v]))[len(v) :]

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.inner.rmatvec(torch.cat([torch.zeros_like(u), u]))[len(u) :]


@dataclass(frozen=True, eq=False)
class LocalConstant:
    """The local Lipschitz constant of attention at a measure, in W₂, or in d₂ when the measure has positions.

    Attributes:
        moving: ‖D^{1/2} J D^{-1/2}‖; its vectors are displacements of the atoms and of their images.
        splitting: ‖∂_xΓ_μ(x_i)‖ of every atom.
        masked: whether the distance is d₂.
    """

    moving: Measurement
    splitting: Measurement
    masked: bool

    @property
    def value(self) -> float:
        """The larger of the two parts."""
        return max(float(self.moving), float(self.splitting.value.max()))

    @property
    def lower(self) -> float:
        """The constant is at least this."""
        return max(float(self.moving.lower), float(self.splitting.lower.max()))

    @property
    def upper(self) -> float:
        """The constant is at most this, with probability `confidence`."""
        return max(float(self.moving.upper), float(self.splitting.upper.max()))

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of the lower end: the weaker of both parts."""
        return weakest(self.moving.lower_holds, self.splitting.lower_holds)

    @property
    def upper_holds(self) -> Guarantee:
        """The guarantee of the upper end, apart from its probability `confidence`."""
        return weakest(self.moving.upper_holds, self.splitting.upper_holds)

    @property
    def confidence(self) -> float:
        """Probability with which `upper` holds: it fails only if the upper end of the largest map does."""
        return min(self.moving.confidence, self.splitting.confidence)

    @property
    def converged(self) -> bool:
        """Whether both parts are."""
        return bool(self.moving.converged) and bool(self.splitting.converged.all())

    @property
    def part(self) -> str:
        """The change of the measure that is stretched the most: "moving" whole atoms, or "splitting" one of them."""
        return "moving" if float(self.moving) >= float(self.splitting.value.max()) else "splitting"

    @property
    def atom(self) -> int:
        """The atom whose splitting is stretched most."""
        return int(self.splitting.value.argmax())

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        other = ("moving whole atoms", self.moving.value)
        if self.part == "moving":
            other = ("splitting one atom", self.splitting.value.max())
        where = "d₂" if self.masked else "W₂"
        below, above = f"≥ {rounded(self.lower, ROUND_FLOOR)}", f"≤ {rounded(self.upper, ROUND_CEILING)}"
        if not self.confidence:
            above = "no upper bound"
        ends = with_guarantees(below, above, self.lower_holds, self.upper_holds, self.confidence or 1.0)
        return f"{self.value:.4g} in {where} ({ends}), {self.part} ({other[0]}: {float(other[1]):.4g})"


@validated
def local_constant(attention: nn.Module, measure: Measure, **solver: Any) -> LocalConstant:
    """The local Lipschitz constant of F at a measure: how much small displacements of its mass are stretched.

    It equals ‖J‖ of explicit repetition, n·w_i copies of token x_i, whenever every atom stands for two tokens or more
    (a single token cannot be split).

    Args:
        attention: unmasked, or causal when the measure has positions.
        measure: where.
        solver: options of `howsmooth.norms.operator_norm`, as rtol, confidence and seed.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1))
    >>> local_constant(head, Measure(torch.tensor([[-1.0], [1.0]]), [1 / 3, 2 / 3]))
    1.88 in W₂ (≥ 1.8797, ≤ 1.8798, rounding modelled), moving (splitting one atom: 0.6706)
    """
    moving = solve(WeightedJacobian(attention, measure), **solver)
    splitting = solve(FieldJacobian(attention, measure), **solver)
    return LocalConstant(moving, splitting, measure.positions is not None)


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
    if direction.dim() != 1 or not direction.any():
        raise InvalidInput("two atoms lie along a vector that is not zero: give a direction of shape (d,).")
    u = direction / direction.norm()
    return Measure(torch.stack([-radius * u, radius * u]), [1 / (1 + heavy), heavy / (1 + heavy)])
