r"""LipschitzNorm attention: Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers*, ICML 2021
(arXiv 2103.04886).

The paper introduces the divisor c and bounds the map (Q, K, V) ↦ softmax(QKᵀ/c)V by the constant e√3 + 2√6 ≈ 9.61, for
all inputs of all lengths. It follows from the smaller one of `howsmooth.bounds.own.lipschitz_norm_bound`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.autodiff_maps import LipschitzNormAttention
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral


def joint(output: Tensor | float, stacked: Tensor) -> Tensor:
    r""":math:`(e\sqrt3 + 2\sqrt6)\,\|W\|\,\|(W_Q, W_K, W_V)\|`: the paper's constant for the map of (Q, K, V).

    Args:
        output: ‖W‖. stacked: the norm of the three weights on top of each other. Both of each head.

    >>> round(float(joint(1.0, torch.ones(()))), 2)
    9.61
    """
    return (math.e * 3**0.5 + 2 * 6**0.5) * output * stacked


def projections_of(where: Setting) -> AttentionMap:
    """The attention map whose projections this attention takes."""
    assert isinstance(where.attention, LipschitzNormAttention)
    return where.attention.projections


LIPSCHITZ_NORM: dict[str, Any] = {"scope": "global", "kinds": ("lipschitz_norm",), "needs": ()}


@theorem(
    "dasoulas2021.joint",
    r"(e\sqrt3+2\sqrt6)\,\|W\|\,\|(W_Q,W_K,W_V)\|",
    reference="after Dasoulas, Scaman, Virmaux 2021",
    **LIPSCHITZ_NORM,
)
def _joint(where: Setting, folded: bool) -> Tensor:
    maps = projections_of(where)
    stacked = torch.cat([maps.query_weight, maps.key_weight, maps.value_weight], dim=1).double()
    return joint(spectral(maps.output_weight.double()) if folded else 1.0, spectral(stacked))
