"""The setting of a bound: the attention, the number of tokens, and their set or the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_finite, validated
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.bounds.head_constants import HeadNumbers, head_numbers, norm_rounding, without_output
from howsmooth.bounds.three_paths import Paths, PathsAt
from howsmooth.errors import InvalidInput
from howsmooth.sets import InputSet
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.near_sets import Over, as_set

PathNumber = Callable[[Paths, "Setting"], Tensor]
"""A number of each map of a group of `Paths`, ``(g,)``."""


@dataclass(frozen=True)
class Setting:
    """The setting in which a bound is evaluated; build it with `setting`.

    Attributes:
        attention: an `AttentionMap`, or another attention module with a ``kind``.
        n: number of tokens; ``inf`` for measures; None when unknown.
        tokens: the ellipsoid every token lies in, when known.
        x: the input, ``(n, d)``, when the bound is for one input.
        eps: every token may move by this much from x.
    """

    attention: nn.Module
    n: float | None = None
    tokens: Ellipsoid | None = None
    x: Tensor | None = None
    eps: float | None = None
    _known: dict[tuple[PathNumber, bool], Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def kind(self) -> str:
        """Kind of attention: "dot_product", "l2", "sigmoid", "cosine", …"""
        return str(getattr(self.attention, "kind", "unknown"))

    @property
    def map(self) -> AttentionMap:
        """The attention as a map with heads."""
        assert isinstance(self.attention, AttentionMap)
        return self.attention

    @property
    def heads(self) -> int:
        """Number of heads; 1 for modules without."""
        return int(getattr(self.attention, "heads", 1))

    @property
    def count(self) -> float:
        """n, which the bound requires."""
        assert self.n is not None
        return self.n

    @property
    def radius(self) -> float:
        """R, which the bound requires."""
        assert self.tokens is not None
        return self.tokens.radius

    @property
    def point(self) -> Tensor:
        """The input in float64, which the bound requires."""
        assert self.x is not None
        return self.x.double()

    @cached_property
    def _numbers(self) -> dict[bool, HeadNumbers]:
        tokens = self.tokens or Ellipsoid.ball(1.0, self.map.in_features)  # ‖V‖ and ‖A‖ are the same on every set
        numbers = head_numbers(self.map, tokens, math.inf if self.n is None else self.n)
        return {True: numbers, False: without_output(numbers, self.map, tokens)}

    @cached_property
    def output_norm(self) -> float:
        """‖W^O‖ of the whole output matrix."""
        return float(torch.linalg.matrix_norm(self.map.output_weight.double().flatten(0, 1), 2))

    def numbers(self, folded: bool) -> HeadNumbers:
        """The constants of each head for bounds on sets, with the output matrix folded into V or not."""
        return self._numbers[folded]

    def on_ball(self, folded: bool) -> tuple[Tensor, Tensor, float]:
        """‖V‖ and ‖A‖ of each head, ``(heads,)``, and R: what theorems on balls are made of."""
        return self.numbers(folded).value, self.numbers(folded).score, self.radius

    def norms(self, group: Paths) -> tuple[Tensor, Tensor]:
        """‖V‖ and max ‖A_ij‖ of each map of a group, ``(g,)``, enlarged by their rounding."""
        numbers, lost = self.numbers(group.folded), norm_rounding(self.map, group.folded)
        return (numbers.value + lost[0])[group.heads], (numbers.score + lost[1])[group.heads]

    def on_paths(self, number: PathNumber, folded: bool) -> Tensor:
        """A number of every head at x, ``(heads,)``, from its paths; NaN where it overflows."""
        self.walk([number], (folded,))
        return self._known[number, folded]

    def walk(self, numbers: Iterable[PathNumber], foldings: Sequence[bool]) -> None:
        """Find several numbers of every head, with and without the output matrix, in one pass over the paths at x."""
        wanted = [(one, folded) for one in numbers for folded in foldings if (one, folded) not in self._known]
        if not wanted:
            return
        sides = sorted({folded for _, folded in wanted})
        numbers_of: dict[tuple[PathNumber, bool], list[Tensor]] = {key: [] for key in wanted}
        for groups in PathsAt(self.map, self.point).groups(sides):
            for one, folded in wanted:
                group = groups[sides.index(folded)]
                try:
                    numbers_of[one, folded].append(one(group, self))
                except OverflowError:
                    numbers_of[one, folded].append(torch.full_like(group.weights[:, 0, 0], torch.nan))
        self._known.update({key: torch.cat(values) for key, values in numbers_of.items()})


@validated
def setting(
    attention: nn.Module,
    *,
    n: float | None = None,
    over: Over | None = None,
) -> Setting:
    """A checked `Setting`; one sentence refuses each question that no bound can answer.

    Args:
        attention: an attention map, a layer of `howsmooth.nn`, or a `torch.nn.MultiheadAttention`.
        n: number of tokens; the set may know it.
        over: the set of inputs (`howsmooth.sets`): `Ball`, `Normalised`, `Point`, `Around`, …; an input ``(n, d)`` is
            its `Point`, a LayerNorm or RMSNorm its image. None for all inputs.

    >>> import torch, howsmooth as hs
    >>> setting(hs.SelfAttention.random(4), n=8, over=torch.ones(3, 4))
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the input has 3 tokens, but n=8 was given: leave n out.
    """
    width = getattr(attention, "in_features", None)
    region = as_set(over, width if isinstance(width, int) else None)
    if region.length is not None:
        if n is not None and n != region.length:
            raise InvalidInput(f"the input has {region.length} tokens, but n={n} was given: leave n out.")
        n = region.length
    n = None if n is None else _count(n)
    attention = as_attention_map(attention, n, kind=nn.Module) or attention
    if not hasattr(attention, "kind"):
        raise InvalidInput(
            f"bounds need an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers."
        )
    for name, buffer in attention.state_dict().items():
        check_finite(buffer, f"the weight {name}")
    tokens = _tokens(int(attention.in_features), region)  # type: ignore[arg-type]
    if isinstance(attention, AttentionMap) and n is not None and math.isfinite(n):
        attention.terms.check(int(n), attention.heads, 1)
        blind = attention.terms.first_blind(int(n), attention.heads)
        if blind is not None:
            raise InvalidInput(f"token {blind} sees nothing under this mask: leave padded tokens out.")
    return Setting(attention, n, tokens, region.x, region.eps)


def _count(n: float) -> float:
    """A number of tokens; beyond 2⁵³, where not every one is a float64, the next one that is."""
    try:
        whole, most = n >= 1 and (math.isinf(n) or n == int(n)), float(n)
    except OverflowError:
        whole, most = True, math.inf
    if not whole:
        raise InvalidInput(f"n must be a whole number of tokens, at least 1 (or inf for measures), got {n}.")
    return n if n <= 2**53 else most


def _tokens(width: int, region: InputSet) -> Ellipsoid | None:
    """The ellipsoid of the tokens, of the width that the attention takes."""
    if region.x is not None and region.x.shape[-1] != width:
        raise InvalidInput(f"the tokens are {region.x.shape[-1]} wide, but the attention takes {width}.")
    if region.x is None and region.reach == 0:
        raise InvalidInput("bounds on a ball need a ball of positive radius.")
    tokens = region.ellipsoid(width)
    if tokens is not None and tokens.width != width:
        raise InvalidInput(f"the set holds tokens of width {tokens.width}, but the attention takes {width}.")
    return tokens
