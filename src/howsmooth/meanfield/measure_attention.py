r"""Measures with finitely many atoms (tokens with weights, and positions under a mask), and attention on them.

For a measure μ the field of a head is

.. math:: \Gamma_\mu(x) = V\,\frac{\int y\,e^{s(x, y)}\,d\mu(y)}{\int e^{s(x, y)}\,d\mu(y)},
          \qquad F(\mu) = (\Gamma_\mu)_\#\,\mu,

with s the logit of query x and key y; heads are summed as on tokens. On atoms this is attention with weights
:math:`P_{ij} \propto w_j e^{s_{ij}}`: the logit of key j gains :math:`\ln w_j`. A point that is no atom is a token of
weight zero, which sees and is not seen. Under a mask Γ_μ(τ, x) averages over the atoms with positions up to τ.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_finite, check_numbers, check_tensor, validated
from howsmooth.attention import AttentionMap, LogitBias, Rotary, as_attention_map
from howsmooth.attention.masks import Maps
from howsmooth.errors import InvalidInput

MASS_TOLERANCE = 1e-9
"""Tolerance of the sum of weights about one, and of the masses of a position about each other."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Measure:
    r"""The probability measure :math:`\mu = \sum_i w_i\,\delta_{x_i}` on tokens, or on pairs (position, token).

    Everything is stored in float64, and weights as they are given, which must sum to one within 1e-9. Atoms of weight
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
        vars(self).update(  # frozen afterwards
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


_POINTS_AT_ONCE = 512


class LogMass(LogitBias):
    """The logit of key j gains ln w_j; no token sees one of weight zero.

    Args:
        weights: ``(n,)``, not negative. Tokens of weight zero come last.
    """

    @validated
    def __init__(self, weights: Tensor):
        super().__init__()
        _check_vector(weights, "weights")
        if (weights < 0).any() or (weights[1:][weights[:-1] == 0] > 0).any():
            raise InvalidInput("the weights of a measure are not negative, and those that are zero come last.")
        self.log_weights: Tensor
        self.register_buffer("log_weights", weights.log(), persistent=False)
        self.heavy = int((weights > 0).sum())

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return 0, self.heavy

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        return self.log_weights[cols].to(maps.like)[None, None]

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.log_weights) != n:
            raise InvalidInput(f"the measure has {len(self.log_weights)} weights, but the input has {n} tokens.")


class Past(LogitBias):
    """Token i sees the tokens j with positions τ_j ≤ τ_i: those of its own position, too."""

    @validated
    def __init__(self, positions: Tensor):
        super().__init__()
        _check_vector(positions, "positions")
        self.positions: Tensor
        self.register_buffer("positions", positions, persistent=False)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        seen = self.positions[cols] <= self.positions[rows, None]
        return None if seen.all() else maps.hide(seen)[None]

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.positions) != n:
            raise InvalidInput(f"the measure has {len(self.positions)} positions, but the input has {n} tokens.")


def _check_vector(numbers: object, name: str) -> None:
    """One finite number for each atom."""
    check_finite(check_tensor(numbers, name, dims=(1,)), name)


@validated
def weighted(
    attention: nn.Module, measure: Measure, points: Tensor | None = None, positions: Tensor | None = None
) -> tuple[AttentionMap, Tensor]:
    """The map of tokens that is attention on this measure, in float64, and the tokens to put into it.

    Args:
        attention: unmasked when the measure has no positions, causal when it has; without rotary or relative positions.
        points, positions: further tokens, of weight zero, behind the atoms.
    """
    map_ = copy.deepcopy(_checked(attention, measure)).to(measure.atoms)
    tokens, weights, places = measure.atoms, measure.weights, measure.positions
    if points is not None:
        _check_points(measure, points, positions)
        tokens = torch.cat([tokens, points])
        weights = torch.cat([weights, weights.new_zeros(len(points))])
    elif positions is not None:
        raise InvalidInput("positions are those of points: give the points, too.")
    if places is not None and positions is not None:
        places = torch.cat([places, positions])
    terms = [LogMass(weights)] if places is None else [LogMass(weights), Past(places)]
    return map_.replace(logit_biases=terms), tokens


@dataclass(frozen=True)
class Field:
    """Γ_μ as a function; build it with `field`."""

    attention: nn.Module
    measure: Measure

    def __call__(self, points: Tensor, positions: Tensor | None = None) -> Tensor:
        """Γ_μ at points, ``(q, d)`` → ``(q, d_out)``; under a mask at pairs of positions, ``(q,)``, and points."""
        _check_points(self.measure, points, positions)
        images = []
        for start in range(0, len(points), _POINTS_AT_ONCE):
            some = slice(start, start + _POINTS_AT_ONCE)
            places = None if positions is None else positions[some].double()
            map_, tokens = weighted(self.attention, self.measure, points[some].double(), places)
            images.append(map_(tokens)[len(self.measure) :])
        return torch.cat(images)


def _check_points(measure: Measure, points: Tensor, positions: Tensor | None) -> None:
    """Refuse points that the field of a measure has no value at."""
    places = measure.positions
    check_finite(check_tensor(points, "points"), "points")
    if points.shape != (len(points) if points.dim() else 0, measure.width):
        raise InvalidInput(f"the field takes points of shape (q, {measure.width}), got {tuple(points.shape)}.")
    if (positions is None) != (places is None):
        what = "needs the position of each point" if positions is None else "has no positions: leave them out"
        raise InvalidInput(f"the field of this measure {what}.")
    if positions is None or places is None:
        return
    _check_vector(positions, "positions")
    if len(positions) != len(points):
        raise InvalidInput(f"{len(points)} points need as many positions, got {len(positions)}.")
    if (positions < places.min()).any():
        raise InvalidInput(
            f"a point at position {float(positions.min()):.6g} sees nothing: the first atom is at "
            f"{float(places.min()):.6g}."
        )


@validated
def field(attention: nn.Module, measure: Measure) -> Field:
    """Γ_μ, which can be evaluated and differentiated at any points.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.eye(1), torch.eye(1))
    >>> two = Measure(torch.tensor([[-1.0], [1.0]]), [0.5, 0.5])
    >>> field(head, two)(torch.tensor([[0.0], [1.0]])).flatten()  # tanh
    tensor([0.0000, 0.7616], dtype=torch.float64)
    """
    _checked(attention, measure)
    return Field(attention, measure)


@validated
def push(attention: nn.Module, measure: Measure) -> Measure:
    r"""The image :math:`F(\mu) = (\Gamma_\mu)_\#\mu`: the field moves every atom."""
    map_, tokens = weighted(attention, measure)
    with torch.no_grad():
        return Measure(map_(tokens), measure.weights, measure.positions)


def _checked(attention: nn.Module, measure: Measure) -> AttentionMap:
    """The attention as a map that measures can be put into."""
    map_ = as_attention_map(attention)
    if map_ is None:
        raise InvalidInput(
            f"a measure needs an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers."
        )
    if map_.weighting != "softmax":
        raise InvalidInput(
            f"{map_.kind} attention is no average over its keys, hence no map of measures: use softmax weights."
        )
    if any(isinstance(stage, Rotary) for stage in [*map_.query_stages, *map_.key_stages]):
        raise InvalidInput("rotary positions count tokens, which a measure cannot: leave them out of the attention.")
    causal = map_.terms.is_causal
    if not causal and not map_.terms.is_nothing:
        names = ", ".join(type(term).__name__ for term in map_.terms)
        raise InvalidInput(f"on measures attention is unmasked or causal, but this one has {names}: leave it out.")
    if causal and measure.positions is None:
        raise InvalidInput("causal attention needs positions: build the measure with Measure.of_tokens or give them.")
    if measure.positions is not None and not causal:
        raise InvalidInput(
            "this measure has positions, but the attention is not causal: leave out one or mask the other."
        )
    if map_.in_features != measure.width:
        raise InvalidInput(f"the atoms are {measure.width} wide, but the attention takes {map_.in_features}.")
    for name, weight in map_.state_dict().items():
        check_finite(weight, f"the weight {name}")
    return map_
