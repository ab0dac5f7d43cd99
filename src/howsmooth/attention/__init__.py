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

__all__ = [
    "ALiBi",
    "AttentionMap",
    "Causal",
    "CosineAttention",
    "DenseBias",
    "GradientStepAttention",
    "L2SelfAttention",
    "LipschitzNormAttention",
    "LogitBias",
    "MeanOfSteps",
    "Padding",
    "RelativeBias",
    "Rotary",
    "SelfAttention",
    "SigmoidAttention",
    "SlidingWindow",
    "UnitNorm",
    "as_attention",
    "map_of",
]
