"""Layers to train with: attention that keeps its Lipschitz promise, called like `torch.nn.MultiheadAttention`.

>>> import torch
>>> from howsmooth.nn import ContractiveL2Attention
>>> layer = ContractiveL2Attention(16, num_heads=4, coefficient=0.9).eval()
>>> output, _ = layer(torch.randn(2, 10, 16))
>>> output.shape, bool(layer.lipschitz_bound(n=10) <= 0.9 * (1 + 1e-6))
(torch.Size([2, 10, 16]), True)
"""

from howsmooth.nn.caps import SpectralCaps
from howsmooth.nn.hosting.replacement import load_replaced, replace_attention, replaced_layers
from howsmooth.nn.invertible.actnorm import ActNorm
from howsmooth.nn.invertible.branches import Attending, Composed, Scaled
from howsmooth.nn.invertible.contractive_mlp import ContractiveMLP
from howsmooth.nn.invertible.fixed_point import DidNotConverge
from howsmooth.nn.invertible.log_determinant import LogDeterminant
from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual
from howsmooth.nn.invertible.transformer import InvertibleTransformer
from howsmooth.nn.layers.attention_layer import AttentionLayer
from howsmooth.nn.layers.contractive_layer import ContractiveL2Attention
from howsmooth.nn.layers.dot_product_layers import (
    CosineAttention,
    DotProductAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from howsmooth.nn.layers.gradient_step_layer import GradientStepAttention
from howsmooth.nn.layers.l2_layer import L2Attention
from howsmooth.nn.layers.lipschitz_norm_layer import LipschitzNormAttention
from howsmooth.nn.monitor import SmoothnessMonitor
from howsmooth.nn.penalties import JacobianPenalty, SoftmaxJacobianPenalty, softmax_jacobian_penalty
from howsmooth.nn.signals import Alarm

__all__ = [
    "ActNorm",
    "Alarm",
    "Attending",
    "AttentionLayer",
    "Composed",
    "ContractiveL2Attention",
    "ContractiveMLP",
    "CosineAttention",
    "DidNotConverge",
    "DotProductAttention",
    "GradientStepAttention",
    "Inversion",
    "InvertibleResidual",
    "InvertibleTransformer",
    "JacobianPenalty",
    "L2Attention",
    "LipschitzNormAttention",
    "LogDeterminant",
    "NormControlledAttention",
    "Scaled",
    "SigmoidAttention",
    "SmoothnessMonitor",
    "SoftmaxJacobianPenalty",
    "SpectralCaps",
    "load_replaced",
    "replace_attention",
    "replaced_layers",
    "softmax_jacobian_penalty",
]
