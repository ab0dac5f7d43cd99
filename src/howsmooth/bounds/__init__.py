"""Theorems about the Lipschitz constant of attention, each with the assumptions under which it holds.

Read `catalogue` first (`Bound`, one theorem) and `question_setting` (`Setting`, the place where it is evaluated), then
`bound_table` (`table`, all of them). One module per paper; theorems of this project are in `own`. `composition` and
`model_stack` bound whole models. A bound called outside its assumptions refuses.

>>> import torch, howsmooth as hs
>>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
>>> round(float(hs.bounds.get("howsmooth.sqrt_n")(head, n=100, over=hs.sets.Ball(1.0))), 2)
21.0
"""

from howsmooth.bounds import (  # noqa: F401  (each enters its theorems into the catalogue)
    castin2024,
    dasoulas2021,
    emadi2026,
    furuya2026,
    kim2021,
    layer_constants,
    nair2025,
    qi2023,
    ramapuram2024,
    yudin2025,
    zhai2023,
)
from howsmooth.bounds.bound_table import Table, table
from howsmooth.bounds.catalogue import CATALOGUE, Bound, get, least_upper_bound
from howsmooth.bounds.composition import Stack
from howsmooth.bounds.model_stack import measured_variances, stack
from howsmooth.bounds.own import (  # noqa: F401  (each enters its theorems into the catalogue)
    composed_attention,
    gradient_step_bound,
    l2_bounds,
    lipschitz_norm_bound,
    local_bound,
    lower_bounds,
    neighbourhood,
    normalised,
    sigmoid_bound,
    softmax_jacobian,
    three_path,
    token_set_bounds,
)
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
