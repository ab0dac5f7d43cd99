"""The maps under study: one file per kind of attention, plus masks, positions and token stages."""

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention, Composite, Feature, Features
from howsmooth.attention.conversion import as_attention, closed_form, map_of, plain_map
from howsmooth.attention.cosine_map import CosineAttention
from howsmooth.attention.cross_attention import CrossAttention, CrossSide
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.gradient_step_map import GradientStepAttention, MeanOfSteps
from howsmooth.attention.l2_map import L2SelfAttention
from howsmooth.attention.lipschitz_norm_map import LipschitzNormAttention
from howsmooth.attention.masks import Causal, Chunked, DenseBias, LogitBias, Padding, SlidingWindow
from howsmooth.attention.positions import ALiBi, RelativeBias, Rotary
from howsmooth.attention.sigmoid_map import SigmoidAttention
from howsmooth.attention.stages import HeadNorm, PlaceScale, UnitNorm

__all__ = ["AttentionMap", "CosineAttention", "GradientStepAttention", "L2SelfAttention", "LipschitzNormAttention"]
__all__ += ["MeanOfSteps", "SelfAttention", "SigmoidAttention"]
__all__ += [
    "ComposedAttention",
    "Composite",
    "CrossAttention",
    "CrossSide",
    "Feature",
    "Features",
]  # with something around the dot product
__all__ += [
    "ALiBi",
    "Causal",
    "Chunked",
    "DenseBias",
    "LogitBias",
    "Padding",
    "RelativeBias",
    "SlidingWindow",
]  # of the logits
__all__ += ["HeadNorm", "PlaceScale", "Rotary", "UnitNorm"]  # of queries and keys
__all__ += ["as_attention", "closed_form", "map_of", "plain_map"]
