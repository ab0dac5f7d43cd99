"""Trainable attention layers, one module per kind; the modules beside them carry what the kinds share."""

from howsmooth.nn.layers.base import AttentionLayer
from howsmooth.nn.layers.contractive import ContractiveL2Attention
from howsmooth.nn.layers.dot_product import (
    CosineAttention,
    DotProductAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from howsmooth.nn.layers.gradient_step import GradientStepAttention
from howsmooth.nn.layers.l2 import L2Attention
from howsmooth.nn.layers.lipschitz_norm import LipschitzNormAttention

__all__ = [
    "AttentionLayer",
    "ContractiveL2Attention",
    "CosineAttention",
    "DotProductAttention",
    "GradientStepAttention",
    "L2Attention",
    "LipschitzNormAttention",
    "NormControlledAttention",
    "SigmoidAttention",
]
