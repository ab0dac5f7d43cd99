"""The upper end on a set: the smallest number that a theorem of the catalogue gives there."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from howsmooth.attention import map_of
from howsmooth.bounds.catalogue import Bound, applicable
from howsmooth.bounds.settings import Setting, setting
from howsmooth.bounds.tables import Row, compared_with
from howsmooth.sets import InputSet, Neighbourhood

Function = Callable[[Tensor], Tensor]
_ON_SETS = ("neighbourhood", "ball", "global", "mean-field W2", "mean-field d2")


def tightest_upper(f: Function, n: int, over: InputSet, *, norm: float = 2, head: int | None = None) -> Row | None:
    """The smallest upper bound of the catalogue that holds for n tokens on the whole set; None when none applies.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0)).written
    '≤ 6.437'
    """
    attention = map_of(f, n) or f
    if not isinstance(attention, nn.Module) or not hasattr(attention, "kind"):
        return None
    where = _setting(attention, n, over)
    rows = []
    for bound in applicable(where, head is not None):
        if bound.side == "upper" and bound.norm == norm and bound.scope in _ON_SETS:
            value = _value(bound, where, head)
            facts = (bound.norm, bound.scope, bound.reference, bound.statement)
            rows.append(Row(bound.name, value, "upper", *facts, head=head))
    return min(rows, key=lambda row: (row.value, row.name), default=None)


def _value(bound: Bound, where: Setting, head: int | None) -> float:
    """The bound as a number; infinite when a float64 cannot hold what leads to it."""
    try:
        value = float(bound.at(where, head is not None).double().reshape(-1)[0 if head is None else head])
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(value) else value  # 0·∞


def _setting(attention: nn.Module, n: int, over: InputSet) -> Setting:
    tokens = over.token_set(int(attention.in_features))  # type: ignore[arg-type]
    if isinstance(over, Neighbourhood):  # a ball per token holds the ball of all tokens together
        return setting(attention, x=over.x, eps=over.eps, tokens=tokens)
    return setting(attention, n=n, tokens=tokens)


def not_passed(upper: Row | None, reached: float) -> Row | None:
    """The upper end with its ratio to what a witness reaches, or `ContradictedBound` when the witness passes it.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> upper = tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0))
    >>> not_passed(upper, 6.5)
    Traceback (most recent call last):
    howsmooth.bounds.tables.ContradictedBound: howsmooth.mean_field says ... at most 6.43656, but the witness ...
    """
    if upper is None:
        return None
    lower = Row("the witness", reached, "lower", upper.norm, "point", "", "", head=upper.head)
    return compared_with(upper, [lower])
