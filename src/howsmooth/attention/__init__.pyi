from .attention_map import AttentionMap
from .autodiff_maps import GradientStepAttention, LipschitzNormAttention
from .composite_map import ComposedAttention, CrossAttention
from .conversion import as_attention_map
from .dot_product_map import CosineAttention, SelfAttention, SigmoidAttention
from .l2_map import L2SelfAttention
from .masks import Causal, Chunked, DenseBias, LogitBias, Padding, SlidingWindow
from .positions import ALiBi, RelativeBias, Rotary
from .stages import UnitNorm

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
