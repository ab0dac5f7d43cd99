r"""Attention on measures, through the same maps as on tokens.

For a measure μ the field of a head is

.. math:: \Gamma_\mu(x) = V\,\frac{\int y\,e^{s(x, y)}\,d\mu(y)}{\int e^{s(x, y)}\,d\mu(y)},
          \qquad F(\mu) = (\Gamma_\mu)_\#\,\mu,

with s the logit of query x and key y; heads are summed as on tokens. On atoms this is attention with weights
:math:`P_{ij} \propto w_j e^{s_{ij}}`: the logit of key j gains :math:`\ln w_j`. A point that is no atom is a token of
weight zero, which sees and is not seen. Under a mask Γ_μ(τ, x) averages over the atoms with positions up to τ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_finite, check_tensor, validated
from howsmooth.attention import AttentionMap, LogitBias, Rotary, as_attention_map
from howsmooth.attention.masks import Maps
from howsmooth.errors import InvalidInput
from howsmooth.meanfield.discrete_measure import Measure

_POINTS_AT_ONCE = 512


class LogMass(LogitBias):
    """The logit of key j gains ln w_j; a token of weight zero is seen by nobody.

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
    r"""The image :math:`F(\mu) = (\Gamma_\mu)_\#\mu`: every atom goes to where the field takes it."""
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
