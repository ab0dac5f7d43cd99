"""The maps under study: one file per kind of attention, plus masks, positions and token stages."""

from howsmooth.attention.base import AttentionMap
from howsmooth.attention.cosine import CosineAttention
from howsmooth.attention.dot_product import SelfAttention
from howsmooth.attention.gradient_step import GradientStepAttention, MeanOfSteps
from howsmooth.attention.l2 import L2SelfAttention
from howsmooth.attention.lipschitz_norm import LipschitzNormAttention
from howsmooth.attention.masks import Causal, DenseBias, LogitBias, Padding, SlidingWindow
from howsmooth.attention.offers import as_attention, map_of
from howsmooth.attention.positions import ALiBi, RelativeBias, Rotary
from howsmooth.attention.sigmoid import SigmoidAttention
from howsmooth.attention.stages import UnitNorm

__all__ = ["AttentionMap", "CosineAttention", "GradientStepAttention", "L2SelfAttention", "LipschitzNormAttention"]
__all__ += ["MeanOfSteps", "SelfAttention", "SigmoidAttention"]
__all__ += ["ALiBi", "Causal", "DenseBias", "LogitBias", "Padding", "RelativeBias", "SlidingWindow"]  # of the logits
__all__ += ["Rotary", "UnitNorm"]  # of queries and keys
__all__ += ["as_attention", "map_of"]
