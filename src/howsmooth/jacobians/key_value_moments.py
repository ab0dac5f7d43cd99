"""Moments of the keys and values that a query sees: the sizes by which rounding is bounded."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

_AT_ONCE = 2**11
"""Queries whose moments are taken at once."""


@dataclass(frozen=True)
class Moments:
    """Moments of keys and values under the weights P_i of every query i, ``(maps, n)`` in float64.

    Means are taken about a centre: of all tokens, or of those that the query sees (``spread``). Weights that are not
    normalised have a derivative without a centre; there the two are the same. Spreads are never too small: the rounding
    of the difference is added.

    Attributes:
        key, key_spread: (Σ_j P_ij |k_j|²)^½, and the same of k_j − Σ_l P_il k_l.
        value, value_spread: likewise.
        lone_value, lone_spread: (Σ_j P_ij² (|v_j| + |o_i|)²)^½ and (Σ_j P_ij² |v_j − o_i|²)^½ with o_i = Σ_l P_il v_l:
            the length of the row i of a matrix whose rows ``value`` bounds by Cauchy–Schwarz.
        lone: (Σ_j P_ij²)^½.
        sink: max_j Σ_i P_ij, ``(maps,)``.
    """

    key: Tensor
    key_spread: Tensor
    value: Tensor
    value_spread: Tensor
    lone_value: Tensor
    lone_spread: Tensor
    lone: Tensor
    sink: Tensor

    def select(self, index: Tensor) -> Moments:
        """The moments of some maps."""
        return Moments(*(getattr(self, field.name)[index] for field in fields(self)))


class MomentSums:
    """The sums Σ_j P_ij (v_j, |v_j|², 1, k_j, |k_j|²) and Σ_j P_ij² (v_j, |v_j|², 1), gathered tile by tile.

    Tokens are divided by the longest of their map, so that squares neither overflow nor underflow.

    Attributes:
        keys_apart: a bound on the length of the part missing from Σ_j P_ij k_j, ``(maps, n, 1)``: where not all keys
            were summed, but to a vector h, and l is the rest, Σ_j P_ij |k_j − h|² = Σ_j P_ij |k_j|² − |h|² − 2h·l
            bounds the square of the spread, which is least about the mean.
    """

    def __init__(self, key: Tensor, value: Tensor, centred: bool):
        self.centred, self.width = centred, value.shape[-1]
        self.longest_key, self.longest_value = _longest(key), _longest(value)
        values, keys = value / self.longest_value, key / self.longest_key
        squares = [torch.linalg.vector_norm(t, dim=-1, keepdim=True).square() for t in (values, keys)]
        self.summands = torch.cat([values, squares[0], torch.ones_like(squares[0]), keys, squares[1]], dim=-1)
        self.sums = torch.zeros_like(self.summands)
        self.lone = torch.zeros_like(self.summands[..., : self.width + 2])
        self.columns = torch.zeros_like(value[..., 0])
        self.keys_apart = torch.zeros_like(value[..., :1], dtype=torch.float64)

    def add(self, queries: tuple[slice, slice], keys: tuple[slice, slice], weights: Tensor) -> None:
        """Take in the weights of one tile."""
        self.sums[queries].baddbmm_(weights, self.summands[keys])
        self.columns[keys].add_(weights.sum(-2))
        self.lone[queries].baddbmm_(weights.square(), self.summands[keys][..., : self.width + 2])

    def output(self) -> Tensor:
        """O_i = Σ_j P_ij v_j, divided by Σ_j P_ij as it came out where that should be one; 0 where nothing is seen."""
        value, total = self.sums[..., : self.width], self.sums[..., self.width + 1, None]
        return value / (total.masked_fill(total == 0, 1.0) if self.centred else 1.0) * self.longest_value

    def moments(self) -> Moments:
        """The moments from the sums; of some queries at a time, because their sums take four times the memory here."""
        n = self.sums.shape[1]
        parts = [self._moments(slice(start, start + _AT_ONCE)) for start in range(0, n, _AT_ONCE)]
        every = [*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)), self.columns.amax(-1).double()]
        return Moments(*every)

    def _moments(self, rows: slice) -> tuple[Tensor, ...]:
        """The moments of some queries, in the order of `Moments`."""
        split = [self.width, 1, 1, self.summands.shape[-1] - self.width - 3, 1]
        value, value_square, total, key, key_square = self.sums[:, rows].double().split(split, dim=-1)
        lone, lone_square, lone_total = self.lone[:, rows].double().split(split[:3], dim=-1)
        rounding = 4 * self.sums.shape[1] ** 0.5 * torch.finfo(self.sums.dtype).eps
        total = total.masked_fill(total == 0, 1.0)

        def about(square: Tensor, centre: Tensor) -> Tensor:
            apart = torch.minimum((square - centre).clamp_min(0.0) + rounding * square, square)
            return apart if self.centred else square

        def root(square: Tensor, longest: Tensor | float = 1.0) -> Tensor:
            return (square.sqrt() * longest).squeeze(-1)

        centre = value / total if self.centred else torch.zeros_like(value)
        far = centre.square().sum(-1, keepdim=True) * lone_total
        both = (lone_square.sqrt() + far.sqrt()).square()
        between = lone_square - 2 * (centre * lone).sum(-1, keepdim=True) + far
        along = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
        longest_key, longest_value = self.longest_key.double(), self.longest_value.double()
        return (
            root(key_square, longest_key),
            root(about(key_square, along * (along - 2 * self.keys_apart[:, rows]) / total), longest_key),
            root(value_square, longest_value),
            root(about(value_square, value.square().sum(-1, keepdim=True) / total), longest_value),
            root(both, longest_value),
            root(torch.minimum(between.clamp_min(0.0) + rounding * both, both), longest_value),
            root(lone_total),
        )


class OutputSums:
    """The sums Σ_j P_ij (v_j, 1) alone, for an operator that needs no moments."""

    def __init__(self, value: Tensor, centred: bool):
        self.centred = centred
        self.summands = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        self.sums = torch.zeros_like(self.summands)

    def add(self, queries: tuple[slice, slice], keys: tuple[slice, slice], weights: Tensor) -> None:
        """Take in the weights of one tile."""
        self.sums[queries].baddbmm_(weights, self.summands[keys])

    def output(self) -> Tensor:
        """As `MomentSums.output`."""
        value, total = self.sums[..., :-1], self.sums[..., -1:]
        return value / total.masked_fill(total == 0, 1.0) if self.centred else value.contiguous()

    def moments(self) -> None:
        """There are none."""
        return


def _longest(tokens: Tensor) -> Tensor:
    """The longest token of every map, ``(maps, 1, 1)``; 1 when all are zero."""
    largest = tokens.abs().amax((-2, -1), keepdim=True)
    scaled = tokens / largest.masked_fill(largest == 0, 1.0)
    longest = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).amax(-2, keepdim=True) * largest
    return longest.masked_fill(longest == 0, 1.0)
