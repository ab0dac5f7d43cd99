"""The question a bound answers: which attention, how many tokens, from which set or at which input."""

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
from howsmooth.bounds.three_paths import Paths, both_paths
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.sets import TokenSet
from howsmooth.sets.input_sets import check_inside

PathNumber = Callable[[Paths, "Setting"], Tensor]
"""A number of each map of a group of `Paths`, ``(g,)``."""


@dataclass(frozen=True)
class Setting:
    """Where a bound is evaluated; build it with `setting`.

    Attributes:
        attention: an `AttentionMap`, or another attention module with a ``kind``.
        n: number of tokens; ``inf`` for measures; None when not said.
        tokens: the set every token lies in, when known.
        x: the input, ``(n, d)``, when the bound is for one input.
        eps: every token may move by this much from x.
    """

    attention: nn.Module
    n: float | None = None
    tokens: TokenSet | None = None
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
        """n, which the bound has asked for."""
        assert self.n is not None
        return self.n

    @property
    def radius(self) -> float:
        """R, which the bound has asked for."""
        assert self.tokens is not None
        return self.tokens.radius

    @property
    def point(self) -> Tensor:
        """The input in float64, which the bound has asked for."""
        assert self.x is not None
        return self.x.double()

    @cached_property
    def _numbers(self) -> dict[bool, HeadNumbers]:
        tokens = self.tokens or TokenSet.ball(1.0, self.map.in_features)  # ‖V‖ and ‖A‖ are the same on every set
        numbers = head_numbers(self.map, tokens, math.inf if self.n is None else self.n)
        return {True: numbers, False: without_output(numbers, self.map, tokens)}

    @cached_property
    def output_norm(self) -> float:
        """‖W^O‖ of the whole output matrix."""
        return float(torch.linalg.matrix_norm(self.map.output_weight.double().flatten(0, 1), 2))

    def numbers(self, folded: bool) -> HeadNumbers:
        """What the bounds on sets need to know of each head, with the output matrix folded into V or not."""
        return self._numbers[folded]

    def on_ball(self, folded: bool) -> tuple[Tensor, Tensor, float]:
        """‖V‖ and ‖A‖ of each head, ``(heads,)``, and R: what theorems on balls are made of."""
        return self.numbers(folded).value, self.numbers(folded).score, self.radius

    def norms(self, group: Paths) -> tuple[Tensor, Tensor]:
        """‖V‖ and max ‖A_ij‖ of each map of a group, ``(g,)``, with what rounding may have taken from them."""
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
        for groups in both_paths(self.map, self.point, sides):
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
    radius: float | None = None,
    tokens: TokenSet | nn.Module | None = None,
    x: Tensor | None = None,
    eps: float | None = None,
) -> Setting:
    """A checked `Setting`: refuses what no bound could answer, in one sentence each.

    Args:
        attention: an attention map, a layer of `howsmooth.nn`, or a `torch.nn.MultiheadAttention`.
        n: number of tokens; taken from x when that is given.
        radius: R of the ball B_R every token lies in.
        tokens: instead of a radius a `TokenSet`, or the LayerNorm or RMSNorm that the tokens come from.
        x: one input, ``(n, d)``. Without radius or tokens the ball is the smallest that holds its tokens.
        eps: how far every token may move from x.

    >>> import howsmooth as hs
    >>> setting(hs.SelfAttention.random(4), n=8, radius=-1.0)
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: radius must be positive and finite, got -1.0.
    """
    if x is not None:
        check_tokens(x)
        if x.dim() != 2:
            raise InvalidInput(f"bounds are for one input at a time, (n, d), got shape {tuple(x.shape)}.")
        if n is not None and n != len(x):
            raise InvalidInput(f"the input has {len(x)} tokens, but n={n} was given: leave n out.")
        n = len(x)
    n = None if n is None else _count(n)
    attention = as_attention_map(attention, n, kind=nn.Module) or attention
    if not hasattr(attention, "kind"):
        raise InvalidInput(
            f"bounds need an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers."
        )
    for name, buffer in attention.state_dict().items():
        check_finite(buffer, f"the weight {name}")
    if eps is not None and not (math.isfinite(eps) and eps >= 0 and x is not None):
        raise InvalidInput(f"eps must be finite and not negative, and needs an input x, got {eps}.")
    if radius is not None and tokens is not None:
        raise InvalidInput("give either a radius or a set of tokens, not both.")
    token_set = _tokens(attention, radius, tokens, x)
    if isinstance(attention, AttentionMap) and n is not None and math.isfinite(n):
        attention.terms.check(int(n), attention.heads, 1)
        blind = attention.terms.first_blind(int(n), attention.heads)
        if blind is not None:
            raise InvalidInput(f"token {blind} sees nothing under this mask: leave padded tokens out.")
    return Setting(attention, n, token_set, x, eps)


def _count(n: float) -> float:
    """A number of tokens; beyond 2⁵³, where not every one is a float64, the next one that is."""
    try:
        whole, most = n >= 1 and (math.isinf(n) or n == int(n)), float(n)
    except OverflowError:
        whole, most = True, math.inf
    if not whole:
        raise InvalidInput(f"n must be a whole number of tokens, at least 1 (or inf for measures), got {n}.")
    return n if n <= 2**53 else most


def _tokens(
    attention: nn.Module, radius: float | None, tokens: TokenSet | nn.Module | None, x: Tensor | None
) -> TokenSet | None:
    width = int(attention.in_features)  # type: ignore[arg-type]
    if x is not None and x.shape[-1] != width:
        raise InvalidInput(f"the tokens are {x.shape[-1]} wide, but the attention takes {width}.")
    token_set = tokens if isinstance(tokens, TokenSet) or tokens is None else TokenSet.after(tokens, width)
    if radius is not None:
        token_set = TokenSet.ball(radius, width)
    if token_set is None:
        return None if x is None or not bool(x.any()) else TokenSet.around(x)
    if token_set.width != width:
        raise InvalidInput(f"the set holds tokens of width {token_set.width}, but the attention takes {width}.")
    if x is not None:
        check_inside(x, token_set)
    return token_set
