"""Measures with finitely many atoms: the tokens of a sequence with their weights, and positions under a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth._util.validation import check_count, check_numbers, validated
from howsmooth.errors import InvalidInput

MASS_TOLERANCE = 1e-9
"""Tolerance of the sum of weights about one, and of the masses of a position about each other."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Measure:
    r"""The probability measure :math:`\mu = \sum_i w_i\,\delta_{x_i}` on tokens, or on pairs (position, token).

    Everything is kept in float64, and weights as they are given, which must sum to one within 1e-9. Atoms of weight
    zero are dropped.

    Attributes:
        atoms: x_i, ``(m, d)``.
        weights: w_i, ``(m,)``.
        positions: τ_i ∈ [0, 1], ``(m,)``, for causal attention; None without a mask.

    >>> Measure(torch.eye(2), [0.5, 0.4])
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the weights of a measure must sum to one, but sum to 0.9: divide them by their sum.
    """

    atoms: Tensor
    weights: Tensor
    positions: Tensor | None = None

    @validated
    def __init__(
        self,
        atoms: Tensor | Sequence[Sequence[float]],
        weights: Tensor | Sequence[float],
        positions: Tensor | Sequence[float] | None = None,
    ):
        points = check_numbers(atoms, "the atoms of a measure")
        if points.dim() != 2 or points.numel() == 0:
            raise InvalidInput(f"a measure needs atoms of shape (m, d), at least one, got {tuple(points.shape)}.")
        mass = _vector(weights, len(points), "weight")
        if (mass < 0).any():
            raise InvalidInput(f"a measure has no negative weights, but one of these is {float(mass.min()):.6g}.")
        total = float(mass.sum())
        if abs(total - 1) > MASS_TOLERANCE:
            raise InvalidInput(
                f"the weights of a measure must sum to one, but sum to {total:.10g}: divide them by their sum."
            )
        places = None if positions is None else _vector(positions, len(points), "position")
        if places is not None and ((places < 0) | (places > 1)).any():
            raise InvalidInput("the positions of a measure lie in [0, 1]: divide the places of n tokens by n.")
        there = mass > 0
        vars(self).update(  # frozen for everybody else
            atoms=points[there], weights=mass[there], positions=None if places is None else places[there]
        )

    @classmethod
    @validated
    def empirical(cls, x: Tensor) -> Measure:
        """n tokens of equal weight, without positions.

        >>> Measure.empirical(torch.zeros(4, 2)).weights
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
        """
        return cls.of_tokens(x, causal=False)

    @classmethod
    @validated
    def of_tokens(cls, x: Tensor, causal: bool = True) -> Measure:
        """n tokens of equal weight; causal attention gives token i (from 0) the position (i+1)/n."""
        x = check_numbers(x, "tokens")
        if x.dim() != 2:
            raise InvalidInput(f"a measure is made of tokens of shape (n, d), got {tuple(x.shape)}.")
        n = max(len(x), 1)
        places = torch.arange(1, len(x) + 1, dtype=torch.float64) / n if causal else None
        return cls(x, torch.full((len(x),), 1 / n, dtype=torch.float64), places)

    def __len__(self) -> int:
        return len(self.atoms)

    @property
    def width(self) -> int:
        """Width d of the atoms."""
        return self.atoms.shape[1]

    @property
    def support_radius(self) -> float:
        """R of the smallest ball around the origin that holds every atom."""
        return float(self.atoms.norm(dim=-1).max())

    def expand(self, n: int) -> Measure:
        """The same measure written out as n atoms of weight 1/n: every n·w_i must be a whole number.

        >>> Measure(torch.tensor([[1.0], [2.0]]), [0.25, 0.75]).expand(4).atoms.flatten()
        tensor([1., 2., 2., 2.], dtype=torch.float64)
        """
        check_count(n, "n", most=2**31 - 1)
        counts = (self.weights * n).round()
        if float((self.weights * n - counts).abs().max()) > 1e-6:
            raise InvalidInput(f"these weights are not multiples of 1/{n}: choose n so that every n·w_i is whole.")
        each = counts.long()
        places = None if self.positions is None else self.positions.repeat_interleave(each)
        return Measure(self.atoms.repeat_interleave(each, dim=0), torch.full((n,), 1 / n, dtype=torch.float64), places)

    def moved(self, displacement: Tensor) -> Measure:
        """Every atom moved as a whole, x_i + y_i, with ``displacement`` y, ``(m, d)``."""
        displacement = check_numbers(displacement, "displacement").to(self.atoms)
        if displacement.shape != self.atoms.shape:
            raise InvalidInput(
                f"{len(self)} atoms of width {self.width} cannot move by an array of shape {tuple(displacement.shape)}."
            )
        return Measure(self.atoms + displacement, self.weights, self.positions)

    def split(self, atom: int, displacement: Tensor) -> Measure:
        """One atom split in two halves, x_i ± y, with ``displacement`` y, ``(d,)``."""
        check_count(atom, "atom", least=0, most=len(self) - 1)
        displacement = check_numbers(displacement, "displacement").to(self.atoms)
        if displacement.shape != (self.width,):
            raise InvalidInput(f"an atom of width {self.width} cannot move by shape {tuple(displacement.shape)}.")
        both = torch.cat([self.atoms, self.atoms[atom : atom + 1]])
        weights = torch.cat([self.weights, self.weights[atom : atom + 1]])
        weights[[atom, -1]] /= 2
        shift = torch.zeros_like(both)
        shift[atom], shift[-1] = displacement, -displacement
        places = None if self.positions is None else torch.cat([self.positions, self.positions[atom : atom + 1]])
        return Measure(both + shift, weights, places)

    def __repr__(self) -> str:
        places = "" if self.positions is None else f", {len(self.positions.unique())} positions"
        light, heavy = float(self.weights.min()), float(self.weights.max())
        return f"Measure({len(self)} atoms in R^{self.width}, weights {light:.4g} … {heavy:.4g}{places})"


def _vector(numbers: Tensor | Sequence[float], m: int, name: str) -> Tensor:
    vector = check_numbers(numbers, f"the {name}s of a measure")
    if vector.shape != (m,):
        raise InvalidInput(f"a measure needs one {name} for each of its {m} atoms, got shape {tuple(vector.shape)}.")
    return vector
