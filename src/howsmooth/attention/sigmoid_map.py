"""Sigmoid attention: every weight by itself, no normalisation over the keys."""

from __future__ import annotations

import math

from torch import Tensor

from howsmooth._util.validation import check_number, validated
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.masks import LogitBias, Maps, Sight


class _Shift(LogitBias):
    """The same constant on every logit; None means −ln n, which makes rows of weights sum to about one."""

    sight: Sight = "full"
    keeps_self = True

    def __init__(self, value: float | None):
        super().__init__()
        self.value = None if value is None else check_number(value, "the shift of sigmoid logits")

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        value = -math.log(maps.n) if self.value is None else self.value
        return maps.like.new_full((1, 1, 1), value)


class SigmoidAttention(SelfAttention):
    """P_ij = 1/(1 + exp(−(q_i·k_j + b))) (Ramapuram et al. 2024), b = −ln n unless given.

    Takes the arguments of `SelfAttention`.
    """

    kind = "sigmoid"
    weighting = "sigmoid"

    @validated
    def __init__(self, *weights: Tensor | None, logit_shift: float | None = None, **options: object):
        super().__init__(*weights, **options)  # type: ignore[arg-type]
        self.logit_biases.append(_Shift(logit_shift))
