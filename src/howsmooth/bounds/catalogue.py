"""The catalogue: every theorem as an entry with its assumptions, which refuses outside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import Size, validated
from howsmooth.attention import AttentionMap, Rotary
from howsmooth.bounds.point_error import known_rounding
from howsmooth.bounds.question_setting import PathNumber, Setting, setting
from howsmooth.errors import DoesNotApply, InvalidInput

Evaluate = TypeVar("Evaluate", bound=Callable[..., Tensor])
Given = Callable[[Setting, bool], tuple[Any, ...]]
Side = Literal["upper", "lower"]
Scope = Literal["point", "neighbourhood", "ball", "global", "mean-field W2", "mean-field d2"]
Combine = Literal["heads", "block"]

SCOPES: dict[str, str] = {
    "point": "at the input",
    "neighbourhood": "near the input",
    "ball": "on a set, n tokens",
    "global": "everywhere",
    "mean-field W2": "on a set, every n (W₂)",
    "mean-field d2": "on a set, every n (d₂)",
}
"""Where a bound can hold → in words."""

ON_SETS: tuple[Scope, ...] = ("ball", "global", "mean-field W2", "mean-field d2")
"""The scopes that hold for n tokens of a set."""
_NEEDS: dict[str, tuple[str, ...]] = {
    "point": ("x",),
    "neighbourhood": ("x", "eps"),
    "ball": ("n", "tokens"),
    "global": ("n",),
    "mean-field W2": ("tokens",),
    "mean-field d2": ("tokens",),
}
_HOW_TO_GIVE = {
    "x": "an input",
    "eps": "a neighbourhood (Around)",
    "n": "n",
    "tokens": "a set of tokens (Ball, Normalised)",
}


@dataclass(frozen=True)
class Assumption:
    """An assumption of a theorem: ``sentence`` states it, ``holds`` checks it."""

    sentence: str
    holds: Callable[[Setting], bool]


@dataclass(frozen=True)
class Bound:
    """One statement of the literature or of this project.

    Calling it gives the bound for the whole block, or for every head with ``per_head=True``; outside its assumptions
    it raises `DoesNotApply`. An overflow on the way (an `OverflowError`, 0·∞, ∞ − ∞) gives +∞, which is still an upper
    bound, or 0, which is still a lower one: no bound is ever NaN.

    Attributes:
        name: "module.statement".
        statement: LaTeX.
        reference: where it comes from.
        side: "upper" or "lower".
        norm: 2, inf, or "token" (`howsmooth.norms.largest_token`).
        scope: where it holds: see `SCOPES`.
        kinds: kinds of attention it covers; empty for all attention maps.
        assumptions: the other assumptions.
        evaluate: the number. With ``combine="heads"`` it takes (setting, folded) and gives ``(heads,)``, the output
            matrix folded into V or omitted; with ``combine="block"`` it takes the setting and gives the block's bound.
        combine: how heads become a block.
        block: the block's own bound, where it is not made from those of the heads.
        needs: the required fields of the setting; by default those of the scope.
        on_paths: the number that ``evaluate`` takes from the paths at x, when it does; one pass serves all bounds.
    """

    name: str
    statement: str
    reference: str
    side: Side
    norm: float | str
    scope: Scope
    kinds: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    evaluate: Callable[..., Tensor]
    combine: Combine = "heads"
    block: Callable[[Setting], Tensor] | None = None
    needs: tuple[str, ...] | None = None
    on_paths: PathNumber | None = None

    def guarantee(self, per_head: bool) -> Guarantee:
        """The guarantee of a value of this bound; the theorem itself leaves nothing to chance.

        Bounds of heads from the paths at an input are raised by all that float64 may have lost on the way
        (`howsmooth.bounds.point_error`): PROVED. Other values are the formula in float64, not rounded upward, and so
        are the sums that make a block of its heads: their last digits are as good as roundings without a common
        direction leave them, MODELLED.
        """
        return Guarantee.PROVED if self.on_paths is not None and per_head else Guarantee.MODELLED

    @property
    def required(self) -> tuple[str, ...]:
        """The arguments that must be given."""
        return _NEEDS[self.scope] if self.needs is None else self.needs

    def __call__(self, attention: nn.Module, *, per_head: bool = False, **where: Any) -> Tensor:
        """The bound; ``where`` as in `howsmooth.bounds.setting`."""
        return self.at(setting(attention, **where), per_head)

    def at(self, where: Setting, per_head: bool = False) -> Tensor:
        """The bound in a checked setting, or `DoesNotApply`."""
        if (reason := self.refusal(where, per_head)) is not None:
            raise DoesNotApply(f"{self.name} {reason}; {_nearest(self, where, per_head)}.")
        return self.value(where, per_head)

    def value(self, where: Setting, per_head: bool = False) -> Tensor:
        """The bound in a setting in which it is known to apply."""
        try:
            with torch.no_grad():
                if self.combine == "block":
                    return self._number(self.evaluate(where))
                where.walk([] if self.on_paths is None else [self.on_paths], (True,) if per_head else (True, False))
                if per_head:
                    return self._heads(where, True)
                return self._block(where) if self.block is None else self._number(self.block(where))
        except OverflowError:
            return self._number(torch.full((where.heads,) if per_head and self.combine == "heads" else (), torch.nan))

    def refusal(self, where: Setting, per_head: bool = False) -> str | None:
        """The reason why the bound does not apply here, or None when it applies."""
        if not self.kinds and not isinstance(where.attention, AttentionMap):
            return f"needs an attention map with heads, not {where.kind} attention"
        if self.kinds and where.kind not in self.kinds:
            return f"is for {' or '.join(self.kinds)} attention, not {where.kind}"
        missing = [need for need in self.required if getattr(where, need) is None]
        if missing:
            return f"needs {' and '.join(_HOW_TO_GIVE[need] for need in missing)}"
        for assumption in self.assumptions:
            if not assumption.holds(where):
                return f"assumes that {assumption.sentence}, which does not hold here"
        if where.heads > 1:
            if per_head and self.combine == "block":
                return "is a statement on the whole block, not on single heads"
            if not per_head and self.side == "lower" and self.combine == "heads" and self.block is None:
                return "is a statement on single heads (per_head=True), not on a block of several"
        return None

    def _block(self, where: Setting) -> Tensor:
        r"""From heads to the block: the smaller of :math:`\sum_h L_h` and :math:`\|W^O\| (\sum_h \ell_h^2)^{1/2}`,

        with :math:`L_h` the bound of head h including its slice of the output matrix, and :math:`\ell_h` without.
        """
        summed = self._heads(where, True).sum()
        if self.side == "lower" or not isinstance(where.attention, AttentionMap):
            return summed
        alone = self._heads(where, False)
        size = alone.amax()
        if not 0 < float(size) < torch.inf:  # all heads vanish, or one has no bound
            return summed
        unit = torch.exp2(size.log2().floor())  # squares of bounds below 1e-154 or above 1e154 are out of range
        stacked = where.output_norm * (unit * (alone / unit).square().sum().sqrt())
        return torch.minimum(summed, stacked)

    def _heads(self, where: Setting, folded: bool) -> Tensor:
        """The bound of every head; a head whose slice of the output matrix is zero has the constant 0."""
        numbers = self._number(self.evaluate(where, folded))
        if not folded or not isinstance(where.attention, AttentionMap):
            return numbers
        silent = ~where.attention.output_weight.flatten(1).any(1)
        return torch.where(silent.to(numbers.device), 0.0, numbers)

    def _number(self, numbers: Tensor) -> Tensor:
        """In float64, with overflows as +∞, or as 0 in a lower bound."""
        numbers = numbers.double()
        if self.side == "upper":
            return torch.where(numbers.isnan(), torch.inf, numbers)
        return torch.where(numbers.isfinite(), numbers, 0.0)


CATALOGUE: dict[str, Bound] = {}
"""Every bound by name; the modules of this package fill it."""


def theorem(
    name: str, statement: str, *, given: Given | None = None, on_paths: bool = False, **facts: Any
) -> Callable[[Evaluate], Evaluate]:
    """A decorator that enters a function into the catalogue as a `Bound` with these facts.

    By default it is an upper bound in the 2-norm, of this project, for dot-product attention.

    Args:
        given: the arguments of the function, from (setting, folded), when it does not take just these.
        on_paths: the function takes a group of `Paths` at x and the setting, and gives the bounds of that group.
    """
    usual = {"reference": "howsmooth", "side": "upper", "norm": 2, "kinds": ("dot_product",), "assumptions": ()}

    def enter(evaluate: Evaluate) -> Evaluate:
        entry: dict[str, Any] = {"evaluate": evaluate}
        if given is not None:
            entry = {"evaluate": lambda where, folded=True: evaluate(*given(where, folded))}
        if on_paths:
            entry = {"evaluate": lambda where, folded: where.on_paths(evaluate, folded), "on_paths": evaluate}
        known = CATALOGUE.get(name)
        assert known is None or known.statement == statement, f"two statements are called {name}"
        CATALOGUE[name] = Bound(name, statement, **usual | facts | entry)  # type: ignore[arg-type]
        return evaluate

    return enter


@validated
def get(name: str) -> Bound:
    """The bound of that name.

    >>> import howsmooth as hs
    >>> hs.bounds.get("castin2024.sqrt_n").side
    'upper'
    """
    if name not in CATALOGUE:
        raise InvalidInput(f"there is no bound {name!r}: choose from {', '.join(sorted(CATALOGUE))}.")
    return CATALOGUE[name]


@validated
def applicable(where: Setting, per_head: bool = False) -> list[Bound]:
    """Every bound whose assumptions hold."""
    return [bound for bound in CATALOGUE.values() if bound.refusal(where, per_head) is None]


@torch.no_grad()
def evaluated(bounds: Iterable[Bound], where: Setting, per_head: bool = False) -> dict[str, Tensor]:
    """The values of the bounds that apply, by name; one pass over the paths at x serves them all."""
    fitting = [bound for bound in bounds if bound.refusal(where, per_head) is None]
    numbers = [bound.on_paths for bound in fitting if bound.on_paths is not None]
    where.walk(numbers, (True,) if per_head else (True, False))
    return {bound.name: bound.value(where, per_head) for bound in fitting}


def upper_bounds(
    where: Setting, norm: float | str = 2, *, per_head: bool = False, among: Iterable[Bound] | None = None
) -> dict[str, Tensor]:
    """Every upper bound that applies, by name: of the block, or ``(heads,)`` with ``per_head``.

    Args:
        among: only these, of whatever side and norm they are; all of the catalogue by default.
    """
    wanted = CATALOGUE.values() if among is None else among
    return evaluated([bound for bound in wanted if bound.side == "upper" and bound.norm == norm], where, per_head)


@validated
def least_upper_bound(
    where: Setting, norm: float = 2, *, head: Size | None = None, scopes: Sequence[str] = ON_SETS
) -> tuple[Bound, Tensor] | None:
    """The smallest upper bound that applies, and the theorem that gives it; None when no theorem applies.

    It is a number or +∞, never NaN (`Bound.at`), and +∞ only where every theorem that applies overflows. Of equal
    bounds the first by name counts.

    Args:
        head: of that head alone; of the whole block by default.
        scopes: where bounds must hold to count; on the set that the setting names by default.

    >>> import howsmooth as hs
    >>> where = setting(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), n=100, over=hs.sets.Ball(1.0))
    >>> bound, value = least_upper_bound(where)
    >>> bound.name, round(float(value), 3)
    ('howsmooth.mean_field', 6.437)
    """
    if head is not None and head >= where.heads:
        raise InvalidInput(f"there is no head {head}: choose from 0 to {where.heads - 1}.")
    among = [bound for bound in CATALOGUE.values() if bound.scope in scopes]
    values = upper_bounds(where, norm, per_head=head is not None, among=among)
    if not values:
        return None
    mine = {name: value.reshape(-1)[head or 0] for name, value in values.items()}
    name = min(mine, key=lambda name: (float(mine[name]), name))
    return CATALOGUE[name], mine[name]


def _nearest(wanted: Bound, where: Setting, per_head: bool) -> str:
    """A sentence with the applicable bound that is most similar to the wanted one."""
    scopes = list(SCOPES)

    def distance(other: Bound) -> tuple[bool, bool, int, int, str]:
        position = scopes.index(other.scope)
        apart = abs(position - scopes.index(wanted.scope))
        return other.side != wanted.side, other.norm != wanted.norm, apart, position, other.name

    nearest = min(applicable(where, per_head), key=distance, default=None)
    if nearest is not None:
        return f"the nearest bound that does apply is {nearest.name} ({SCOPES[nearest.scope]})"
    return "no bound applies with what was given: give an input, or n and a set such as Ball(1.0)"


def _linear_queries_and_keys(where: Setting) -> bool:
    stages = [*where.map.query_stages, *where.map.key_stages, *where.map.value_stages]
    return all(stage.linear for stage in stages)


def no_bias(*biases: Tensor | None) -> bool:
    """Whether none of the biases adds anything."""
    return not any(bias is not None and bool(bias.any()) for bias in biases)


def _no_rotary(where: Setting) -> bool:
    return not any(isinstance(stage, Rotary) for stage in where.map.query_stages)


CAUSAL = Assumption("the mask is causal, with nothing added to the logits", lambda where: where.map.terms.is_causal)
UNMASKED_OR_CAUSAL = Assumption(
    "tokens see either all others or the past, with nothing added to the logits",
    lambda where: where.map.terms.is_causal or where.map.terms.is_nothing,
)
NO_PLACES = Assumption(
    "logits depend on the tokens alone, not on their places (no mask, no position bias, no rotary positions)",
    lambda where: where.map.terms.is_nothing and _no_rotary(where),
)
NO_ROTARY = Assumption("queries and keys are not turned by rotary positions", _no_rotary)
NO_QUERY_BIAS = Assumption("queries have no bias", lambda where: no_bias(where.map.query_bias))
NO_SOFTCAP = Assumption("logits are not soft-capped", lambda where: where.map.softcap is None)
LINEAR = Assumption(
    "queries, keys and values are linear in the tokens (no q/k normalisation)", _linear_queries_and_keys
)
PLAIN = (LINEAR, NO_QUERY_BIAS, NO_ROTARY, NO_SOFTCAP)
"""Logits x_jᵀAx_i and whatever a mask adds: what papers mean by attention."""
LINEAR_VALUES = Assumption(
    "values are linear in the tokens", lambda where: all(stage.scale is not None for stage in where.map.value_stages)
)
KNOWN_ROUNDING = Assumption(
    "what rounding does in every stage of queries, keys and values is known", lambda where: known_rounding(where.map)
)
SEES_ITSELF = Assumption(
    "every token sees itself",
    lambda where: where.n is None or math.isinf(where.n) or where.map.terms.sees_itself(int(where.n), where.map.heads),
)
AT_LEAST_TWO = Assumption("there are at least two tokens", lambda where: where.n is None or where.n >= 2)
FINITE = Assumption("n is finite", lambda where: where.n is not None and math.isfinite(where.n))
BALL = Assumption(
    "tokens fill a ball around the origin", lambda where: where.tokens is not None and where.tokens.is_ball
)
