from .attention_map import AttentionMap
from .autodiff_maps import GradientStepAttention, LipschitzNormAttention
from .composite_map import ComposedAttention
from .conversion import as_attention_map
from .cross_attention import CrossAttention
from .dot_product_map import CosineAttention, L2SelfAttention, SelfAttention, SigmoidAttention
from .masks import ALiBi, Causal, Chunked, DenseBias, LogitBias, Padding, RelativeBias, SlidingWindow
from .stages import Rotary, UnitNorm

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
