"""Theorems about the Lipschitz constant of attention, each with the assumptions under which it holds.

Read `catalogue` first (`Bound`, one theorem) and `question_setting` (`Setting`, the place where it is evaluated), then
`bound_table` (`table`, all of them). One module per family of theorems, from papers and of this project: at an input
(`point_bounds`, `softmax_jacobian`), near it (`neighbourhood`), on sets of tokens (`token_set_bounds`), for other
attentions (`l2_bounds`, `other_attentions`), and from below (`lower_bounds`). `composition` and `model_stack` bound
whole models. A bound called outside its assumptions refuses.

>>> import torch, howsmooth as hs
>>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
>>> round(float(hs.bounds.get("howsmooth.sqrt_n")(head, n=100, over=hs.sets.Ball(1.0))), 2)
21.0
"""

from howsmooth.bounds import (  # noqa: F401  (each enters its theorems into the catalogue)
    l2_bounds,
    layer_constants,
    lower_bounds,
    neighbourhood,
    other_attentions,
    point_bounds,
    softmax_jacobian,
    token_set_bounds,
)
from howsmooth.bounds.bound_table import Table, table
from howsmooth.bounds.catalogue import CATALOGUE, Bound, get, least_upper_bound
from howsmooth.bounds.composition import Stack
from howsmooth.bounds.model_stack import measured_variances, stack
from howsmooth.bounds.question_setting import Setting, setting

__all__ = [
    "CATALOGUE",
    "Bound",
    "Setting",
    "Stack",
    "Table",
    "get",
    "least_upper_bound",
    "measured_variances",
    "setting",
    "stack",
    "table",
]
