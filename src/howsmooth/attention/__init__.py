"""Attention maps, their masks, positions and token-wise stages; conversion of modules into maps.

Read in this order: `attention_map` (every map), `stages` and `positions` (functions of single queries, keys and
values), `masks` and `logit_terms` (terms of the logits), `dot_product_map` and the other kinds of attention, one module
each, `composite_map` and `cross_attention` (maps around a dot product), `conversion` (modules as maps), `memory_layout`
and `module_changes`.
"""

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.attention.conversion import as_attention_map
from howsmooth.attention.cosine_map import CosineAttention
from howsmooth.attention.cross_attention import CrossAttention
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.gradient_step_map import GradientStepAttention
from howsmooth.attention.l2_map import L2SelfAttention
from howsmooth.attention.lipschitz_norm_map import LipschitzNormAttention
from howsmooth.attention.masks import Causal, Chunked, DenseBias, LogitBias, Padding, SlidingWindow
from howsmooth.attention.positions import ALiBi, RelativeBias, Rotary
from howsmooth.attention.sigmoid_map import SigmoidAttention
from howsmooth.attention.stages import UnitNorm

__all__ = [  # maps
    "AttentionMap",
    "ComposedAttention",
    "CosineAttention",
    "CrossAttention",
    "GradientStepAttention",
    "L2SelfAttention",
    "LipschitzNormAttention",
    "SelfAttention",
    "SigmoidAttention",
    "as_attention_map",
]
__all__ += [  # terms of the logits
    "ALiBi",
    "Causal",
    "Chunked",
    "DenseBias",
    "LogitBias",
    "Padding",
    "RelativeBias",
    "SlidingWindow",
]
__all__ += ["Rotary", "UnitNorm"]  # stages of queries and keys
