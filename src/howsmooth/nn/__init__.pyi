from .hosting.replacement import load_replaced, replace_attention, replaced_layers
from .invertible.branches import ContractiveMLP, ScaledBranch
from .invertible.residual import InvertibleResidual
from .invertible.transformer import InvertibleTransformer
from .layers.attention_layer import AttentionLayer
from .layers.dot_product_layers import (
    CosineAttention,
    DotProductAttention,
    LipschitzNormAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from .layers.gradient_step_layer import GradientStepAttention
from .layers.l2_layers import ContractiveL2Attention, L2Attention
from .layers.weight_norms import SpectralCaps
from .monitor import Alarm, SmoothnessMonitor
from .penalties import JacobianPenalty, SoftmaxJacobianPenalty, softmax_jacobian_penalty

__all__ = [
    "Alarm",
    "AttentionLayer",
    "ContractiveL2Attention",
    "ContractiveMLP",
    "CosineAttention",
    "DotProductAttention",
    "GradientStepAttention",
    "InvertibleResidual",
    "InvertibleTransformer",
    "JacobianPenalty",
    "L2Attention",
    "LipschitzNormAttention",
    "NormControlledAttention",
    "ScaledBranch",
    "SigmoidAttention",
    "SmoothnessMonitor",
    "SoftmaxJacobianPenalty",
    "SpectralCaps",
    "load_replaced",
    "replace_attention",
    "replaced_layers",
    "softmax_jacobian_penalty",
]
