from .caps import SpectralCaps
from .hosting.replacement import load_replaced, replace_attention, replaced_layers
from .invertible.branches import ScaledBranch
from .invertible.contractive_mlp import ContractiveMLP
from .invertible.residual import InvertibleResidual
from .invertible.transformer import InvertibleTransformer
from .layers.attention_layer import AttentionLayer
from .layers.contractive_layer import ContractiveL2Attention
from .layers.dot_product_layers import (
    CosineAttention,
    DotProductAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from .layers.gradient_step_layer import GradientStepAttention
from .layers.l2_layer import L2Attention
from .layers.lipschitz_norm_layer import LipschitzNormAttention
from .monitor import SmoothnessMonitor
from .penalties import JacobianPenalty, SoftmaxJacobianPenalty, softmax_jacobian_penalty
from .signals import Alarm

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
