"""The upper end on a set: the smallest number that a theorem of the catalogue gives there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from howsmooth.attention import as_attention_map
from howsmooth.bounds.bound_table import BoundRow, compared_with
from howsmooth.bounds.catalogue import ON_SETS, least_upper_bound
from howsmooth.bounds.question_setting import setting
from howsmooth.sets import InputSet

Function = Callable[[Tensor], Tensor]


def tightest_upper(f: Function, n: int, over: InputSet, *, norm: float = 2, head: int | None = None) -> BoundRow | None:
    """The smallest upper bound of the catalogue that holds for n tokens on the whole set; None when none applies.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0)).written
    '≤ 6.437'
    """
    attention = as_attention_map(f, n, kind=nn.Module) or f
    if not isinstance(attention, nn.Module) or not hasattr(attention, "kind"):
        return None
    whole = over.x is None and over.reach == 0  # no theorem is about a single token
    where = setting(attention, n=n, over=None if whole else over)  # a ball per token holds the ball of all together
    least = least_upper_bound(where, norm, head=head, scopes=("neighbourhood", *ON_SETS))
    if least is None:
        return None
    bound, value = least
    facts = (norm, bound.scope, bound.reference, bound.statement)
    return BoundRow(bound.name, float(value), "upper", *facts, head=head, guarantee=bound.guarantee(head is not None))


def not_passed(upper: BoundRow | None, reached: float) -> BoundRow | None:
    """The upper end with its ratio to what a witness reaches, or `ContradictedBound` when the witness passes it.

    >>> import howsmooth as hs, torch
    >>> from howsmooth.sets import Ball
    >>> upper = tightest_upper(hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2)), 100, Ball(1.0))
    >>> not_passed(upper, 6.5)
    Traceback (most recent call last):
    howsmooth.bounds.bound_table.ContradictedBound: howsmooth.mean_field says ... at most 6.43656, but the witness ...
    """
    if upper is None:
        return None
    lower = BoundRow("the witness", reached, "lower", upper.norm, "point", "", "", head=upper.head)
    return compared_with(upper, [lower])
