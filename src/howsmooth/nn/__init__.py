"""Layers to train with: attention that keeps its Lipschitz promise, called like `torch.nn.MultiheadAttention`.

>>> import torch
>>> from howsmooth.nn import ContractiveL2Attention
>>> layer = ContractiveL2Attention(16, num_heads=4, coefficient=0.9).eval()
>>> output, _ = layer(torch.randn(2, 10, 16))
>>> output.shape, bool(layer.lipschitz_bound(n=10) <= 0.9 * (1 + 1e-6))
(torch.Size([2, 10, 16]), True)
"""

from howsmooth.nn.caps import SpectralCaps
from howsmooth.nn.hosting import load_replaced, replace_attention, replaced_layers
from howsmooth.nn.invertible import (
    ActNorm,
    Attending,
    Composed,
    ContractiveMLP,
    DidNotConverge,
    Inversion,
    InvertibleResidual,
    InvertibleTransformer,
    LogDeterminant,
    Scaled,
)
from howsmooth.nn.layers import (
    AttentionLayer,
    ContractiveL2Attention,
    CosineAttention,
    DotProductAttention,
    GradientStepAttention,
    L2Attention,
    LipschitzNormAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from howsmooth.nn.monitor import SmoothnessMonitor
from howsmooth.nn.penalties import JacobianPenalty, SoftmaxJacobianPenalty, softmax_jacobian_penalty

__all__ = [
    "ActNorm",
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
